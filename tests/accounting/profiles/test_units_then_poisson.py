"""Poisson sampling within random units keeps its amplification, and costs as much as a mixture."""

from __future__ import annotations

import math

import pytest

from accounting import (
    PoissonProfile,
    UnitsThenPoissonProfile,
)

DELTA = 1e-5


def test_poisson_within_known_units_is_a_mixture_over_unit_draws():
    # With known units the number of steps that count is Binomial(T, G): an independent formula.
    steps, unit, rate, sigma, eps = 12, 0.3, 0.2, 1.0, 0.7
    upper = UnitsThenPoissonProfile(sigma, steps, unit, rate).delta(eps).upper
    total = 0.0
    for count in range(1, steps + 1):
        weight = math.comb(steps, count) * unit**count * (1 - unit) ** (steps - count)
        total += weight * PoissonProfile(sigma, rate, count).delta(eps).upper
    assert upper == pytest.approx(total, rel=5e-3)
