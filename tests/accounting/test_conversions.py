"""A profile says the same in every language, and what is an upper bound stays one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.conversions import to_privacy_loss_distribution
from accounting.profile import Bound, Profile
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile

PROFILES = [
    GaussianProfile(0.7),
    GaussianProfile(2.0),
    BallsAndBinsProfile(0.5, 20),
    BallsAndBinsProfile(1.0, 5, epochs=2),
]


@pytest.mark.parametrize("profile", PROFILES, ids=repr)
def test_converted_distribution_is_a_tight_upper_bound(profile):
    converted = to_privacy_loss_distribution(profile, interval=0.04, tail=1e-7)
    # 1e-7: below it lies the tail that became an infinite loss.
    for epsilon in (0.0, 0.005, 0.3, 1.0, 1.2345, 3.0):
        bound, got = profile.delta(epsilon), converted.get_delta_for_epsilon(epsilon)
        assert got >= bound.lower
        assert got <= profile.delta(max(0.0, epsilon - 1e-3)).upper * (1 + 1e-3) + 1e-7


@pytest.mark.parametrize("sigma", [1.0, 4.0])
@pytest.mark.parametrize("count", [2, 9])
def test_converted_distribution_composes_to_a_tight_bound(sigma, count):
    converted = to_privacy_loss_distribution(GaussianProfile(sigma), tail=1e-15)
    exact = GaussianProfile(sigma / math.sqrt(count))
    composed = converted.self_compose(count)
    for delta in (1e-2, 1e-6, 1e-9):
        truth = exact.epsilon(delta)
        assert truth.lower <= composed.get_epsilon_for_delta(delta) <= truth.upper + 1e-3 * count


@given(st.lists(st.floats(0.0, 0.3), min_size=40, max_size=40))
def test_noise_in_the_upper_values_never_breaks_the_bound(noise):
    class Noisy(Profile):
        def answer(self, question):
            bound, raised = GaussianProfile(1.0).delta(question.at), noise[round(question.at / 0.2)]
            return Bound(bound.lower, min(1.0, bound.upper * (1 + raised)))

    converted = to_privacy_loss_distribution(Noisy(), interval=0.2, tail=1e-11)
    for epsilon in (0.0, 0.1, 0.9, 3.0, 5.5):
        got = converted.get_delta_for_epsilon(epsilon)
        assert GaussianProfile(1.0).delta(epsilon).lower <= got <= 1.0
        assert got <= 1.5 * GaussianProfile(1.0).delta(max(0.0, epsilon - 0.2)).upper
