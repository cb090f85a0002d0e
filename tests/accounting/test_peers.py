"""Costs agree with those of dp_accounting, by privacy losses and by Renyi divergences."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from accounting import (
    GaussianProfile,
    PoissonProfile,
    SelectionProfile,
    TrialCount,
    UserPoissonProfile,
)
from accounting.profiles.truncation import Cap, truncated_profile
from accounting.releases import with_gaussian_release


def sampled(sigma, rate, steps, interval=1e-3):
    return pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    ).self_compose(steps)


def users(sigma, steps, rate, tau):
    k = np.arange(tau + 1)
    weights = stats.binom.pmf(k, tau, rate)
    return pld.from_mixture_gaussian_mechanism(
        sigma, k.tolist(), (weights / weights.sum()).tolist(), value_discretization_interval=1e-3
    ).self_compose(steps)


def beside_a_release():
    release = pld.from_gaussian_mechanism(2.0, value_discretization_interval=1e-3)
    return sampled(0.7, 0.2, 30).compose(release)


USERS = [(2.0, 100, 0.01, 5), (4.0, 300, 0.02, 10), (1.0, 1, 0.3, 3), (1.5, 20, 0.9, 2)]
# Our profile, their distribution, delta, how far theirs may be above ours.
LOSSES = [
    *(
        pytest.param(
            UserPoissonProfile(*at), lambda at=at: users(*at), 1e-5, 3e-3, marks=pytest.mark.long
        )
        for at in USERS
    ),
    *(
        (with_gaussian_release(PoissonProfile(0.7, 0.2, 30), 2.0), beside_a_release, at, 3e-3)
        for at in (1e-2, 1e-6)
    ),
    # Their grid of losses is too coarse at this rate: 0.123 in place of 0.029.
    (
        PoissonProfile(1.0, 1024 / 37e6, 36_000),
        lambda: sampled(1.0, 1024 / 37e6, 36_000),
        2.7e-8,
        math.inf,
    ),
]


@pytest.mark.parametrize(("profile", "theirs", "delta", "coarser"), LOSSES)
def test_distributions_of_losses_agree(profile, theirs, delta, coarser):
    theirs, bound = theirs(), profile.epsilon(delta)
    found = theirs.get_epsilon_for_delta(delta)
    assert bound.width <= 1e-3 * max(1.0, found / 10)
    assert bound.lower <= found + 1e-3 * isinstance(profile, UserPoissonProfile)
    assert bound.upper - 3e-3 <= found <= bound.upper + coarser
    at_0 = profile.delta(0.0)
    assert at_0.lower <= theirs.get_delta_for_epsilon(0.0) * 1.003
    assert theirs.get_delta_for_epsilon(0.0) <= at_0.upper * (1.03 if coarser < 1 else math.inf)


ORDERS = [*range(2, 65), 80, 100, 128, 256, 512]


@pytest.mark.short("2.5")
@pytest.mark.parametrize("sigma", [0.5, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0])
def test_two_accountants_agree_over_a_grid_below_renyi_s_costs(sigma):
    for rate, steps in itertools.product([1.0, 0.1, 1e-3], [1000, 30, 1]):
        renyi = RdpAccountant(ORDERS)
        gaussian = dp_event.GaussianDpEvent(sigma)
        renyi.compose(dp_event.PoissonSampledDpEvent(rate, gaussian), steps)
        theirs = sampled(sigma, rate, steps, min(1e-3, 0.1 * rate))  # from above
        for delta in (1e-4, 1e-8):
            bound = PoissonProfile(sigma, rate, steps).epsilon(delta)
            assert bound.width <= 1e-3
            # Its transform, whose errors it does not bound, errs by some 1e-14 of delta.
            assert bound.lower <= theirs.get_epsilon_for_delta(delta - 1e-13)
            assert bound.upper <= theirs.get_epsilon_for_delta(delta) + 1e-3
            assert bound.upper <= renyi.get_epsilon(delta)


@pytest.mark.long
@pytest.mark.parametrize(("deviations", "epsilon", "sharper"), [(7, 1.8, 1.05), (5, 3.0, 4.0)])
def test_truncated_events_agree(deviations, epsilon, sharper):
    n, b, sigma = 37_000_000, 8192, 0.6
    cap = math.ceil(b + deviations * math.sqrt(b))
    event = dp_event.TruncatedSubsampledGaussianDpEvent(n, b / n, cap, sigma)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    theirs = accountant.compose(dp_event.SelfComposedDpEvent(event, 100)).get_delta(epsilon)
    profile = PoissonProfile(sigma, b / n, 100)
    bound = truncated_profile(profile, Cap(n, b / n, cap)).delta(epsilon)
    # Theirs is an upper bound as well, sharper below 5.5 deviations: their pair keeps more noise.
    assert bound.lower <= theirs * (1 + 1e-6)
    assert bound.upper <= theirs * sharper + 1e-12


@pytest.mark.parametrize("shape", [0.0, 1.0])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_selection_costs_no_more_than_by_renyi_divergences(sigma, shape):
    event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(sigma), 10.0, shape)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    renyi = accountant.compose(event).get_epsilon(1e-6)
    ours = SelectionProfile(GaussianProfile(sigma), TrialCount(10.0, shape)).epsilon(1e-6)
    assert ours.lower <= renyi
    assert ours.upper <= 1.02 * renyi
