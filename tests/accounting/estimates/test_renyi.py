"""Rényi divergences and the lower tail, against quadrature and the certified profile."""

import math

import numpy as np
import pytest
from scipy import stats

from accounting import BallsAndBinsProfile, epsilon
from accounting.estimates.renyi import renyi_divergence
from accounting.estimates.tails import add_delta_upper_bound, truncated_tail
from accounting.profiles.max_events import Epoch


def log_moment(power, sigma):
    """Returns log E[X^power] of two bins."""
    z = np.linspace(-12.0, 12.0, 1201)
    mass, value = stats.norm.pdf(z) * (z[1] - z[0]), np.exp(z / sigma - 0.5 / sigma**2)
    return math.log(mass @ np.add.outer(value / 2, value / 2) ** power @ mass)


@pytest.mark.parametrize(("sigma", "order"), [(1.0, 3), (1.5, 2)])
def test_a_divergence_bounds_both_directions_and_is_near_the_larger(sigma, order):
    both = [log_moment(power, sigma) / (order - 1) for power in (order, 1 - order)]
    found = renyi_divergence(order, Epoch(sigma, 2))
    assert max(both) <= found <= 1.001 * max(both)


@pytest.mark.parametrize("order", [2, 9, 40])
def test_one_bin_is_one_gaussian_release_and_epochs_add(order):
    found = renyi_divergence(order, Epoch(0.8, 1))
    assert found == pytest.approx(order / (2 * 0.8**2), rel=1e-6)
    little = renyi_divergence(order, Epoch(0.02, 100))
    assert order / (2 * 0.02**2) * 0.9 < little <= order / (2 * 0.02**2)
    several = renyi_divergence(order, Epoch(0.8, 7), 3)
    assert several == 3 * renyi_divergence(order, Epoch(0.8, 7))


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 1_000), (3.0, 20)])
def test_the_certified_epsilon_is_never_above_that_of_all_divergences(sigma, bins):
    delta, best = 1e-6, math.inf
    for order in (2, 3, 5, 9, 17, 33, 65, 129):
        cost = renyi_divergence(order, Epoch(sigma, bins))
        rest = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, cost + rest)
    assert epsilon(BallsAndBinsProfile(sigma, bins), delta).upper < best


@pytest.mark.parametrize("bins", [1, 2, 3])
def test_the_lower_tail_bounds_the_direction_add(quadrature, bins):
    for at in (0.2, 1.0, 3.0):
        truth = quadrature(at, 0.7, bins, "add")
        found = add_delta_upper_bound(at, Epoch(0.7, bins))
        assert truth <= found <= 1.0
    assert add_delta_upper_bound(2.0, Epoch(0.5, 4_492)) < 1e-100


def test_an_order_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="order must be at least 2"):
        renyi_divergence(1, Epoch(1.0, 2))


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 1), (0.7, 30), (2.0, 200)])
@pytest.mark.parametrize("ceiling", [1.5, 4.0])
def test_the_upper_tail_is_bounded_where_no_coordinate_is_large(sigma, bins, ceiling):
    values = np.array([0.3, 0.9, 1.1, 1.5, 4.0, 30.0])
    found = truncated_tail(values, Epoch(sigma, bins), ceiling)
    z = np.random.default_rng(0).standard_normal((20_000, bins))
    ratio = np.exp(z / sigma - 0.5 / sigma**2).mean(axis=1)
    ratio = np.where(z.max(axis=1) <= ceiling, ratio, 0.0)
    seen = np.array([np.sum(ratio >= x) for x in values])
    assert np.all(stats.binom.sf(seen - 1, ratio.size, np.minimum(found, 1.0)) > 1e-8)
    assert np.all(np.diff(found) <= 0)
    far = truncated_tail(np.array([20.0]), Epoch(0.5, 4_492), 5.0)
    assert far[0] < 1e-25
