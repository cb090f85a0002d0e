"""Models of the table are trained on the rows that it says, once, and held against its bars."""

import math

import numpy as np
import pytest

from experiments.benchmarks import click_models
from experiments.benchmarks.click_models import BARS, FewerRows, Models, Trained, beside_bars
from experiments.tasks.clicks.task import Clicks


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


def made(log_loss, level, auc):
    figures = {"log_loss": log_loss, "predicted_over_observed": level, "auc": auc}
    return Trained({f"test_{name}": x for name, x in figures.items()}, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("private", "holds"),
    [
        ([(0.50, 1.02, 0.75)], [True, True, True]),
        ([(0.49, 1.02, 0.75), (0.53, 1.02, 0.75)], [False, True, True]),
        ([(0.50, 1.06, 0.70)], [True, False, False]),
        ([(0.50, 0.96, 0.74), (0.50, 1.00, 0.73)], [True, True, True]),
    ],
)
def test_a_mean_over_seeds_is_held_against_the_bars(private, holds):
    free = [made(0.4, 1.0, 0.8)]
    rows = beside_bars([made(*x) for x in private], free, "test", "epsilon 1", BARS[1.0])
    held = {row.name.split(",")[0]: row.holds for row in rows if row.holds is not None}
    log_loss, auc, level = held["log loss"], held["AUC"], held["predicted / observed"]
    assert [log_loss, level, auc] == holds


def test_what_a_run_gave_is_written_down_and_it_is_not_made_again(store, tmp_path, monkeypatch):
    asked = []

    def run(task, config, out):
        asked.append((task, config.init_seed))
        metrics = {f"test_{name}": 0.5 for name in click_models.FIGURES}
        return {"metrics": {**metrics, "test_auc": None}, "epsilon_upper": None}

    monkeypatch.setattr(click_models.dpsgd, "run", run)
    task, config = FewerRows(store), click_models.defaults(non_private=True)
    first = Models(task, 2, tmp_path / "written").trained("no privacy", config)
    more = Models(task, 3, tmp_path / "written").trained("no privacy", config)
    assert asked == [(task, seed) for seed in range(3)]
    assert [x.seconds for x in more[:2]] == [x.seconds for x in first]
    assert more[0].epsilon == math.inf
    assert math.isnan(more[0].metrics["test_auc"])
