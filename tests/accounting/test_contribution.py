"""Users of many examples: the mixture's price against other accountants; where tau should be."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from accounting import GaussianProfile, PoissonProfile, PrivacyProfile
from accounting.contribution import (
    UserPoissonProfile,
    WithPureReleaseProfile,
    bias_bounds,
    private_quantile,
    sum_error,
    sum_error_bound,
    sum_sweet_spot,
)

DELTA = 1e-5
FALSE_ALARM = 1e-6


@pytest.mark.parametrize(
    ("sigma", "steps", "rate", "tau"),
    [(2.0, 100, 0.01, 5), (4.0, 300, 0.02, 10), (1.0, 1, 0.3, 3), (1.5, 20, 0.9, 2)],
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


@pytest.mark.parametrize(("sigma", "steps", "rate"), [(1.0, 100, 0.01), (0.7, 20, 0.2)])
def test_one_example_a_user_is_poisson(sigma, steps, rate):
    bound = UserPoissonProfile(sigma, steps, rate, 1).epsilon(DELTA)
    poisson = PoissonProfile(sigma, rate, steps).epsilon(DELTA)
    assert bound.upper == pytest.approx(poisson.upper, abs=1e-3)
    assert bound.lower == pytest.approx(poisson.lower, abs=1e-3)
    for eps in (0.2, 1.0):
        assert UserPoissonProfile(sigma, steps, rate, 1).delta(eps).upper == pytest.approx(
            PoissonProfile(sigma, rate, steps).delta(eps).upper, rel=5e-3
        )


def test_every_example_in_every_step_is_the_gaussian_mechanism():
    bound = UserPoissonProfile(3.0, 9, 1.0, 4).epsilon(DELTA)
    assert bound == GaussianProfile(0.25).epsilon(DELTA)


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
        (ratio,) = profile.ratios("upper", 0.02, 1e-12)
        for eps in (0.0, 0.1, 0.5):
            a = math.exp(eps)
            attained = np.maximum(p - a * q, 0).sum(), np.maximum(q - a * p, 0).sum()
            proved = ratio.remove(eps), ratio.add(eps)
            assert attained[0] <= proved[0] + 1e-9
            assert attained[1] <= proved[1] + 1e-9
            share = max(share, attained[0] / proved[0])
    assert share > 0.98


@pytest.mark.parametrize("tail", [1e-14, 1e-3])
@pytest.mark.parametrize(("rate", "tau"), [(0.1, 4), (0.999, 2), (0.02, 30)])
def test_a_release_keeps_all_mass_of_both_laws_however_coarse_its_tail(tail, rate, tau):
    profile = UserPoissonProfile(2.0, 1, rate, tau)
    (upper,) = profile.ratios("upper", 0.05, tail)
    (lower,) = profile.ratios("lower", 0.05, tail)
    assert upper.q.sum() + upper.zero == pytest.approx(1.0, abs=1e-12)
    assert upper.p.sum() + upper.infinity == pytest.approx(1.0, abs=1e-12)
    assert lower.q.sum() == pytest.approx(1.0, abs=1e-12)
    for eps in (0.01, 0.5, 2.0):
        assert lower.remove(eps) <= upper.remove(eps)
        assert lower.add(eps) <= upper.add(eps)


def test_more_examples_a_user_cost_more():
    bounds = [UserPoissonProfile(3.0, 50, 0.05, tau).epsilon(DELTA) for tau in (1, 2, 4, 8)]
    assert all(a.upper < b.lower for a, b in itertools.pairwise(bounds))


def test_a_cap_so_high_that_no_grid_serves_is_priced_without_sampling():
    profile = UserPoissonProfile(0.05, 10, 0.5, 50)
    bound = profile.epsilon(DELTA)
    assert bound.upper == profile.ceiling().epsilon(DELTA).upper
    assert "no finer grid" in bound.note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1, 0.0, 2), "sampling_prob must be in"),
        ((1.0, 1, 0.5, 0), "max_contributions must be an integer >= 1"),
        ((0.0, 1, 0.5, 2), "noise_multiplier must be > 0"),
    ],
)
def test_impossible_prices_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        UserPoissonProfile(*arguments)


# ------------------------------------------------------------------ a release before training


def test_a_pure_release_is_composed_as_randomised_response():
    # Both orders of the exact product of the Gaussian pair with randomised response.
    sigma, pure, eps = 1.5, 0.4, 0.9
    right = 1 / (1 + math.exp(-pure))
    z = np.linspace(-20, 20, 400_001)
    p, q = stats.norm.pdf(z, 1, sigma), stats.norm.pdf(z, 0, sigma)
    exact = sum(
        np.maximum(a * p - math.exp(eps) * b * q, 0).sum() * (z[1] - z[0])
        for a, b in ((right, 1 - right), (1 - right, right))
    )
    composed = WithPureReleaseProfile(GaussianProfile(sigma), pure)
    assert isinstance(composed, PrivacyProfile)
    assert composed.delta(eps).upper == pytest.approx(exact, rel=1e-6)
    # Also where epsilon is below epsilon_0.
    exact = sum(
        np.maximum(a * p - math.exp(0.1) * b * q, 0).sum() * (z[1] - z[0])
        for a, b in ((right, 1 - right), (1 - right, right))
    )
    assert composed.delta(0.1).upper == pytest.approx(exact, rel=1e-6)


def test_a_pure_release_costs_at_most_its_epsilon():
    inner = GaussianProfile(1.0)
    composed = WithPureReleaseProfile(inner, 0.25)
    bound = composed.epsilon(DELTA)
    assert bound.upper == inner.epsilon(DELTA).upper + 0.25
    assert bound.lower == inner.epsilon(DELTA).lower
    assert composed.delta(bound.upper).upper <= DELTA * (1 + 1e-9)
    assert WithPureReleaseProfile(inner, 0.0).delta(1.0).upper == pytest.approx(
        inner.delta(1.0).upper
    )
    with pytest.raises(ValueError, match="epsilon must be >= 0"):
        WithPureReleaseProfile(inner, -1.0)


# --------------------------------------------------------------------------- the sum example

populations = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(populations, st.floats(0.02, 3.0))
@settings(max_examples=100, deadline=None)
def test_no_cap_beats_the_sweet_spot(contributions, eps):
    best = sum_error_bound(contributions, sum_sweet_spot(contributions, eps), eps)
    for cap in np.arange(0, 51, 0.5):
        assert best <= sum_error_bound(contributions, float(cap), eps) + 1e-9


@given(populations, st.integers(0, 50), st.floats(0.02, 3.0))
@settings(max_examples=100, deadline=None)
def test_the_exact_error_is_between_the_bias_and_the_bound(contributions, cap, eps):
    bias = sum(max(0, x - cap) for x in contributions)
    error = sum_error(contributions, float(cap), eps)
    assert bias - 1e-9 <= error <= sum_error_bound(contributions, float(cap), eps) + 1e-9


def test_the_exact_error_is_that_of_simulated_sums():
    contributions, cap, eps = [1, 2, 9, 14], 6.0, 0.8
    noise = np.random.default_rng(0).laplace(scale=cap / eps, size=400_000)
    errors = np.abs(np.minimum(contributions, cap).sum() + noise - np.sum(contributions))
    slack = stats.norm.isf(FALSE_ALARM / 2) * errors.std() / math.sqrt(errors.size)
    assert errors.mean() == pytest.approx(sum_error(contributions, cap, eps), abs=slack)


def test_the_sweet_spot_is_an_order_statistic():
    contributions = [float(x) for x in range(100)]
    assert sum_sweet_spot(contributions, 0.1) == 90.0
    assert sum_sweet_spot(contributions, 0.07) == 100 - math.ceil(1 / 0.07)
    assert sum_sweet_spot(contributions, 0.001) == 0.0


# ----------------------------------------------------------------------------------- bias


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=20),
    st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_the_bias_of_a_cap_is_within_every_bound(users, cap):
    counts, losses = np.array([user[0] for user in users]), np.array([user[1] for user in users])
    kept = np.minimum(counts, cap)
    bias = abs(np.average(losses, weights=kept) - np.average(losses, weights=counts))
    bounds = bias_bounds(counts, cap, losses)
    assert bias <= min(bounds) + 1e-9
    assert bounds.by_distance <= bounds.by_entropy + 1e-12 <= bounds.by_heaviest + 2e-12


def test_the_published_bias_bounds_are_their_formulas():
    bounds = bias_bounds([80, 10, 10], 20, [1.0, 0.0, 0.5])
    mean = 0.8 + 0.05
    variance = 0.8 * (1 - mean) ** 2 + 0.1 * mean**2 + 0.1 * (0.5 - mean) ** 2
    assert bounds.by_heaviest == pytest.approx(math.sqrt(math.log(5) / 2))
    assert bounds.by_variance == pytest.approx(math.sqrt(2 * variance / 0.2))
    assert bounds.by_distance == pytest.approx(0.3)
    assert math.isnan(bias_bounds([80, 10, 10], 20).by_variance)


def test_a_cap_that_cuts_nothing_has_no_bias():
    assert bias_bounds([3, 2], 3, [0.0, 1.0]) == (0.0, 0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------- the quantile


def test_the_quantile_has_the_law_of_the_exponential_mechanism():
    contributions, eps, caps = [1, 1, 2, 3, 5, 8, 9, 9], 1.3, [1, 2, 3, 5, 8, 13]
    utility = np.array([-abs(sum(x <= cap for x in contributions) - 0.75 * 8) for cap in caps])
    law = np.exp(eps * utility / 2)
    law /= law.sum()
    generator = random.Random(1)
    drawn = [
        private_quantile(
            contributions, 0.75, epsilon=eps, candidates=caps, randbelow=generator.randrange
        )
        for _ in range(4000)
    ]
    counts = np.array([drawn.count(cap) for cap in caps])
    assert stats.chisquare(counts, law * len(drawn)).pvalue > FALSE_ALARM


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.integers(0, 12),
    st.floats(0, 1),
    st.floats(0.1, 4),
)
@settings(max_examples=100, deadline=None)
def test_the_quantiles_law_moves_by_at_most_its_epsilon(contributions, user, quantile, eps):
    def law(values):
        utility = np.array([-abs(sum(x <= c for x in values) - quantile * len(values))
                            for c in range(1, 13)])  # fmt: skip
        weights = np.exp(eps * utility / 2)
        return weights / weights.sum()

    neighbour = list(contributions)
    neighbour[user % len(contributions)] = 0
    ratio = np.log(law(contributions) / law(neighbour))
    assert np.abs(ratio).max() <= eps + 1e-9


def test_the_quantile_finds_a_quantile_and_draws_from_the_system_by_default():
    contributions = np.random.default_rng(0).zipf(1.6, 3000).clip(1, 1000)
    cap = private_quantile(contributions, 0.9, epsilon=1.0, candidates=range(1, 1001))
    share = np.mean(contributions <= cap)
    assert abs(share - 0.9) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(quantile=1.2, epsilon=1.0, candidates=[1]), "quantile must be in"),
        (dict(quantile=0.5, epsilon=0.0, candidates=[1]), "epsilon must be > 0"),
        (dict(quantile=0.5, epsilon=1.0, candidates=[]), "at least one cap"),
    ],
)
def test_impossible_quantiles_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        private_quantile([1, 2], **arguments)


@pytest.mark.parametrize("contributions", [[], [-1.0], [math.inf], [[1.0]]])
def test_contributions_that_are_no_numbers_of_users_are_refused(contributions):
    with pytest.raises(ValueError, match="contributions must be a list of finite numbers"):
        sum_sweet_spot(contributions, 1.0)
