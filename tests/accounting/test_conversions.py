"""A profile says the same in every language, and what is an upper bound stays one."""

import math

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from accounting.conversions import (
    PrivacyCurve,
    to_dp_event,
)
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile

PROFILES = [
    GaussianProfile(0.7),
    GaussianProfile(2.0),
    BallsAndBinsProfile(0.5, 20),
    BallsAndBinsProfile(1.0, 5, epochs=2),
]


@pytest.fixture(scope="module")
def curves():
    return {profile: PrivacyCurve.of(profile, interval=0.04, tail=1e-7) for profile in PROFILES}


# --- privacy loss distributions -----------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES, ids=repr)
def test_converted_distribution_bounds_the_profile_from_above_and_tightly(profile, curves):
    converted = curves[profile].privacy_loss_distribution()
    # 1e-7: below it lies the tail that became an infinite loss.
    for epsilon in (0.0, 0.005, 0.3, 1.0, 1.2345, 3.0):
        bound, got = profile.delta(epsilon), converted.get_delta_for_epsilon(epsilon)
        assert got >= bound.lower
        assert got <= profile.delta(max(0.0, epsilon - 1e-3)).upper * (1 + 1e-3) + 1e-7


@pytest.mark.parametrize("sigma", [1.0, 4.0])
@pytest.mark.parametrize("count", [2, 9])
def test_converted_distribution_composes_to_a_valid_and_tight_bound(sigma, count):
    converted = PrivacyCurve.of(GaussianProfile(sigma), tail=1e-15).privacy_loss_distribution()
    exact = GaussianProfile(sigma / math.sqrt(count))
    composed = converted.self_compose(count)
    for delta in (1e-2, 1e-6, 1e-9):
        truth = exact.epsilon(delta)
        assert truth.lower <= composed.get_epsilon_for_delta(delta) <= truth.upper + 1e-3 * count


@given(st.lists(st.floats(0.0, 0.3), min_size=40, max_size=40))
def test_noise_in_the_upper_values_never_breaks_the_bound(noise):
    truth = np.array([GaussianProfile(1.0).delta(0.2 * k).upper for k in range(40)])
    noisy = np.minimum(1.0, truth * (1 + np.array(noise)))
    curve = PrivacyCurve(0.2, noisy)
    p, q, _ = curve._pair
    assert np.all(p >= 0.0)
    assert np.all(q >= 0.0)
    converted = curve.privacy_loss_distribution()
    for epsilon in (0.0, 0.1, 0.9, 3.0, 5.5):
        got = converted.get_delta_for_epsilon(epsilon)
        assert GaussianProfile(1.0).delta(epsilon).lower <= got <= 1.0
        assert got <= 1.5 * GaussianProfile(1.0).delta(max(0.0, epsilon - 0.2)).upper


# --- events -------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [math.inf, 2.0])
def test_event_of_poisson_costs_what_the_profile_says(release):
    profile = PoissonProfile(1.0, 0.02, 50, release)
    accountant = PLDAccountant().compose(to_dp_event(profile))
    bound = profile.epsilon(1e-5)
    assert bound.lower - 1e-3 <= accountant.get_epsilon(1e-5) <= bound.upper + 2e-2


def test_no_event_is_invented_for_balls_and_bins():
    with pytest.raises(ValueError, match="no event for BallsAndBinsProfile"):
        to_dp_event(BallsAndBinsProfile(1.0, 10))
