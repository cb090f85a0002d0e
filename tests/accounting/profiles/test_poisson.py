"""Claims about Poisson sampling's profile: it is certified, tight, and agrees with others' code."""

import pytest

from accounting import GaussianProfile, PoissonProfile


def theirs(sigma, rate, steps, interval):
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )
    return one.self_compose(steps)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [(1.0, 0.01, 1000, 1e-5), (0.7, 0.2, 30, 1e-6), (2.0, 0.5, 100, 1e-7), (5.0, 1e-3, 5000, 1e-5)],
)
def test_agrees_with_dp_accounting(sigma, rate, steps, delta):
    profile, other = (
        PoissonProfile(sigma, rate, steps),
        theirs(sigma, rate, steps, min(1e-3, 0.1 * rate)),
    )
    bound, found = profile.epsilon(delta), other.get_epsilon_for_delta(delta)
    assert bound.width <= 1e-3
    assert bound.lower <= found
    assert found == pytest.approx(bound.upper, abs=3e-3)
    at_0 = profile.delta(0.0)
    assert at_0.lower <= other.get_delta_for_epsilon(0.0) <= at_0.upper * (1.0 + 0.03)


def test_stays_tight_where_a_fixed_grid_of_losses_is_too_coarse():
    """At this rate a grid of 1e-3 gives 0.123 and one of 1e-4 gives 0.041."""
    bound = PoissonProfile(1.0, 1024 / 37e6, 36_000).epsilon(2.7e-8)
    assert bound.width <= 1e-3
    assert bound.upper <= 0.0300
    assert bound.lower <= theirs(1.0, 1024 / 37e6, 36_000, 1e-3).get_epsilon_for_delta(2.7e-8)


@pytest.mark.parametrize("epsilon", [29.0, 31.0, 40.0])
def test_one_step_is_as_sharp_at_large_epsilons(epsilon):
    bound = PoissonProfile(0.1, 1e-9, 1).delta(epsilon)
    assert 0.0 < bound.lower <= bound.upper <= bound.lower * (1 + 1e-9)


def test_one_step_has_a_profile_where_no_float_holds_the_exponential_of_epsilon():
    assert 0.0 <= PoissonProfile(0.02, 0.5, 1).delta(800.0).lower <= 0.5
    assert PoissonProfile(0.02, 0.5, 1).delta(800.0).lower > 0.49


def test_a_rate_of_almost_one_is_almost_no_sampling():
    bound = PoissonProfile(2.0, 1.0 - 1e-9, 9).epsilon(1e-6)
    exact = GaussianProfile(2.0 / 3.0).epsilon(1e-6)
    assert bound.lower <= exact.upper
    assert bound.upper >= exact.lower - 1e-3


@pytest.mark.parametrize("delta", [1e-12, 1e-20, 1e-40])
def test_a_small_delta_gives_no_silent_infinity(delta):
    bound = PoissonProfile(1.0, 0.01, 100).epsilon(delta)
    assert bound.upper < GaussianProfile(0.1).epsilon(delta).upper
    assert bound.width <= 1e-3 or bound.note
