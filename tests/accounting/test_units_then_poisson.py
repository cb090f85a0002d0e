"""Poisson sampling within random units keeps its amplification, and is priced as a mixture."""

from __future__ import annotations

import math

import pytest

from accounting import (
    MultistageProfile,
    PoissonProfile,
    UnitsThenPoissonProfile,
)

DELTA = 1e-5


def test_poisson_within_random_units_keeps_amplification():
    bound = UnitsThenPoissonProfile(2.0, 1000, unit_prob=0.1, sampling_prob=0.02).epsilon(DELTA)
    without_units = PoissonProfile(2.0, 0.02, 1000).epsilon(DELTA)
    hidden_units = PoissonProfile(2.0, 0.002, 1000).epsilon(DELTA)
    assert bound.lower == pytest.approx(hidden_units.upper, abs=3e-3)
    assert hidden_units.upper <= bound.upper < 0.7 * without_units.upper
    # Drawn without replacement, examples leave a whole unit's trace when their unit is drawn.
    poisson = UnitsThenPoissonProfile(2.0, 1000, unit_prob=0.01, sampling_prob=0.5).epsilon(DELTA)
    assert poisson.upper < MultistageProfile(2.0, 1000, (1, 50), (100, 100)).epsilon(DELTA).lower


def test_poisson_within_known_units_is_a_mixture_over_how_often_the_unit_is_drawn():
    # With known units the number of steps that count is Binomial(T, G): an independent formula.
    steps, unit, rate, sigma, eps = 12, 0.3, 0.2, 1.0, 0.7
    upper = UnitsThenPoissonProfile(sigma, steps, unit, rate).delta(eps).upper
    total = 0.0
    for count in range(1, steps + 1):
        weight = math.comb(steps, count) * unit**count * (1 - unit) ** (steps - count)
        total += weight * PoissonProfile(sigma, rate, count).delta(eps).upper
    assert upper == pytest.approx(total, rel=5e-3)


def test_always_drawing_the_unit_is_plain_poisson():
    bound = UnitsThenPoissonProfile(1.0, 100, 1.0, 0.05).epsilon(DELTA)
    poisson = PoissonProfile(1.0, 0.05, 100).epsilon(DELTA)
    assert bound.upper == pytest.approx(poisson.upper, abs=2e-3)
    assert bound.lower == pytest.approx(poisson.lower, abs=2e-3)


@pytest.mark.parametrize("tail", [1e-14, 1e-3])
def test_a_release_keeps_all_mass_of_both_laws_however_coarse_its_tail(tail):
    (ratio,) = UnitsThenPoissonProfile(2.0, 1, 0.3, 0.2).ratios("upper", 0.01, tail)
    assert ratio.q.sum() + ratio.zero == pytest.approx(1.0, abs=1e-13)
    assert ratio.p.sum() + ratio.infinity == pytest.approx(1.0, abs=1e-13)
    assert min(ratio.q.min(), ratio.p.min()) >= 0
