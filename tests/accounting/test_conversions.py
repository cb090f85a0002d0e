"""A profile says the same in every language, and what is an upper bound stays one."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.conversions import (
    _optimistic,
    compare_with_peer,
    to_dp_event,
    to_privacy_loss_distribution,
)
from accounting.profile import Bound, Profile
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.user_poisson import UserPoissonProfile
from accounting.releases import with_gaussian_release

PROFILES = [
    GaussianProfile(0.7),
    GaussianProfile(2.0),
    BallsAndBinsProfile(1.0, 5),
    pytest.param(BallsAndBinsProfile(1.0, 5, epochs=2), marks=pytest.mark.long),
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


EVENTS = [
    GaussianProfile(2.0),
    pytest.param(PoissonProfile(1.0, 0.02, 50), marks=pytest.mark.long),
    with_gaussian_release(PoissonProfile(2.0, 0.1, 20), 2.0),
    pytest.param(UserPoissonProfile(2.0, 20, 0.05, 3), marks=pytest.mark.long),
]


@pytest.mark.parametrize("profile", EVENTS, ids=repr)
def test_dp_accounting_confirms_the_epsilon_of_its_event(profile):
    assert "equal up to" in compare_with_peer(profile, 1e-5)
    ours, optimistic = profile.epsilon(1e-5), _optimistic(to_dp_event(profile), 1e-4)
    assert ours.upper - 0.02 < optimistic.get_epsilon_for_delta(1e-5) < ours.upper


class Cheap(PoissonProfile):
    """A profile that states a share of its cost."""

    share = 0.5

    def epsilon(self, delta, *rest, **how):
        bound = super().epsilon(delta, *rest, **how)
        return Bound(self.share * bound.lower, self.share * bound.upper)


def test_a_peer_inside_a_wide_interval_confirms_nothing(monkeypatch):
    monkeypatch.setattr(Cheap, "epsilon", lambda *_, **__: Bound(0.0, math.inf))
    sentence = compare_with_peer(Cheap(1.0, 0.1, 20), 1e-5)
    assert sentence.endswith("inside our interval")


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.5, "contradicts our upper end: please report it"),
        (0.999, "above our upper end by [0-9.]+; its estimate is pessimistic"),
    ],
)
def test_peer_above_our_end_is_pessimistic_or_contradicts_it(share, verdict, monkeypatch):
    monkeypatch.setattr(Cheap, "share", share)
    assert re.search(verdict, compare_with_peer(Cheap(1.0, 0.1, 20), 1e-5))


def test_a_mechanism_without_an_event_is_refused():
    with pytest.raises(ValueError, match="no event for a BallsAndBinsProfile"):
        to_dp_event(BallsAndBinsProfile(1.0, 5))
