"""Models on real rows are trained as their setting says, once, and held against their bars."""

import math

import numpy as np
import pytest

from dpsgd import Lazy
from dpsgd.runs.job import rows_of
from dpsgd.runs.resolve import choose
from dpsgd.runs.spec import Dense
from experiments.benchmarks import models
from experiments.benchmarks.models import (
    FewerRows,
    Models,
    asked_for,
    beside_bars,
    defaults,
    lazy_and_dense,
)
from experiments.tasks.clicks.task import Clicks
from samplers import Population


@pytest.mark.long
def test_rows_that_are_kept_aside_are_not_trained_on_and_evaluated(store):
    whole, fewer = Clicks(store), FewerRows(store, kept_aside=30)
    rows, kept = whole.columns(), fewer.columns()
    n = len(rows["label"])
    assert all(np.array_equal(kept[name], rows[name][: n - 30]) for name in rows)
    params = whole.init(0)
    metrics = fewer.metrics(params)
    assert metrics["kept_num_examples"] == 30
    of_kept = whole.evaluate(params, [{name: x[n - 30 :] for name, x in rows.items()}])
    assert metrics == whole.metrics(params) | {f"kept_{name}": x for name, x in of_kept.items()}
    assert FewerRows(store).metrics(params).keys() == whole.metrics(params).keys()
    with pytest.raises(ValueError, match="keep fewer"):
        FewerRows(store, kept_aside=n).columns()


NAMES = ["log loss", "predicted / observed", "AUC", "log loss over that without privacy"]


def made(log_loss, level, auc):
    return {"test_log_loss": log_loss, "test_predicted_over_observed": level, "test_auc": auc}


@pytest.mark.parametrize(
    ("private", "holds"),
    [
        ([(0.50, 1.02, 0.75)], [True, True, True, True]),
        ([(0.49, 1.02, 0.75), (0.53, 1.02, 0.75)], [False, True, True, False]),
        ([(0.50, 1.06, 0.70)], [True, False, False, True]),
        ([(0.50, 0.96, 0.74), (0.50, 1.00, 0.733)], [True, True, True, True]),
    ],
)
def test_a_mean_over_seeds_is_held_against_the_bars(private, holds):
    rows = beside_bars([made(*x) for x in private], [made(0.49, 1.0, 0.8)], "test", 1.0)
    held = {row.name.split(",")[0]: row.holds for row in rows if row.holds is not None}
    assert [held[name] for name in NAMES] == holds


def test_what_a_run_gave_is_written_down_and_it_is_not_made_again(store, tmp_path, monkeypatch):
    asked = []

    def run(task, spec, out):
        asked.append((task, spec.options()["init_seed"]))
        metrics = {f"test_{name}": 0.5 for name in models.SHOWN}
        return {"metrics": {**metrics, "test_log_loss": None}, "epsilon_upper": None}

    monkeypatch.setattr(models.dpsgd, "run", run)
    task, spec = FewerRows(store), defaults(non_private=True)
    first = Models(task, 2, tmp_path / "written").trained("no privacy", spec)
    more = Models(task, 3, tmp_path / "written").trained("no privacy", spec)
    assert asked == [(task, seed) for seed in range(3)]
    assert [x["seconds"] for x in more[:2]] == [x["seconds"] for x in first]
    assert more[0]["epsilon"] == math.inf
    assert math.isnan(more[0]["test_log_loss"])


@pytest.mark.parametrize(("batch_size", "epochs"), [(1024, 10), (None, None)])
def test_both_kinds_are_asked_for_the_same_but_for_their_tables(batch_size, epochs, store):
    asked = [asked_for(3.0, tables, batch_size, epochs) for tables in ("lazy", "dense")]
    rows = rows_of(FewerRows(store))[0], Population(88_000)
    lazy, dense = (choose(spec, FewerRows(store), rows)[0] for spec in asked)
    assert (type(lazy.tables), type(dense.tables)) == (Lazy, Dense)
    assert lazy.tables.learning_rate is not None
    for name in ("sampler", "privacy", "l2_clip_norm", "optimizer"):
        assert getattr(lazy, name) == getattr(dense, name)
    chosen = lazy.sampler.batch_size, lazy.sampler.epochs
    assert chosen == ((4096, 30) if batch_size is None else (batch_size, epochs))


@pytest.mark.parametrize(
    ("by", "seeds", "holds"),
    [(0.0, 3, True), (-0.0015, 3, True), (-0.0025, 3, False), (-0.0025, 4, None)],
)
def test_the_bar_is_on_the_mean_difference_of_enough_seeds_less_two_standard_errors(
    by, seeds, holds, store, monkeypatch
):
    dense = [0.70, 0.72, 0.74]
    lazy = [auc + by + error for auc, error in zip(dense, (-0.001, 0.0, 0.001), strict=True)]
    given = {"lazy": lazy, "dense": dense}
    splits = [f"{split}_{name}" for split in ("test", "validation") for name in models.SHOWN]
    monkeypatch.setattr(models, "SEEDS", seeds)
    monkeypatch.setattr(
        Models,
        "trained",
        lambda self, name, spec: [
            dict.fromkeys([*splits, "cpu_seconds"], x) for x in given[spec.options()["tables"]]
        ],
    )
    rows = {row.name: row for row in lazy_and_dense(Models(FewerRows(store), 3), 10, 2)}
    name = "AUC, lazy tables minus Adam alone, test rows, epsilon 8, batch 10, 2 epochs"
    found = rows[f"{name}, 3 seeds"]
    assert found.value == pytest.approx(by)
    assert found.error == pytest.approx(1e-3 / math.sqrt(3))
    surely = rows[f"{name}, less 2 standard errors"]
    assert surely.value == pytest.approx(by - 2e-3 / math.sqrt(3))
    assert surely.holds is holds
    assert surely.bar == ("" if holds is None else f">= {models.SURELY:g}")


@pytest.mark.long
def test_models_with_lazy_tables_are_trained_and_their_figures_kept(store, tmp_path, monkeypatch):
    trained = Models(FewerRows(store), 1, tmp_path / "written")
    first = list(lazy_and_dense(trained, 40, 2))
    assert all(row.value is not None for row in first)
    assert len(list((tmp_path / "written").iterdir())) == 6
    monkeypatch.delattr("dpsgd.run")
    assert list(lazy_and_dense(trained, 40, 2)) == first
