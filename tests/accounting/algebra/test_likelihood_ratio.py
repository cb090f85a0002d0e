"""Claims about the algebra: it keeps mass and mean, brackets the truth, and keeps its tails."""

import math
from dataclasses import replace

import numpy as np
import pytest

from accounting import GaussianProfile
from accounting.algebra.lower import LowerRatio
from accounting.algebra.upper import UpperRatio

KINDS = [LowerRatio, UpperRatio]


def total_masses(ratio):
    zero, infinity = (getattr(ratio, name, 0.0) for name in ("zero", "infinity"))
    return ratio.q.sum() + zero, ratio.p.sum() + infinity


def bracket(make, epsilon):
    low, high = make(LowerRatio), make(UpperRatio)
    return [(getattr(low, d)(epsilon), getattr(high, d)(epsilon)) for d in ("remove", "add")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda kind: kind.gaussian(0.5, 0.05),
        lambda kind: kind.gaussian(1.0, 0.05).average(37),
        lambda kind: kind.gaussian(2.0, 0.05).average(24, (0.05, 0.05, 0.025, 0.025, 0.0125)),
        lambda kind: kind.subsampled_gaussian(0.7, 1e-3, 1e-3),
        lambda kind: replace(kind.gaussian(1.0, 0.05), tail=1e-6).trim(),
    ],
    ids=["gaussian", "average", "refined", "subsampled", "trim"],
)
def test_no_operation_loses_mass_under_either_law(make, kind):
    q, p = total_masses(make(kind))
    assert q == pytest.approx(1.0, abs=1e-11)
    assert p == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_very_many_bins_do_not_overflow(kind):
    with np.errstate(over="raise"):
        masses = total_masses(kind.gaussian(1.0, 0.2).average(2**31))
    assert masses == pytest.approx((1.0, 1.0), abs=1e-3)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 10.0])
def test_one_release_brackets_the_closed_form_in_both_directions(sigma, epsilon):
    exact = GaussianProfile(sigma).delta(epsilon)
    if exact.upper < 1e-38:
        pytest.skip("under the mass at which tails are cut")
    for low, high in bracket(lambda kind: kind.gaussian(sigma, 0.02 / sigma), epsilon):
        assert low <= exact.upper
        assert exact.lower <= high
        assert high - low <= 0.05 * high


POINTS = [(0.5, 1.0), (0.5, 12.0), (1.0, 0.5), (1.0, 4.0), (2.0, 1.0), (2.0, 3.5)]


@pytest.mark.short("0.5-12.0-2", "1.0-4.0-2", "2.0-3.5-2", "1.0-0.5-3")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("sigma", "epsilon"), POINTS)
def test_averages_bracket_quadrature_and_converge_to_it(quadrature, count, sigma, epsilon):
    exact = [quadrature(epsilon, sigma, count, way) for way in ("remove", "add")]
    step = 4e-3 / max(1.0, sigma)
    brackets = bracket(lambda kind: kind.gaussian(sigma, step).average(count), epsilon)
    for truth, (low, high) in zip(exact, brackets, strict=True):
        if truth < 1e-35:
            continue
        assert low <= truth * (1 + 1e-9)
        assert truth <= high * (1 + 1e-9)
        assert high - low <= 2e-3 * truth


@pytest.mark.parametrize("kind", KINDS)
def test_directions_differ_where_the_true_ones_do(kind):
    ratio = kind.subsampled_gaussian(0.5, 0.01, 0.002)
    assert ratio.remove(1.0) > 1e-4
    # Without the example P's density is at least (1 - q) Q's: log(1/(1-q)) is the largest loss.
    assert ratio.add(0.02) <= 1e-12


def test_laws_of_discrete_outcomes_are_bracketed():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    for epsilon in (0.0, 0.5, 2.0):
        exact = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        low, high = bracket(lambda kind: kind.from_masses(p, q, 0.01), epsilon)[0]
        assert low <= exact <= high <= low + 0.01


@pytest.mark.short("0.055-*")
@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(0.055, 323.00365), (0.06, 299.7718), (0.05, 330.0), (0.04, 500.0)]
)
def test_bounds_hold_at_ratios_above_1e130_where_q_underflows(quadrature, sigma, epsilon):
    truth = quadrature(epsilon, sigma, 2, "remove")
    (low, high), _ = bracket(lambda kind: kind.gaussian(sigma, 0.01).average(2), epsilon)
    assert 0.99 * truth <= low <= truth * (1 + 1e-9)
    assert truth * (1 - 1e-9) <= high <= 1.01 * truth


@pytest.mark.parametrize("kind", KINDS)
def test_one_law_of_masses_under_1e140_is_not_void(kind):
    p, q = np.array([1.0, 1e-200]), np.array([1e-200, 1.0])
    ratio = kind.from_masses(p, q, 0.01)
    assert ratio.remove(440.0) == pytest.approx(1.0, abs=1e-6)
    assert ratio.add(440.0) == pytest.approx(1.0, abs=1e-6)
    assert ratio.remove(470.0) <= 1e-280
