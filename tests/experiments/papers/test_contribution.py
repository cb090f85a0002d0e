"""Users of many examples: where the cap on what each contributes should be."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting import GaussianProfile, PrivacyProfile
from experiments.papers.contribution import (
    WithPureReleaseProfile,
    bias_bounds,
    excess_bounds,
    exponential_mechanism,
    privacy_excess,
    private_quantile,
    sum_error,
    sum_error_bound,
    sum_sweet_spot,
)

FALSE_ALARM = 1e-6


# --------------------------------------------------------------------------- the sum example

populations = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(populations, st.integers(0, 50), st.floats(0.02, 3.0))
@settings(max_examples=100, deadline=None)
def test_the_exact_error_is_between_the_bias_and_the_bound(contributions, cap, eps):
    bias = sum(max(0, x - cap) for x in contributions)
    error = sum_error(contributions, float(cap), eps)
    assert bias - 1e-9 <= error <= sum_error_bound(contributions, float(cap), eps) + 1e-9


@pytest.mark.parametrize("eps", [1e-320, 0.3, 0.5, 2.0])
def test_the_sweet_spot_is_the_cap_of_the_least_bound(eps):
    contributions = [1.0, 4.0, 4.0, 9.0, 14.0]
    bounds = {cap: sum_error_bound(contributions, cap, eps) for cap in (0.0, *contributions)}
    assert bounds[sum_sweet_spot(contributions, eps)] == min(bounds.values())


def test_the_exact_error_is_that_of_simulated_sums():
    contributions, cap, eps = [1, 2, 9, 14], 6.0, 0.8
    noise = np.random.default_rng(0).laplace(scale=cap / eps, size=400_000)
    errors = np.abs(np.minimum(contributions, cap).sum() + noise - np.sum(contributions))
    slack = stats.norm.isf(FALSE_ALARM / 2) * errors.std() / math.sqrt(errors.size)
    assert errors.mean() == pytest.approx(sum_error(contributions, cap, eps), abs=slack)


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


# ----------------------------------------------------------------- learning from a finite class


def users_and_losses(seed, users=30, models=4):
    """Returns users' numbers of examples, and losses on them: [models, number] of each user."""
    rng = np.random.default_rng(seed)
    counts = np.maximum(1, rng.pareto(1.0, users) * 3).astype(int)
    level = rng.random((users, models, 1))
    return counts, [
        np.clip(level[j] + 0.3 * rng.normal(size=(models, n)), 0, 1) for j, n in enumerate(counts)
    ]


@pytest.mark.parametrize("cap", [1, 3, 10])
def test_the_loss_of_the_model_that_is_drawn_is_within_the_bound(cap):
    failure, eps, failed, trials = 0.3, 2.0, 0, 60
    for seed in range(trials):
        counts, losses = users_and_losses(seed)
        rng = np.random.default_rng(seed)
        kept = [one[:, rng.permutation(one.shape[1])[:cap]] for one in losses]
        weights = np.exp(-eps / cap * sum(one.sum(axis=1) for one in kept))
        drawn = rng.choice(4, p=weights / weights.sum())
        whole = sum(one.sum(axis=1) for one in losses) / counts.sum()
        means = np.array([one.mean(axis=1) for one in losses]).T
        bound = excess_bounds(counts, cap, eps, 4, user_losses=means, failure=failure)
        general = excess_bounds(counts, cap, eps, 4, failure=failure)
        assert bound.bias <= general.bias + 1e-12
        assert bound[1:] == general[1:]
        failed += whole[drawn] - whole.min() > bound.on_data
    assert failed <= stats.binom.isf(FALSE_ALARM, trials, failure)
    uncut = excess_bounds(counts, int(counts.max()), eps, 4)
    assert uncut.bias == uncut.choice == 0.0
    users = counts.sum() / counts.max()
    assert uncut.on_data == privacy_excess(users, eps, math.log(4), failure=0.05 / 3)


@pytest.mark.parametrize("failure", [0.1, 0.01])
def test_the_stated_deviation_of_a_random_choice_is_tight(failure):
    # One user with as many losses of 1 as of 0, of which 50 count, and others who are not cut.
    bound = excess_bounds([1000, *[10] * 5], 50, 1.0, 1, failure=failure)
    off = bound.choice / 2 * (50 + 5 * 10)
    beyond, nearer = (
        2 * stats.hypergeom.sf(math.ceil(25 + x) - 1, 1000, 500, 50) for x in (off, off / 1.5)
    )
    assert beyond <= failure / 3 <= nearer


@pytest.mark.parametrize("failure", [0.5, 0.05])
def test_a_draw_exceeds_its_bound_with_the_stated_probability(failure):
    # The hardest class for the bound: one best model, and all others as bad as it allows.
    users, eps, size = 10.0, 1.0, 50
    bound = privacy_excess(users, eps, math.log(size), failure=failure)
    assert privacy_excess(0, eps, math.log(size), failure=failure) == math.inf
    others = (size - 1) * math.exp(-eps * users * bound)
    assert 0.6 * failure <= others / (1 + others) <= failure


def test_the_published_bound_follows_for_grids_of_6561_values():
    for d, failure in itertools.product((1, 3, 10), (0.9, 1e-6)):
        ours = privacy_excess(7.0, 0.3, 8 * d * math.log(3), failure=failure)
        published = 8 / (7 * 0.3) * ((d + 1) * math.log(3) + math.log(1 / failure))
        of_ours = 8 * privacy_excess(7.0, 0.3, (d + 1) * math.log(3), failure=failure)
        assert ours <= published == pytest.approx(of_ours)


def law(costs, epsilon, sensitivity, one_sided):
    """Returns the probabilities that are claimed."""
    rate = epsilon / sensitivity / (1 if one_sided else 2)
    weights = np.exp(-rate * (np.asarray(costs, float) - float(min(costs))))
    return weights / weights.sum()


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("costs", [[0, 3, 5, 20, 7], [Fraction(1, 3), Fraction(9), Fraction(4)]])
def test_it_draws_by_its_law(costs, one_sided):
    randbelow = random.Random(2).randrange
    how = {"epsilon": 1.7, "sensitivity": 5, "one_sided": one_sided}
    drawn = [exponential_mechanism(costs, **how, randbelow=randbelow) for _ in range(4000)]
    expected = law(costs, **how) * len(drawn)
    assert stats.chisquare(np.bincount(drawn, minlength=len(costs)), expected).pvalue > FALSE_ALARM


DELTA = 1e-5


@pytest.mark.parametrize("eps", [0.9, 0.1])  # above epsilon_0 and below it
def test_a_pure_release_is_composed_as_randomised_response(eps):
    # Both orders of the exact product of the Gaussian pair with randomised response.
    sigma, pure = 1.5, 0.4
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
