"""A sweep's finished runs without the training: reports are made up."""

import sys
from pathlib import Path

import pytest

from experiments.sweeps import engine, workers
from experiments.sweeps.config import Grid, Sweep
from experiments.sweeps.plan import plan
from experiments.sweeps.summary import summarize

HERE = Path(__file__).parent
for place in (HERE, HERE.parents[1] / "dpsgd" / "runs"):  # of `stored_task` and `tiny_task`
    sys.path.insert(0, str(place))

METRICS = ("validation_auc", "test_auc", "test_log_loss")
CLICKS = {
    "name": "clicks",
    "settings": {"data": "store"},
    "description": {"headline": "test_auc", "better": "higher"},
}


@pytest.fixture
def in_this_process(monkeypatch):
    """Has a sweep's runs carried out one after another, where a test can see them."""

    def carry_out(todo, number, progress):
        assert number >= 1
        return ((one, workers._outcome(one, progress)) for one in todo)

    monkeypatch.setattr(engine, "carry_out", carry_out)
    monkeypatch.setattr(engine, "most_useful", lambda: 1)


@pytest.fixture
def summary_of():
    """Returns the summary of a sweep whose runs report `auc(run, metric)`.

    A run costs the epsilon that it was to cost, and `excess`; or 1.25, where none was asked for.
    """

    def make(
        auc,
        *grids,
        repetitions=2,
        insecure_seeds=(),
        excess=0.0,
        metrics=METRICS,
        task=CLICKS,
        unit="user",
        **more,
    ):
        count = None if insecure_seeds else repetitions
        sweep = Sweep(
            "A title",
            tuple(Grid(**grid) for grid in grids),
            repetitions=count,
            insecure_seeds=insecure_seeds,
            **more,
        )
        finished = []
        for run in plan(sweep, Path("runs"), "sweep"):
            sigma = run.cell.noise_multiplier or 0.0
            if run.cell.target_epsilon:
                sigma = 2.0 / run.cell.target_epsilon
            if run.cell.target_advantage:
                sigma = 0.4 / run.cell.target_advantage
            upper = (run.cell.target_epsilon or 1.25) + excess
            price = {"epsilon_lower": 0.8 * upper, "epsilon_upper": upper}
            price["attack_advantage_upper"] = (run.cell.target_advantage or 0.5) + excess
            report = {
                "metrics": {
                    **{metric: auc(run, metric) for metric in metrics},
                    "test_num_examples": 910,
                },
                "noise_multiplier": sigma,
                "noise": {"name": "independent"},
                "epsilon_lower": None,
                "epsilon_upper": None,
                "delta": 1.0001e-5,
                "adjacency": "zero-out",
                "unit": unit(run) if callable(unit) else unit,
                "num_params": 1234,
                "num_examples": 5678,
                "not_covered": ["the weather"],
                **(price if sigma and not insecure_seeds else {}),
            }
            finished.append((run, report))
        return summarize(sweep, task, finished)

    return make
