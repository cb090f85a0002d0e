"""Closed forms where one release outweighs all others hold everywhere, and are sharp there."""

import math

import numpy as np
import pytest

from accounting import BallsAndBinsProfile, GaussianProfile
from accounting.algebra.lower import LowerRatio
from accounting.algebra.upper import UpperRatio
from accounting.profile import Question
from accounting.profiles.balls_and_bins import AssignmentsProfile
from accounting.profiles.largest_release import LargestRelease, _log_moments

# sigma, bins, epochs, delta
SHARP = [
    (0.055, 2, 1, 1e-18),
    (0.05, 10**7, 1, 1e-5),
    (0.05, 2, 1, 0.49),
    (1e-3, 10**7, 1, 1e-300),
    (0.02, 1000, 10**4, 1e-6),
    (1e-3, 2, 3, 1e-300),
]
LOOSE = [(0.3, 10, 1, 1e-8), (0.5, 3, 1, 1e-30), (0.2, 100, 4, 1e-10), (1.0, 50, 3, 1e-3)]


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta", "release"),
    [*((*at, math.inf) for at in SHARP), *((*at, 0.5) for at in SHARP[3:])],
)
def test_at_little_noise_both_ends_agree(sigma, bins, epochs, delta, release):
    closed = LargestRelease(sigma, bins, epochs, release)
    bound = BallsAndBinsProfile(sigma, bins, epochs, release=release).epsilon(delta)
    assert bound.width <= 1e-5 + 1e-10 * bound.lower
    assert closed.epsilon(delta).upper == bound.upper
    assert closed.delta(bound.upper).upper == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("release", [math.inf, 0.5])
@pytest.mark.parametrize(("sigma", "bins", "epochs", "delta"), LOOSE)
def test_where_they_are_not_sharp_the_algebra_lies_between_them(
    sigma, bins, epochs, delta, release
):
    closed = LargestRelease(sigma, bins, epochs, release)
    low, high = (
        kind.gaussian(sigma, 0.1).average(bins).power(epochs) for kind in (LowerRatio, UpperRatio)
    )
    if release < math.inf:
        low, high = (
            ratio.product(type(ratio).gaussian(release, ratio.step)) for ratio in (low, high)
        )
    upper, draws = closed.epsilon(delta).upper, BallsAndBinsProfile(sigma, bins, epochs).assignments
    below = AssignmentsProfile(sigma, draws, release).little_noise
    assert math.isinf(upper) or low.delta(upper) <= delta
    lower = Question("epsilon", delta).lower_end(below)
    for epsilon in (0.0, 0.5 * lower, lower, lower + 1.0):
        assert below(epsilon) <= high.delta(epsilon)
        assert low.delta(epsilon) <= closed.delta(epsilon).upper


def test_bins_take_their_logarithm_off_the_cost_of_a_known_order():
    known = GaussianProfile(0.05).epsilon(1e-6)
    bound = BallsAndBinsProfile(0.05, 1000).epsilon(1e-6)
    assert bound.upper == pytest.approx(known.upper - math.log(1000), abs=1e-5)


@pytest.mark.parametrize("bins", [1, 2, 1000])
def test_moments_of_the_largest_are_bounded_closely(bins):
    slopes, bounds = _log_moments(bins)
    if bins == 1:
        exact = 0.5 * slopes**2
    else:
        draws = np.random.default_rng(0).normal(size=(4000, bins)).max(axis=1)
        seen = slopes < 1.0
        slopes, bounds = slopes[seen], bounds[seen]
        exact = np.log(np.exp(-slopes[:, None] * draws).mean(axis=1)) - 0.2
    assert (bounds >= exact).all()
    assert (bounds <= exact + 0.5 * np.maximum(slopes, 1.0)).all()
