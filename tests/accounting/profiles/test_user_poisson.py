"""Users of many examples: the mixture's cost against its definition and other accountants."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate, stats

from accounting import GaussianProfile, PoissonProfile, UserPoissonProfile

DELTA = 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("sigma", "steps", "rate", "tau"),
    [
        (2.0, 100, 0.01, 5),
        pytest.param(4.0, 300, 0.02, 10, marks=pytest.mark.long),
        pytest.param(1.0, 1, 0.3, 3, marks=pytest.mark.long),
        pytest.param(1.5, 20, 0.9, 2, marks=pytest.mark.long),
    ],
)
def test_the_mixture_agrees_with_dp_accounting(sigma, steps, rate, tau):
    k = np.arange(tau + 1)
    weights = stats.binom.pmf(k, tau, rate)
    other = pld.from_mixture_gaussian_mechanism(
        sigma, k.tolist(), (weights / weights.sum()).tolist(), value_discretization_interval=1e-3
    ).self_compose(steps)
    bound = UserPoissonProfile(sigma, steps, rate, tau).epsilon(DELTA)
    estimate = other.get_epsilon_for_delta(DELTA)
    slack = 1e-3 * max(1.0, estimate / 10)
    assert bound.lower - slack <= estimate
    assert bound.upper == pytest.approx(estimate, abs=2 * slack)
    assert bound.upper - bound.lower <= 3 * slack


def test_one_example_a_user_is_poisson_and_all_in_every_step_the_gaussian_mechanism():
    one, poisson = UserPoissonProfile(0.7, 20, 0.2, 1), PoissonProfile(0.7, 0.2, 20)
    assert one.epsilon(DELTA) == poisson.epsilon(DELTA)
    assert one.delta(0.2) == poisson.delta(0.2)
    every = UserPoissonProfile(3.0, 9, 1.0, 4)
    assert every.epsilon(DELTA) == GaussianProfile(0.25).epsilon(DELTA)


def test_one_step_equals_the_integral_of_its_definition():
    sigma, rate, tau, eps = 1.3, 0.2, 4, 0.4
    weights = stats.binom.pmf(np.arange(tau + 1), tau, rate)

    def density(z):
        return float(np.dot(weights, stats.norm.pdf(z, np.arange(tau + 1), sigma)))

    def nothing(z):
        return stats.norm.pdf(z, 0, sigma)

    def stick(p, q):
        return integrate.quad(lambda z: max(0, p(z) - math.exp(eps) * q(z)), -12, 18, limit=400)[0]

    sides = stick(density, nothing), stick(nothing, density)
    bound = UserPoissonProfile(sigma, 1, rate, tau).delta(eps)
    assert bound.lower <= max(sides) + 1e-7
    assert max(sides) - 1e-7 <= bound.upper
    assert bound.upper == pytest.approx(max(sides), rel=5e-3)


def test_no_vectors_of_bounded_norm_exceed_the_bound():
    # A user's examples in random directions of the plane, every subset in by its probability.
    rng = np.random.default_rng(0)
    edges = np.concatenate([[-np.inf], np.linspace(-6, 9, 50), [np.inf]])
    share = 0.0
    for _ in range(60):
        tau, rate, sigma = int(rng.integers(1, 4)), float(rng.uniform(0.05, 0.6)), 1.2
        vectors = rng.normal(size=(tau, 2))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        if rng.integers(2):
            vectors[:] = vectors[0]
        profile = UserPoissonProfile(sigma, 1, rate, tau)
        p = np.zeros((edges.size - 1,) * 2)
        for some in itertools.product((0, 1), repeat=tau):
            weight = rate ** sum(some) * (1 - rate) ** (tau - sum(some))
            mean = np.array(some) @ vectors
            p += weight * np.outer(
                *(np.diff(stats.norm.cdf(edges, center, sigma)) for center in mean)
            )
        q = np.outer(*[np.diff(stats.norm.cdf(edges, 0, sigma))] * 2)
        ratio = profile.upper_ratio(0.02, 1e-12)
        for eps in (0.0, 0.1, 0.5):
            a = math.exp(eps)
            attained = np.maximum(p - a * q, 0).sum(), np.maximum(q - a * p, 0).sum()
            proved = ratio.remove(eps), ratio.add(eps)
            assert attained[0] <= proved[0] + 1e-9
            assert attained[1] <= proved[1] + 1e-9
            share = max(share, attained[0] / proved[0])
    assert share > 0.98


def test_a_cap_so_high_that_no_grid_serves_costs_as_without_sampling():
    profile = UserPoissonProfile(0.05, 10, 0.5, 50)
    bound = profile.epsilon(DELTA)
    assert bound.upper == profile.ceiling().epsilon(DELTA).upper
    assert "no finer grid" in bound.note


def test_a_tiny_rate_is_answered_on_coarse_grids():
    """It is the sum of all steps' own: that two of them draw the user is rarer still."""
    profile = UserPoissonProfile(0.37, 29_988, 2.13e-9, 20)
    bound = profile.epsilon(2.4e-14)
    assert not bound.note
    assert bound.width <= 1e-3
    one = UserPoissonProfile(0.37, 1, 2.13e-9, 20)
    assert 29_988 * one.delta(bound.lower).upper >= 2.4e-14 * (1.0 - 1e-3)
    assert 29_988 * one.delta(bound.upper).lower <= 2.4e-14 * (1.0 + 1e-3)
