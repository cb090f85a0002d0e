"""Claims about inverses: what they return suffices, and a little less would not."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from accounting import (
    BallsAndBinsProfile,
    Bound,
    GaussianProfile,
    PoissonProfile,
    ShuffleProfile,
    attack_advantage,
    calibrate,
    calibrate_advantage,
    largest_count,
)
from accounting.profiles.truncation import Cap, truncated_profile

MAKERS = {
    "gaussian": GaussianProfile,
    "poisson": lambda sigma: PoissonProfile(sigma, 1e-3, 1000),
    "balls-and-bins": lambda sigma: BallsAndBinsProfile(sigma, 100),
    "three epochs": lambda sigma: BallsAndBinsProfile(sigma, 20, 3),
    "shuffle": lambda sigma: ShuffleProfile(sigma, 20),
    "truncated": lambda sigma: truncated_profile(
        BallsAndBinsProfile(sigma, 50), Cap(5000, 0.02, 180)
    ),
}


# The cost of little noise is the quicker one to compute, but that of Poisson's.
@pytest.mark.short("0.5-gaussian", "0.5-poisson", "5.0-balls-and-bins")
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("epsilon", [0.5, 5.0])
def test_the_noise_returned_suffices_and_slightly_less_does_not(maker, epsilon):
    sigma = calibrate(maker, epsilon=epsilon, delta=1e-6)
    assert maker(sigma).epsilon(1e-6).upper <= epsilon
    less = sigma / (1 + 4e-4)
    # Up to the width of a certified interval, which is the cost of the grid, not of the search.
    assert maker(less).epsilon(1e-6).upper > epsilon - 1e-3


def test_result_suffices_where_an_upper_end_alone_is_sharper():
    class Sharper(GaussianProfile):
        def answer(self, question):
            bound = super().answer(question)
            return bound if question.upper_only else Bound(bound.lower, 1.01 * bound.upper)

    sigma = calibrate(Sharper, epsilon=1.0, delta=1e-6)
    assert 0.999 <= Sharper(sigma).epsilon(1e-6).upper <= 1.0


@settings(max_examples=25, deadline=None)
@given(log_epsilon=st.floats(-16.0, 4.6), log_delta=st.floats(-60.0, -2.5))
def test_the_gaussian_is_inverted_anywhere(log_epsilon, log_delta):
    epsilon, delta = math.exp(log_epsilon), math.exp(log_delta)
    sigma = calibrate(GaussianProfile, epsilon=epsilon, delta=delta)
    assert GaussianProfile(sigma).delta(epsilon).upper <= delta * (1 + 1e-9)
    if sigma > 1e-3:
        assert GaussianProfile(sigma / (1 + 3e-4)).delta(epsilon).upper > delta


@pytest.mark.short("10-*")
@pytest.mark.parametrize(("bins", "noise"), [(10, 0.790), (36_000, 0.415)])
def test_a_job_is_calibrated_in_a_few_evaluations(bins, noise):
    calls = []

    def privacy(sigma):
        calls.append(sigma)
        return BallsAndBinsProfile(sigma, bins)

    assert calibrate(privacy, epsilon=5.0, delta=2.7e-8) == pytest.approx(noise, abs=0.001)
    assert len(calls) <= 15


@pytest.mark.short("gaussian", "shuffle")
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_returned_noise_is_the_least_that_keeps_the_advantage(maker):
    sigma = calibrate_advantage(maker, advantage=0.1)
    assert attack_advantage(maker(sigma)).upper <= 0.1
    # Up to the width of a certified interval where it is tight.
    assert attack_advantage(maker(sigma / (1 + 4e-4))).upper > 0.1 * (1 - 1e-3)


@settings(max_examples=25, deadline=None)
@given(log_advantage=st.floats(-16.0, -1e-3))
def test_the_gaussian_is_inverted_at_any_advantage(log_advantage):
    advantage = math.exp(log_advantage)
    # 2 Phi(1 / (2 sigma)) - 1 = advantage
    exact = 1.0 / (2.0 * math.sqrt(2.0) * special.erfinv(advantage))
    found = calibrate_advantage(GaussianProfile, advantage=advantage)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 2e-4)


def test_largest_number_of_epochs_is_the_last_that_suffices():
    privacy = partial(BallsAndBinsProfile, 1.0, 20)
    most = largest_count(privacy, epsilon=4.0, delta=1e-6)
    assert privacy(most).epsilon(1e-6).upper <= 4.0 < privacy(most + 1).epsilon(1e-6).upper
    assert most >= 5


def test_no_count_at_all_is_0_and_the_limit_is_kept():
    assert largest_count(lambda n: GaussianProfile(1.0 / n), epsilon=0.1, delta=1e-6) == 0
    assert largest_count(lambda n: GaussianProfile(1e6), epsilon=1.0, delta=1e-6, limit=37) == 37


@pytest.mark.parametrize("cliff", [0.01, 0.4343, 1.0, 37.0])
def test_cliff_of_the_cost_is_calibrated_in_25_evaluations(cliff):
    """As where the maximum batch size leaves nothing of delta."""
    asked = []

    class Falling(GaussianProfile):
        def epsilon(self, delta, tolerance=1e-3):
            asked.append(self.noise_multiplier)
            finite = self.noise_multiplier >= cliff
            return super().epsilon(delta, tolerance) if finite else Bound(0.0, math.inf)

    found = calibrate(Falling, epsilon=100.0 / min(cliff, 1.0) ** 2, delta=1e-5)
    assert cliff <= found <= cliff * (1 + 2e-4)
    assert len(asked) <= 25
