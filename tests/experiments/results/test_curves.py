"""The curves of a page: every run in them can be told from every other."""

from pathlib import Path

import pytest

from dpsgd import Mechanism, RunSpec
from dpsgd.runs.history import History
from dpsgd.runs.result import FinishedRun
from experiments.results.draw import curves
from samplers import Deterministic, Poisson

SIZES = (1000, 100, 1)
FIXED = Mechanism(Deterministic(*SIZES), 5.0, 1.0)  # whose profile is the cheapest
OTHER = Mechanism(Deterministic(*SIZES), 4.0, 1.0)


class Run(FinishedRun):
    """A finished run whose mechanism does not come from a ledger."""

    mechanism = property(lambda self: self.record["mechanism"])


def made(name, mechanism, unit="example"):
    record = {"sampler": "deterministic", "mechanism": mechanism, "epsilon_upper": 1.0}
    record |= {"adjacency": "zero-out", "unit": unit, "delta": 1e-3}
    spec = RunSpec.of(Poisson(*SIZES), noise_multiplier=1.0)
    return Run(Path(name), {}, spec, record, History())


RUNS = {
    "each mechanism has a curve": (
        {"a": made("a", FIXED), "b": made("b", OTHER)},
        ["a (deterministic)", "b (deterministic)"],
    ),
    "runs of one mechanism share a curve": (
        {f"run{i}": made(f"run{i}", FIXED) for i in range(6)},
        ["run0, run1, run2 and 3 more (deterministic)"],
    ),
    "units that differ are said": (
        {"a": made("a", FIXED), "b": made("b", FIXED, unit="user")},
        ["a (deterministic, unit: one example)", "b (deterministic, unit: one user)"],
    ),
}


@pytest.mark.parametrize(("runs", "labels"), RUNS.values(), ids=RUNS)
def test_every_curve_names_its_runs(runs, labels):
    [axes] = curves(runs).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
