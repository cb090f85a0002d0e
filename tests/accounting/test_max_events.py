"""The law of an epoch's largest coordinate proves lower bounds, below the truth."""

import mpmath
import numpy as np
import pytest

from accounting import GaussianProfile
from accounting.algebra.composition import composed
from accounting.algebra.refinement import Point
from accounting.algebra.upper import UpperRatio
from accounting.max_events import Epoch, maximum_buckets, sum_of_maxima_lower_bound


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_closed_form_is_lowered_by_its_rounding_errors(epsilon):
    """With one bin the best event is the truth itself, so that the slack is all there is."""
    exact = GaussianProfile(0.8).delta(epsilon)
    bound = sum_of_maxima_lower_bound(epsilon, Epoch(1.6, 1), 4)
    assert exact.lower * (1 - 1e-7) <= bound <= exact.lower * (1 - 0.9e-9)


@pytest.mark.parametrize(("sigma", "bins", "epochs"), [(0.2, 5, 1), (0.3, 50, 3), (0.6, 3, 2)])
def test_sums_of_maxima_lie_below_the_law_of_their_buckets(sigma, bins, epochs):
    thresholds = np.linspace(-8 * sigma, 2 + 12 * sigma, 6001)
    p, q = (maximum_buckets(Epoch(sigma, bins), thresholds, shift)[0] for shift in (2.0, 1.0))
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    upper = UpperRatio.from_masses(p, q, 0.05)
    for epsilon in (1.0, 10.0):
        bound = sum_of_maxima_lower_bound(epsilon, Epoch(sigma, bins), epochs)
        parts = composed([(upper, epochs)], Point(1.0, epsilon))
        assert bound <= max(part.delta(epsilon) for part in parts) * (1 + 0.02)


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
