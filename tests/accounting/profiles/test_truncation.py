"""Claims about the cost of a maximum batch size."""

import math

import mpmath
import numpy as np
import pytest

from accounting import Bound, GaussianProfile, PoissonProfile
from accounting.profiles.truncation import (
    TruncatedProfile,
    log_overflow_probability,
    smallest_max_batch_size,
)

mpmath.mp.dps = 60


def exact_log_tail(n: int, rate: float, maximum: int) -> mpmath.mpf:
    q, k = mpmath.mpf(rate), maximum + 1
    term = mpmath.exp(
        mpmath.loggamma(n + 1)
        - mpmath.loggamma(k + 1)
        - mpmath.loggamma(n - k + 1)
        + k * mpmath.log(q)
        + (n - k) * mpmath.log1p(-q)
    )
    total = mpmath.mpf(0)
    while k <= n and term > total * mpmath.mpf(10) ** -40:
        total += term
        term *= mpmath.mpf(n - k) / (k + 1) * q / (1 - q)
        k += 1
    return mpmath.log(total)


@pytest.mark.parametrize(
    ("n", "rate", "maximum"),
    [
        (10, 0.5, 9),
        (10, 0.5, 5),
        (100, 0.01, 99),
        (1000, 0.3, 350),
        (100_000, 1e-3, 160),
        (37_000_000, 1024 / 37e6, 1024 + 7 * 32),
        (37_000_000, 65536 / 37e6, 65536 + 3 * 256),
        (37_000_000, 1024 / 37e6, 8000),
        (2_000_000_000, 1e-6, 2600),
    ],
)
def test_the_tail_is_bounded_from_above_to_a_hundred_millionth(n, rate, maximum):
    exact = exact_log_tail(n, rate, maximum)
    bound = log_overflow_probability(n, rate, maximum)
    assert exact <= bound <= exact + 1e-8


@pytest.mark.parametrize(
    ("n", "rate", "maximum", "log_tail"),
    [(5, 0.2, 5, -math.inf), (5, 0.0, 0, -math.inf), (5, 1.0, 4, 0.0), (100, 0.5, 10, 0.0)],
)
def test_edges_are_exact_or_trivial(n, rate, maximum, log_tail):
    assert log_overflow_probability(n, rate, maximum) == log_tail


@pytest.mark.parametrize(
    ("n", "rate", "steps"), [(1000, 0.1, 10), (37_000_000, 1024 / 37e6, 36_000)]
)
def test_the_smallest_maximum_suffices_and_one_less_does_not(n, rate, steps):
    wanted = math.log(1e-5 * 2.7e-8)
    best = smallest_max_batch_size(n, rate, steps, wanted)
    assert math.log(steps) + log_overflow_probability(n, rate, best) <= wanted
    assert math.log(steps) + log_overflow_probability(n, rate, best - 1) > wanted


def test_an_impossible_overflow_costs_nothing():
    inner = GaussianProfile(1.0)
    assert TruncatedProfile(inner, 10, -math.inf).epsilon(1e-6) == inner.epsilon(1e-6)
    assert TruncatedProfile(inner, 10, -math.inf).delta(1.0) == inner.delta(1.0)


def test_delta_is_at_most_the_formula_and_falls_in_epsilon_although_the_formula_does_not():
    inner, log_tail = GaussianProfile(1.0), math.log(1e-7)
    profile = TruncatedProfile(inner, 10, log_tail)
    grid = np.linspace(0.0, 12.0, 60).tolist()
    uppers = [profile.delta(e).upper for e in grid]
    formula = [inner.delta(e).upper + (1 + math.exp(e)) * 1e-6 for e in grid]
    assert all(u <= f * (1 + 1e-9) for u, f in zip(uppers, formula, strict=True))
    assert min(formula) <= min(uppers) * (1 + 1e-9)
    assert formula[-1] > 10 * uppers[-1]


def test_both_ends_move_outward_by_the_cost():
    inner = GaussianProfile(1.0)
    plain, cut = inner.delta(1.0), TruncatedProfile(inner, 100, math.log(1e-8)).delta(1.0)
    cost = (1 + math.e) * 1e-6
    assert cut.upper == pytest.approx(plain.upper + cost, rel=1e-9)
    assert cut.lower == pytest.approx(plain.lower - cost, rel=1e-9)


def test_a_cap_that_overflows_too_often_gives_infinity_and_says_why():
    bound = TruncatedProfile(GaussianProfile(1.0), 565, math.log(1e-3)).epsilon(2.7e-8)
    assert bound.upper == math.inf
    assert "raise the maximum batch size" in bound.note


def test_confidence_is_kept():
    class Estimate:
        def delta(self, epsilon: float, tolerance: float = 1e-3) -> Bound:
            return Bound(1e-6, 2e-6, 0.9)

        def epsilon(self, delta: float, tolerance: float = 1e-3) -> Bound:
            return Bound(0.5, 0.6, 0.9)

    profile = TruncatedProfile(Estimate(), 10, -60.0)
    assert profile.delta(1.0).confidence == 0.9
    assert profile.epsilon(1e-5).confidence == 0.9


@pytest.mark.parametrize(
    "profile", [PoissonProfile(51.6, 2.1e-7, 20), GaussianProfile(20.0)], ids=str
)
@pytest.mark.parametrize("epsilon", [9.0, 700.0, 2570.0])
def test_a_smaller_epsilon_bounds_delta_where_the_cut_costs_too_much(profile, epsilon):
    """What is (eps', delta)-DP is (eps, delta)-DP; at 0 the cut costs least."""
    cut = TruncatedProfile(profile, 20, -8.308)
    bound, at_0 = cut.delta(epsilon), profile.delta(0.0).upper + 40.0 * math.exp(-8.308)
    assert bound.upper <= at_0 * (1.0 + 1e-6)
    assert "overflows" in bound.note
