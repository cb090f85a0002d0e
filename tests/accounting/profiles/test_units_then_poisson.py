"""Poisson sampling within random units keeps its amplification, and costs as much as a mixture."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting import (
    PoissonProfile,
    UnitsThenPoissonProfile,
)

DELTA = 1e-5


def test_poisson_within_known_units_is_a_mixture_over_how_often_the_unit_is_drawn():
    # With known units the number of steps that count is Binomial(T, G): an independent formula.
    steps, unit, rate, sigma, eps = 12, 0.3, 0.2, 1.0, 0.7
    upper = UnitsThenPoissonProfile(sigma, steps, unit, rate).delta(eps).upper
    total = 0.0
    for count in range(1, steps + 1):
        weight = math.comb(steps, count) * unit**count * (1 - unit) ** (steps - count)
        total += weight * PoissonProfile(sigma, rate, count).delta(eps).upper
    assert upper == pytest.approx(total, rel=5e-3)


def delta_with_siblings(sigma, unit, rate, siblings, eps):
    """Delta of one step, by quadrature in the plane: the leaf is e_1, its siblings are e_2."""
    reach = 9.0 * sigma
    x, dx = np.linspace(-reach, 1.0 + reach, 8000, retstep=True)
    y, dy = np.linspace(-reach, siblings + reach, 200, retstep=True)
    took_part = stats.norm.pdf(x, 1.0, sigma)
    not_there = stats.norm.pdf(x, 0.0, sigma)
    leaf = rate * took_part + (1.0 - rate) * not_there
    law = stats.binom.pmf(np.arange(siblings + 1), siblings, rate)
    drawn = law @ stats.norm.pdf(y[None, :], np.arange(siblings + 1)[:, None], sigma)
    other = (1.0 - unit) * np.outer(not_there, stats.norm.pdf(y, 0.0, sigma))
    p = unit * np.outer(leaf, drawn) + other
    q = unit * np.outer(not_there, drawn) + other
    excess = [np.maximum(a - math.exp(eps) * b, 0.0).sum() for a, b in ((p, q), (q, p))]
    return max(excess) * dx * dy


@pytest.mark.parametrize("siblings", [0, 1, 30])
@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_siblings_that_show_the_draw_bring_the_truth_near_to_the_upper_end(siblings, eps):
    found = UnitsThenPoissonProfile(1.0, 1, 0.3, 0.5, siblings).delta(eps)
    truth = delta_with_siblings(1.0, 0.3, 0.5, siblings, eps)
    assert found.lower <= truth * (1 + 1e-6)
    assert truth <= found.upper * (1 + 1e-6)
    if siblings == 30:
        assert found.lower > 0.97 * found.upper
    else:
        assert "drawn" in found.note
