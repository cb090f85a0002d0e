"""Each sampler's cost: the right profile, from the sampler's own n, b, T and E."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting import epsilon
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle

N, B, E = 4000, 40, 3
WIDTH = 4e-3  # of the default bounds, in epsilon


def upper(sampler, sigma, delta=1e-5):
    return epsilon(sampler.privacy(sigma), delta).upper


def gaussian_delta(eps, sigma):
    """Balle and Wang (2018), Theorem 8."""
    return stats.norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * stats.norm.cdf(
        -0.5 / sigma - eps * sigma
    )


@pytest.mark.parametrize("eps", [0.0, 1.0, 4.0])
def test_deterministic_costs_one_gaussian_release_whatever_the_batches(eps):
    for n, b in [(N, B), (N, 33), (10, 10)]:
        bound = Deterministic(n, b, E).privacy(1.5).delta(eps)
        assert bound.lower <= gaussian_delta(eps, 1.5 / math.sqrt(E)) * (1 + 1e-9)
        assert bound.upper >= gaussian_delta(eps, 1.5 / math.sqrt(E)) * (1 - 1e-9)
        assert bound.upper == pytest.approx(bound.lower, rel=1e-6)


@pytest.mark.parametrize("order", ["redrawn", "fixed"])
def test_shuffle_is_never_promised_more_than_deterministic_nor_costs_like_poisson(order):
    shuffle = epsilon(Shuffle(N, B, E, order=order).privacy(0.7), 1e-5)
    assert shuffle.upper == pytest.approx(upper(Deterministic(N, B, E), 0.7), abs=WIDTH)
    assert shuffle.upper > 2 * upper(Poisson(N, B, E), 0.7)
    # Shuffling is never better than balls-and-bins (Chua et al., 2025, Proposition 3.3).
    assert shuffle.lower >= upper(BallsAndBins(N, B, E), 0.7) - WIDTH


def test_modes_that_differ_in_what_is_redrawn_differ_in_cost():
    sizes = (1000, 40, 5)
    redrawn, fixed = (
        upper(BallsAndBins(*sizes, assignment=mode), 1.0) for mode in ("redrawn", "fixed")
    )
    assert fixed > 2 * redrawn
    one = epsilon(BallsAndBins(1000, 40, 1).privacy(1.0 / math.sqrt(5)), 1e-5)
    assert fixed == pytest.approx(one.upper, abs=WIDTH)
    shuffles = [
        epsilon(Shuffle(*sizes, order=mode).privacy(1.0), 1e-5).lower
        for mode in ("redrawn", "fixed")
    ]
    assert shuffles[1] > 1.2 * shuffles[0]


def test_full_batches_cost_what_deterministic_costs():
    # b = n: everybody takes part in every step, however batches are drawn.
    wanted = upper(Deterministic(100, 100, E), 2.0)
    for sampler in (Shuffle, Poisson, BallsAndBins):
        assert upper(sampler(100, 100, E), 2.0) == pytest.approx(wanted, abs=WIDTH)


@pytest.mark.parametrize(("n", "b", "epochs"), [(N, B, E), (4010, 40, 2)])
def test_poisson_takes_its_rate_and_steps_from_n_b_and_epochs(n, b, epochs):
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    step = from_gaussian_mechanism(1.0, sampling_prob=b / n, value_discretization_interval=2e-4)
    composed = step.self_compose(math.ceil(n / b) * epochs)
    wanted = composed.get_epsilon_for_delta(1e-5)
    assert upper(Poisson(n, b, epochs), 1.0) == pytest.approx(wanted, abs=WIDTH)


def test_noise_and_epochs_are_those_of_the_profile(make):
    # That more noise costs less, and more epochs more, is a matter of the profiles.
    profile = make(N, B, 2).privacy(1.0)
    assert profile == make(N, B, 2).privacy(1.0)
    assert profile != make(N, B, 2).privacy(1.1)
    assert profile != make(N, B, 3).privacy(1.0)


def test_unequal_batches_of_a_shuffle_post_process_into_equal_ones():
    # The claim behind the lower bound where b does not divide n: with the example's step t not
    # uniform, the pair P = sum_t p_t N(2 e_t), Q = sum_t p_t N(e_t) is at least as far apart as
    # with uniform p_t. Exact in the example of T = 2 by quadrature of H_eps on a grid.
    sigma, eps = 0.8, 1.0
    x = np.linspace(-8, 10, 1201)
    cell = (x[1] - x[0]) ** 2

    def mixture(weights, mean):
        at, zero = stats.norm.pdf(x, mean, sigma), stats.norm.pdf(x, 0, sigma)
        return weights[0] * np.outer(at, zero) + weights[1] * np.outer(zero, at)

    def hockey_stick(weights, first, second):
        gap = mixture(weights, first) - math.exp(eps) * mixture(weights, second)
        return np.maximum(gap, 0).sum() * cell

    reached = []  # the cost of concrete data: all others -1, or all others 0
    for first, second in ((2, 1), (1, 2), (1, 0), (0, 1)):
        even, uneven, sure = (
            hockey_stick(weights, first, second) for weights in ((0.5, 0.5), (0.7, 0.3), (1, 0))
        )
        assert even < uneven < sure
        assert sure == pytest.approx(gaussian_delta(eps, sigma), rel=1e-3)
        reached.append(uneven)
    bound = Shuffle(10, 7).privacy(sigma).delta(eps)  # T = 2, batches of 7 and 3
    assert bound.lower <= max(reached)
    assert bound.upper >= max(reached)
    assert bound.upper == pytest.approx(gaussian_delta(eps, sigma), rel=1e-6)
