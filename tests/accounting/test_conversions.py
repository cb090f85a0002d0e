"""A profile says the same in every language, and what is an upper bound stays one."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from accounting.algebra.likelihood_ratio import LikelihoodRatio
from accounting.conversions import (
    PrivacyCurve,
    ratio_to_privacy_loss_distribution,
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


@pytest.mark.parametrize("sampling_prob", [1.0, 0.1])
@pytest.mark.parametrize("bins", [1, 7])
def test_ratio_is_converted_in_each_direction_on_its_own(sampling_prob, bins):
    ratio = LikelihoodRatio.subsampled_gaussian(0.6, sampling_prob, 0.01, "upper").average(bins)
    lower = LikelihoodRatio.subsampled_gaussian(0.6, sampling_prob, 0.01, "lower").average(bins)
    converted = ratio_to_privacy_loss_distribution(ratio, interval=1e-3)
    apart = 0
    for epsilon in (0.0, 0.1, 0.5, 2.0):
        for pmf, upper, true in (
            (converted._pmf_remove, ratio.remove, lower.remove),
            (converted._pmf_add, ratio.add, lower.add),
        ):
            got = pmf.get_delta_for_epsilon(epsilon)
            assert true(epsilon) <= upper(epsilon) * (1 - 1e-15) or upper(epsilon) < 1e-130
            assert got >= upper(epsilon) * (1 - 1e-9) - 1e-130
            assert got <= upper(max(0.0, epsilon - 1e-4)) * (1 + 1e-4) + 1e-130
        apart += ratio.remove(epsilon) > 1.05 * ratio.add(epsilon)
    # The two directions differ, unless it is one Gaussian: exchanging them would be seen.
    assert apart >= 2 or (sampling_prob == 1.0 and bins == 1)


@given(st.lists(st.floats(0.0, 0.3), min_size=40, max_size=40))
def test_noise_in_the_upper_values_never_breaks_the_bound(noise):
    truth = np.array([GaussianProfile(1.0).delta(0.2 * k).upper for k in range(40)])
    noisy = np.minimum(1.0, truth * (1 + np.array(noise)))
    curve = PrivacyCurve(0.2, truth, noisy)
    p, q, _ = curve._pair
    assert np.all(p >= 0.0)
    assert np.all(q >= 0.0)
    converted = curve.privacy_loss_distribution()
    for epsilon in (0.0, 0.1, 0.9, 3.0, 5.5):
        got = converted.get_delta_for_epsilon(epsilon)
        assert GaussianProfile(1.0).delta(epsilon).lower <= got <= 1.0
        assert got <= 1.5 * GaussianProfile(1.0).delta(max(0.0, epsilon - 0.2)).upper


# --- trade-off curves, attacks and the nearest Gaussian -----------------------------------------


@given(st.floats(0.4, 5.0), st.floats(0.0, 1.0))
def test_trade_off_of_a_gaussian_is_in_the_interval_and_the_interval_is_narrow(sigma, alpha):
    curve = PrivacyCurve.of(GaussianProfile(sigma), interval=0.02, tail=1e-6)
    truth = float(ndtr(ndtri(1.0 - alpha) - 1.0 / sigma))
    bound = curve.type_two_error(alpha)
    assert bound.lower - 1e-12 <= truth <= bound.upper + 1e-12
    assert bound.width <= 0.03


@pytest.mark.parametrize("profile", PROFILES, ids=repr)
def test_a_trade_off_falls_from_one_to_zero_within_the_advantage(profile, curves):
    curve = curves[profile]
    alphas = np.linspace(0.0, 1.0, 21)
    missed = [curve.type_two_error(float(a)) for a in alphas]
    assert all(x.lower >= y.lower - 1e-15 for x, y in itertools.pairwise(missed))
    for alpha, miss in zip(alphas, missed, strict=True):
        # No attack has a larger advantage than the total variation distance.
        assert 1.0 - miss.upper - alpha <= curve.advantage().upper + 1e-12
    assert curve.type_two_error(0.0).upper == 1.0
    assert curve.type_two_error(1.0).upper == 0.0


@pytest.mark.parametrize(
    "sigma", [1.0, *(pytest.param(s, marks=pytest.mark.long) for s in (0.3, 5.0))]
)
def test_nearest_gaussian_of_a_gaussian_is_itself(sigma):
    bound = PrivacyCurve.of(GaussianProfile(sigma), interval=0.03, tail=1e-8).gaussian_mu(1e-8)
    assert bound.lower <= 1.0 / sigma <= bound.upper * (1 + 1e-6)
    assert bound.width <= 5e-3 / sigma


@pytest.mark.parametrize("profile", PROFILES[2:], ids=repr)
def test_nearest_gaussian_covers_the_profile_and_no_smaller_one_does(profile, curves):
    slack = 1e-5
    bound = curves[profile].gaussian_mu(slack)
    epsilons = np.arange(0.0, 8.0, 0.5371)
    above = GaussianProfile(1.0 / bound.upper)
    assert all(profile.delta(e).lower <= above.delta(e).upper + slack for e in epsilons)
    if bound.lower > 0.0:
        below = GaussianProfile(1.0 / (0.98 * bound.lower))
        assert any(profile.delta(e).upper > below.delta(e).lower + slack for e in epsilons)


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
