"""Claims about balls-and-bins' profile: certified, tight, and equal to what it must equal."""

import math
import time

import pytest

from accounting import BallsAndBinsProfile

DELTA = 2.7e-8
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("sigma", "bins", "lower", "upper"),
    [
        pytest.param(1.0, 565, 0.40370, 0.40376, marks=LONG),
        pytest.param(0.5, 565, 6.05934, 6.05936, marks=LONG),
        pytest.param(0.5, 4492, 4.00222, 4.00225, marks=LONG),
        (0.5, 36_000, 2.04166, 2.04169),
        (0.3, 36_000, 12.598468, 12.598469),
    ],
)
def test_reference_intervals_lie_within(sigma, bins, lower, upper):
    bound = BallsAndBinsProfile(sigma, bins).epsilon(DELTA)
    assert bound.width <= 1e-3
    assert not bound.note
    assert bound.lower <= lower
    assert upper <= bound.upper


def test_fixed_bins_are_one_epoch_with_less_noise():
    fixed = BallsAndBinsProfile(1.0, 565, 5, "fixed").epsilon(DELTA)
    assert fixed == BallsAndBinsProfile(1.0 / math.sqrt(5), 565).epsilon(DELTA)
    assert fixed.lower == pytest.approx(7.82, abs=0.01)


def test_five_redrawn_epochs_cost_a_twelfth_of_fixed_ones():
    bound = BallsAndBinsProfile(1.0, 565, 5).epsilon(DELTA)
    assert bound.width <= 1e-3
    assert bound.lower == pytest.approx(0.6459, abs=1e-3)


@pytest.mark.parametrize(
    ("sigma", "delta", "truth"), [(0.055, 1e-18, 323.00364896), (0.06, 1e-22, 299.77179605)]
)
def test_at_little_noise_the_interval_is_about_the_truth(sigma, delta, truth):
    """By the larger release alone, to 50 digits: what the other one adds is e^-300 of it.

    Atoms whose Q-mass underflowed once made both ends 1e-3 too large.
    """
    bound = BallsAndBinsProfile(sigma, 2).epsilon(delta)
    assert truth - 1e-4 <= bound.lower <= truth + 1e-6
    assert truth - 1e-6 <= bound.upper <= truth + 1e-3


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta"),
    [
        (1e8, 2, 1, 1e-5),
        (1e8, 1000, 1, 1e-9),
        (1e-3, 10**7, 10**4, 1e-300),
        (0.05, 10**7, 1, 1e-5),
        (0.02, 1000, 1, 1e-280),
        (0.7, 100, 1, 1e-250),
    ],
)
def test_far_ends_of_the_range_are_narrow_and_quick(sigma, bins, epochs, delta):
    begin = time.process_time()
    bound = BallsAndBinsProfile(sigma, bins, epochs).epsilon(delta)
    assert time.process_time() - begin <= 5.0
    assert bound.width <= 1e-3 + 1e-10 * bound.upper


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "largest"),
    [
        (60.0, 20, 2, 0.03),
        (1000.0, 20, 1, 0.002),
        pytest.param(10.0, 1000, 1, 0.0133, marks=LONG),
        pytest.param(100.0, 10_000, 3, 6.1e-4, marks=LONG),
    ],
)
def test_a_small_epsilon_is_bounded_relative_to_itself(sigma, bins, epochs, largest):
    bound = BallsAndBinsProfile(sigma, bins, epochs).epsilon(1e-8)
    assert 0.0 < bound.upper < largest
    assert bound.width <= 1e-3 * bound.upper
    assert not bound.note


def test_without_a_known_reason_no_interval_is_wide(monkeypatch):
    from accounting.profiles import balls_and_bins

    monkeypatch.setattr(balls_and_bins, "_MOST_WORK", 1e6)
    bound = BallsAndBinsProfile(0.5, 36_000).epsilon(DELTA)
    assert bound.width > 1e-3
    assert "too long" in bound.note
