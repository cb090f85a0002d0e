"""Events of the maximum prove lower bounds: below the truth, and the best of their kind."""

import math

import numpy as np
import pytest
from scipy.special import log_ndtr

from accounting import GaussianProfile
from accounting.max_events import Epoch
from experiments.papers.max_events import max_event_lower_bound

DIRECTIONS = ["remove", "add"]


@pytest.mark.parametrize("bins", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 2.0, 6.0])
def test_max_event_bound_is_below_truth_and_exact_for_one_bin(quadrature, bins, sigma, epsilon):
    truth = max(quadrature(epsilon, sigma, bins, direction) for direction in DIRECTIONS)
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins))
    assert bound <= truth * (1 + (1e-3 if bins == 3 else 1e-6))
    if bins == 1:
        assert bound == pytest.approx(truth, rel=1e-6)
    assert bound > 0.3 * truth


@pytest.mark.parametrize("shifts", [(1.0, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize(("sigma", "bins", "epsilon"), [(0.5, 100, 1.0), (0.4, 5000, 6.0)])
def test_max_event_bound_is_the_best_event_of_a_fine_search(shifts, sigma, bins, epsilon):
    c = np.linspace(-10 * sigma, 2 + 10 * sigma, 400_001)
    p, q = (-np.expm1(log_ndtr((c - s) / sigma) + (bins - 1) * log_ndtr(c / sigma)) for s in shifts)
    best = max(np.max(p - math.exp(epsilon) * q), np.max((1 - q) - math.exp(epsilon) * (1 - p)))
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins), shifts=shifts)
    assert bound == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 10.0, 800.0, 1300.0])
@pytest.mark.parametrize(("sigma", "bins"), [(0.02, 10**6), (0.02, 1), (20.0, 1), (0.1, 10**6)])
def test_max_event_bound_is_below_unsampled_cost_at_extremes(sigma, bins, epsilon):
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins))
    assert 0.0 <= bound <= GaussianProfile(sigma).delta(epsilon).upper
