"""The events of the maximum prove lower bounds: below the truth, and the best of their kind."""

import math

import mpmath
import numpy as np
import pytest
from scipy.special import log_ndtr

from accounting import GaussianProfile
from accounting.algebra.upper import UpperRatio
from accounting.max_events import (
    Epoch,
    max_event_lower_bound,
    maximum_buckets,
    sum_of_maxima_lower_bound,
)

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


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_closed_forms_are_lowered_by_their_rounding_errors(epsilon):
    """With one bin the best event is the truth itself, so that the slack is all there is."""
    exact = GaussianProfile(0.8).delta(epsilon)
    for bound in (
        max_event_lower_bound(epsilon, Epoch(0.8, 1)),
        sum_of_maxima_lower_bound(epsilon, Epoch(1.6, 1), 4),
    ):
        assert exact.lower * (1 - 1e-7) <= bound <= exact.lower * (1 - 0.9e-9)


@pytest.mark.parametrize(("sigma", "bins", "epochs"), [(0.2, 5, 1), (0.3, 50, 3), (0.6, 3, 2)])
def test_sums_of_maxima_lie_below_the_law_of_their_buckets(sigma, bins, epochs):
    thresholds = np.linspace(-8 * sigma, 2 + 12 * sigma, 6001)
    p, q = (maximum_buckets(Epoch(sigma, bins), thresholds, shift)[0] for shift in (2.0, 1.0))
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    upper = UpperRatio.from_masses(p, q, 0.05).power(epochs)
    for epsilon in (1.0, 10.0):
        bound = sum_of_maxima_lower_bound(epsilon, Epoch(sigma, bins), epochs)
        assert bound <= upper.delta(epsilon) * (1 + 0.02)


def test_masses_of_the_largest_are_right_far_from_the_middle():
    ceilings = np.array([-1.0, -0.999, 5.0, 5.001])
    masses, error = maximum_buckets(Epoch(0.5, 7), ceilings, 1.0)
    with mpmath.workdps(50):
        cdf = [
            mpmath.ncdf((mpmath.mpf(c) - 1) * 2) * mpmath.ncdf(2 * mpmath.mpf(c)) ** 6
            for c in ceilings.tolist()
        ]
        ends = [mpmath.mpf(0), *cdf, mpmath.mpf(1)]
        for k, mass in enumerate(masses.tolist()):
            exact = ends[k + 1] - ends[k]
            assert abs(mpmath.mpf(mass) / exact - 1) <= error


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
