"""Users of many examples: the mixture's cost against its definition and other accountants."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import stats

from accounting import UserPoissonProfile

DELTA = 1e-5


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


def test_a_tiny_rate_is_answered_on_coarse_grids():
    """It is the sum of all steps' own: that two of them draw the user is rarer still."""
    profile, one = (UserPoissonProfile(0.37, steps, 2.13e-9, 20) for steps in (29_988, 1))
    bound = profile.epsilon(2.4e-14)
    assert not bound.note
    assert bound.width <= 1e-3
    assert 29_988 * one.delta(bound.lower).upper >= 2.4e-14 * (1.0 - 1e-3)
    assert 29_988 * one.delta(bound.upper).lower <= 2.4e-14 * (1.0 + 1e-3)
