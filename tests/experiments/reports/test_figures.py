"""The figures of a page: every run in them can be told from every other."""

from pathlib import Path

import pytest

from dpsgd import Mechanism, RunSpec
from dpsgd.runs.history import History
from dpsgd.runs.result import FinishedRun
from experiments.reports.figures import curves, looks, quality
from experiments.reports.metrics import Headline
from samplers import Deterministic, Poisson

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
        "metrics": {"test_auc": 0.7},
        **TERMS,
        **record,
    }
    config = RunSpec.of(Poisson(*SIZES), noise_multiplier=1.0)
    return Run(Path(name), {}, config, record, History())


AUC = Headline("test_auc", "higher")
POISSON = Mechanism(Poisson(*SIZES), 5.0, 1.0)
LESS = Mechanism(Poisson(*SIZES), 4.0, 1.0)
FIXED = Mechanism(Deterministic(*SIZES), 5.0, 1.0)  # whose profile is the cheapest


def labels(figure) -> list[str]:
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def test_runs_of_different_samplers_are_called_by_them():
    runs = {"a": made("a", "poisson", POISSON), "b": made("b", "balls-and-bins", FIXED)}
    assert labels(quality(runs, AUC)) == labels(curves(runs)) == ["poisson", "balls-and-bins"]


@pytest.mark.long
def test_runs_of_one_sampler_are_called_by_their_names():
    runs = {
        "a": made("a", "poisson", POISSON),
        "b": made("b", "poisson", LESS),
        "bins": made("bins", "balls-and-bins", FIXED),
        "c": made("c", "poisson"),
        "d": made("d", "poisson", LESS, metrics={"test_auc": None}),
    }
    both = ["a (poisson)", "b (poisson)", "bins (balls-and-bins)"]
    assert labels(quality(runs, AUC)) == [*both, "c (poisson), without privacy"]
    priced = {name: run for name, run in runs.items() if run.mechanism is not None}
    assert labels(curves(priced)) == ["a (poisson)", "b, d (poisson)", "bins (balls-and-bins)"]


@pytest.mark.parametrize("count", [2, 9, 32])
def test_no_two_runs_look_alike(count):
    runs = {f"run{i}": made(f"run{i}", "deterministic") for i in range(count)}
    found = looks(runs).values()
    assert len({look.label for look in found}) == count
    assert len({(look.marker, look.fillstyle, look.line) for look in found}) == count


def test_many_runs_of_one_price_share_a_curve_and_the_first_are_named():
    runs = {f"run{i}": made(f"run{i}", "deterministic", FIXED) for i in range(6)}
    assert labels(curves(runs)) == ["run0, run1, run2 and 3 more (deterministic)"]
    assert len(labels(quality(runs, AUC))) == 6


def test_the_axis_is_called_by_the_metric():
    runs = {"a": made("a", "deterministic", FIXED, metrics={"test_rmse": 1.5})}
    figure = quality(runs, Headline("test_rmse", "lower"))
    assert figure.axes[0].get_ylabel() == "test RMSE"
    assert figure.axes[0].lines[-1].get_ydata() == [1.5]


def test_where_what_is_protected_differs_each_run_says_it():
    runs = {
        "a": made("a", "poisson", POISSON),
        "b": made("b", "deterministic", FIXED, unit="user"),
    }
    labelled = ["poisson, unit: one example", "deterministic, unit: one user"]
    assert labels(quality(runs, AUC)) == labels(curves(runs)) == labelled
