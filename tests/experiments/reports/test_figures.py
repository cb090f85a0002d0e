"""The figures of a page: every run in them can be told from every other."""

from pathlib import Path

import pytest

from dpsgd import Mechanism
from dpsgd.runs.history import History
from experiments.cli.config import Poisson, TrainConfig
from experiments.finished import FinishedRun
from experiments.reports.figures import curves, looks, quality
from samplers import BallsAndBins, Deterministic
from samplers import Poisson as PoissonSampler

SIZES = (1000, 100, 1)
TERMS = {"adjacency": "zero-out", "unit": "example", "delta": 1e-3}


class Run(FinishedRun):
    """A finished run whose mechanism does not come from a ledger."""

    mechanism = property(lambda self: self.record["mechanism"])


def made(name, sampler, mechanism=None, **record):
    private = mechanism is not None
    ends = (0.9, 1.0) if private else (None, None)
    record = {
        "sampler": sampler,
        "mechanism": mechanism,
        "noise_multiplier": float(private),
        "epsilon_lower": ends[0],
        "epsilon_upper": ends[1],
        "test_auc": 0.7,
        **TERMS,
        **record,
    }
    config = TrainConfig(Path("store"), Poisson(), Path(name), noise_multiplier=1.0)
    return Run(Path(name), config, record, History())


POISSON = Mechanism(PoissonSampler(*SIZES), 5.0, 1.0)
LESS = Mechanism(PoissonSampler(*SIZES), 4.0, 1.0)
BINS = Mechanism(BallsAndBins(*SIZES), 5.0, 1.0)


def labels(figure) -> list[str]:
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def test_runs_of_different_samplers_are_called_by_them():
    runs = {"a": made("a", "poisson", POISSON), "b": made("b", "balls-and-bins", BINS)}
    assert labels(quality(runs)) == labels(curves(runs)) == ["poisson", "balls-and-bins"]


def test_runs_of_one_sampler_are_called_by_their_names():
    runs = {
        "a": made("a", "poisson", POISSON),
        "b": made("b", "poisson", LESS),
        "bins": made("bins", "balls-and-bins", BINS),
        "c": made("c", "poisson"),
        "d": made("d", "poisson", LESS, test_auc=None),
    }
    both = ["a (poisson)", "b (poisson)", "bins (balls-and-bins)"]
    assert labels(quality(runs)) == [*both, "c (poisson), without privacy"]
    priced = {name: run for name, run in runs.items() if run.mechanism is not None}
    assert labels(curves(priced)) == ["a (poisson)", "b, d (poisson)", "bins (balls-and-bins)"]


@pytest.mark.parametrize("count", [2, 9, 32])
def test_no_two_runs_look_alike(count):
    runs = {f"run{i}": made(f"run{i}", "deterministic") for i in range(count)}
    found = looks(runs).values()
    assert len({look.label for look in found}) == count
    assert len({(look.marker, look.fillstyle, look.line) for look in found}) == count


def test_many_runs_of_one_price_share_a_curve_and_the_first_are_named():
    mechanism = Mechanism(Deterministic(*SIZES), 5.0, 1.0)
    runs = {f"run{i}": made(f"run{i}", "deterministic", mechanism) for i in range(6)}
    assert labels(curves(runs)) == ["run0, run1, run2 and 3 more (deterministic)"]
    assert len(labels(quality(runs))) == 6
