"""Users of many examples: where the cap on what each contributes should be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting.releases.contribution import (
    bias_bounds,
    private_quantile,
    sum_error,
    sum_error_bound,
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
