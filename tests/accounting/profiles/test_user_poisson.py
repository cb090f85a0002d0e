"""Users of many examples: the mixture's cost against its definition and other accountants."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter

import numpy as np
from enumeration import hockey_sticks
from scipy import stats

from accounting import PoissonProfile, UserPoissonProfile

DELTA = 1e-5


def test_no_vectors_of_bounded_norm_exceed_the_bound():
    # A user's examples in random directions of the plane, every subset in by its probability.
    rng = np.random.default_rng(0)
    share, epsilons = 0.0, (0.0, 0.1, 0.5)
    for _ in range(60):
        tau, rate, sigma = int(rng.integers(1, 4)), float(rng.uniform(0.05, 0.6)), 1.2
        vectors = rng.normal(size=(tau, 2))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        if rng.integers(2):
            vectors[:] = vectors[0]
        cells = Counter()
        for some in itertools.product((0, 1), repeat=tau):
            mean = tuple((np.array(some) @ vectors).tolist())
            cells[mean, (0.0, 0.0)] += rate ** sum(some) * (1 - rate) ** (tau - sum(some))
        attained = hockey_sticks(cells, sigma, *epsilons)
        for tail in (0.3, 1e-12):  # rare counts are left out, and still paid for
            ratio = UserPoissonProfile(sigma, 1, rate, tau).upper_ratio(0.02, tail)
            proved = np.array([ratio.delta(epsilon) for epsilon in epsilons])
            assert (attained <= proved * (1 + 1e-4)).all()
        share = max(share, float(attained[0] / proved[0]))
    assert share > 0.98


def test_a_tiny_rate_is_answered_on_coarse_grids():
    """It is the sum of all steps' own: that two of them draw the user is rarer still."""
    rate, cells = 2.13e-9, Counter()
    for k in range(21):
        cells[(float(k),), (0.0,)] = stats.binom.pmf(k, 20, rate)
    bound = UserPoissonProfile(0.37, 29_988, rate, 20).epsilon(2.4e-14)
    most, least = 29_988 * hockey_sticks(cells, 0.37, bound.lower, bound.upper)
    assert not bound.note
    assert bound.width <= 1e-3
    assert least <= 2.4e-14 * (1.0 + 3e-3)
    assert most >= 2.4e-14 * (1.0 - 3e-3)


def test_tiny_costs_of_users_are_bounded_without_warnings():
    """The probability that a batch has two rows of the user is at most 3e-13 over all steps."""
    noise, rate = 696.1967071500716, 2.1889178028975573e-08
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound = UserPoissonProfile(noise, 11, rate, 8).delta(1e-12)
    one_row = PoissonProfile(noise, 8 * rate, 11).delta(1e-12)
    assert bound.lower <= one_row.upper + 3e-13
    assert one_row.lower - 3e-13 <= bound.upper <= 1.1 * one_row.upper
