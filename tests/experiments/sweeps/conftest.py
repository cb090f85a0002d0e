"""A sweep's finished runs without the training: reports are made up."""

from pathlib import Path

import pytest

from experiments.sweeps.config import Grid, Sweep
from experiments.sweeps.plan import plan
from experiments.sweeps.summary import METRICS, summarize


@pytest.fixture
def summary_of():
    """Returns the summary of a sweep whose runs report `auc(run, metric)`.

    A run costs the epsilon that it was to cost, and `excess`; or 1.25, where none was asked for.
    """

    def make(auc, *grids, repetitions=2, insecure_seeds=(), excess=0.0):
        count = None if insecure_seeds else repetitions
        sweep = Sweep("A title", tuple(Grid(**grid) for grid in grids), count, insecure_seeds)
        finished = []
        for run in plan(sweep, Path("store"), Path("runs"), "sweep"):
            sigma = run.cell.noise_multiplier or 0.0
            if run.cell.target_epsilon:
                sigma = 2.0 / run.cell.target_epsilon
            upper = (run.cell.target_epsilon or 1.25) + excess
            price = {"epsilon_lower": 0.8 * upper, "epsilon_upper": upper}
            report = {
                **{metric: auc(run, metric) for metric in METRICS},
                "noise_multiplier": sigma,
                "epsilon_lower": None,
                "epsilon_upper": None,
                "delta": 1.0001e-5,
                "adjacency": "zero-out",
                "unit": "user",
                "num_params": 1234,
                "num_examples": 5678,
                "test_num_examples": 910,
                "not_covered": ["the weather"],
                **(price if sigma and not insecure_seeds else {}),
            }
            finished.append((run, report))
        return summarize(sweep, Path("store"), finished)

    return make
