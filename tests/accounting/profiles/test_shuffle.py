"""Claims about shuffling: between its lower bounds and the deterministic order, never Poisson."""

import math

import pytest

from accounting import BallsAndBinsProfile, PoissonProfile, ShuffleProfile
from accounting.profile import Question

DELTA = 2.7e-8


def test_it_costs_far_more_than_as_if_it_were_poisson():
    shuffle = ShuffleProfile(0.5, 36_000).epsilon(DELTA, 0.1)
    poisson = PoissonProfile(0.5, 1 / 36_000, 36_000).epsilon(DELTA)
    assert shuffle.lower > 12.0 > 2.1 > poisson.upper


def test_fixed_orders_are_one_epoch_with_less_noise():
    fixed = ShuffleProfile(1.0, 100, 3, "fixed")
    one = ShuffleProfile(1.0 / math.sqrt(3), 100)
    assert fixed.epsilon(1e-6) == one.epsilon(1e-6)


def test_the_lower_end_is_that_of_a_pair_or_of_balls_and_bins_redrawn_alike():
    """Of fixed bins it would be twice as high: more than is proved of redrawn orders."""
    shuffle = ShuffleProfile(1.5, 10, 6)
    redrawn, fixed = (
        BallsAndBinsProfile(1.5, 10, 6, assignment).epsilon(1e-3).lower
        for assignment in ("redrawn", "fixed")
    )
    question = Question("epsilon", 1e-3)
    event = question.upper_end(shuffle._event_delta(question), 1e-6)
    bound = shuffle.epsilon(1e-3)
    assert bound.lower <= max(redrawn, event) + 1e-3 < fixed


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs", "delta"),
    [(1e-3, 1000, 2, 1e-6), (0.1, 1000, 10, 1e-6), (0.02, 10**6, 10**4, 1e-30)],
)
def test_at_little_noise_shuffling_costs_as_much_as_a_known_order(sigma, steps, epochs, delta):
    bound = ShuffleProfile(sigma, steps, epochs).epsilon(delta)
    assert bound.width <= 1e-3 + 1e-10 * bound.upper
    assert not bound.note


def test_a_wide_interval_says_that_no_more_is_known():
    bound = ShuffleProfile(1.0, 100, 3).epsilon(1e-6)
    assert bound.width > 1.0
    assert "no tight accounting" in bound.note
