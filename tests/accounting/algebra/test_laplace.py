"""Claims about inverting a Laplace transform: the bounds hold the truth, and are close."""

import math

import mpmath
import numpy as np
import pytest

from accounting.algebra.laplace import Average, average_delta
from accounting.algebra.moments import NotInvertibleError


@pytest.mark.parametrize(
    ("sigma", "bins", "height"), [(1.0, 50, 30.0), (0.5, 40, 4.0), (5.0, 2, 9.0)]
)
def test_the_transform_is_within_its_error(sigma, bins, height):
    average = Average(sigma, bins, 4.0)
    z = complex(average.tilt, height)
    with mpmath.workdps(25):
        s = mpmath.mpc(z) / bins

        def term(u):
            return mpmath.npdf(u) * mpmath.exp(-s * mpmath.expm1((u - 0.5 / sigma) / sigma))

        exact = complex(bins * mpmath.log(mpmath.quad(term, [-12, -6, -3, 0, 3, 6, 12])))
    (log,), (error,) = average._log_power(np.array([z]))
    # The logarithm is known up to whole turns.
    assert abs(np.exp(complex(log) - exact) - 1.0) <= error <= 1e-9
    assert math.log(abs(np.exp(exact)) / math.pi / height) <= average._log_end(height)


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 1000), (2.0, 3000)])
def test_windows_of_different_lengths_agree(sigma, bins):
    excess = np.expm1([-0.3, 0.0, 0.01, 0.4])
    for b in excess:
        (low, high), (other_low, other_high) = (
            Average(sigma, bins, window).bound_put(float(b)) for window in (4.0, 11.0)
        )
        assert max(low, other_low) <= min(high, other_high) <= max(low, other_low) + 1e-11


@pytest.mark.parametrize(
    ("sigma", "bins", "large"),
    [
        (0.38, 3428, {"rule": 12.0}),
        (1.0, 20, {"rule": 12.0}),
        (20.0, 967, {"rule": 12.0}),
        (0.3, 500, {"alias": 1.0}),
        (2.0, 2, {"alias": 1.0}),
        (0.3, 500, {"end": 0.5}),
        (20.0, 967, {"end": 0.5}),
    ],
)
def test_each_error_is_within_its_bound_where_it_is_large(sigma, bins, large):
    sharp, loose = Average(sigma, bins, 4.0), Average(sigma, bins, 4.0, **large)
    for excess in (-0.99, -0.3, -0.01, 0.0, 0.1, 1.0):
        (low, high), (loose_low, loose_high) = sharp.bound_put(excess), loose.bound_put(excess)
        assert loose_low <= high
        assert low <= loose_high


def test_what_has_too_many_terms_is_refused():
    with pytest.raises(NotInvertibleError):
        average_delta(0.2, 2, 0.0)
    with pytest.raises(NotInvertibleError):
        average_delta(1.0, 100, 50.0)
