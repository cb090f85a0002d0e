"""Models with lazy tables are held against models by Adam, seed by seed, at the same guarantee."""

import math

import pytest

from dpsgd import Dense, Lazy
from dpsgd.runs.job import rows_of
from dpsgd.runs.resolve import choose
from experiments.benchmarks import tables_models
from experiments.benchmarks.click_models import FewerRows, Models, Trained
from experiments.benchmarks.tables_models import SIZES, SURELY, Sizes
from samplers import Population


def made(auc):
    metrics = {f"{split}_{figure}": auc for split in ("test", "validation") for figure in FIGURES}
    return Trained(metrics, 8.0, 2.0, 1.0)


FIGURES = tables_models.SHOWN


@pytest.mark.parametrize("part", SIZES)
def test_both_kinds_are_asked_for_the_same_but_for_their_tables(part, store):
    asked = [SIZES[part].config(3.0, tables) for tables in ("lazy", "dense")]
    rows = rows_of(FewerRows(store))[0], Population(88_000)
    lazy, dense = (choose(spec, FewerRows(store), rows)[0] for spec in asked)
    assert (type(lazy.tables), type(dense.tables)) == (Lazy, Dense)
    assert lazy.tables.learning_rate is not None
    for name in ("sampler", "privacy", "l2_clip_norm", "optimizer"):
        assert getattr(lazy, name) == getattr(dense, name)
    assert (lazy.sampler.batch_size, lazy.sampler.epochs) == {
        "models": (1024, 10),
        "defaults": (4096, 30),
    }[part]


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
    monkeypatch.setattr(tables_models, "SEEDS", seeds)
    monkeypatch.setattr(
        Models,
        "trained",
        lambda self, name, config: [made(x) for x in given[config.options()["tables"]]],
    )
    found = {
        row.name: row
        for row in tables_models.rows(Models(FewerRows(store), 3), Sizes(10, 2), [8.0])
    }
    name = "AUC, lazy tables minus Adam alone, test rows, epsilon 8, batch 10, 2 epochs"
    assert found[f"{name}, 3 seeds"].value == pytest.approx(by)
    assert found[f"standard error of {name}, 3 seeds"].value == pytest.approx(1e-3 / math.sqrt(3))
    surely = found[f"{name}, less 2 standard errors"]
    assert surely.value == pytest.approx(by - 2e-3 / math.sqrt(3))
    assert surely.holds is holds
    assert surely.bar == ("" if holds is None else f">= {SURELY:g}")


@pytest.mark.long
def test_models_of_generated_rows_are_trained_and_their_figures_kept(store, tmp_path, monkeypatch):
    models = Models(FewerRows(store), 2, tmp_path / "written")
    first = list(tables_models.rows(models, Sizes(40, 2), [8.0]))
    assert all(row.value is not None for row in first)
    assert len(list((tmp_path / "written").iterdir())) == 4
    monkeypatch.delattr("dpsgd.run")
    assert list(tables_models.rows(models, Sizes(40, 2), [8.0])) == first
