"""Confidence bounds invert the divergence, and fail no more often than they say."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.papers.monte_carlo.confidence import (
    bennett_upper_bound,
    hockey_stick_upper_bound,
    kl_upper_bound,
    mean_upper_bound,
)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-300, 1.0 - 1e-9), st.integers(1, 10**9), st.floats(1e-12, 0.5))
def test_kl_upper_bound_inverts_the_divergence(mean, num_samples, beta):
    p = kl_upper_bound(mean, num_samples, beta)
    assert mean <= p <= 1.0
    with mpmath.workdps(50):
        q, budget = mpmath.mpf(mean), mpmath.log(1 / mpmath.mpf(beta)) / num_samples

        def divergence(p):
            return q * mpmath.log(q / p) + (1 - q) * mpmath.log((1 - q) / (1 - p))

        excess = mpmath.mpf(p) - q
        if p < 1.0:
            # Solved to 1e-6 of the excess over the mean, or to one unit in the last place of p.
            ulp = 4 * np.spacing(p)
            assert (
                divergence(min(q + excess * (1 + 1e-6) + ulp, 1 - mpmath.mpf(10) ** -40)) >= budget
            )
        assert divergence(max(q, q + excess * (1 - 1e-6) - 4 * np.spacing(p))) <= budget


def test_hockey_stick_bound_never_underflows_to_zero():
    assert hockey_stick_upper_bound(np.zeros(10), 1.0, beta=0.1, event_probability=0.0) > 0.0


@pytest.mark.parametrize("truth", [0.002, 0.03, 0.15])
def test_bennett_bounds_fail_no_more_often_than_beta(truth):
    rng, beta, trials, m = np.random.default_rng(1), 0.05, 2_000, 200
    # Values in {0, 0.2}: their second moment is a fifth of that of values in {0, 1}.
    samples = 0.2 * (rng.random((trials, m)) < 5 * truth)
    known = [bennett_upper_bound(x.mean(), 0.2 * truth, m, beta) for x in samples]
    unknown = [mean_upper_bound(x, beta, "bennett") for x in samples]
    for bounds in (known, unknown):
        assert np.sum(np.array(bounds) < truth) <= stats.binom.ppf(1 - 1e-8, trials, beta)
    assert np.all(np.array(known) <= np.maximum(unknown, math.sqrt(0.2 * truth)))


def test_bennett_is_tighter_where_the_variance_is_small_and_looser_where_nothing_was_seen():
    samples = 0.5 + 0.1 * np.random.default_rng(0).standard_normal(10_000)
    kl = kl_upper_bound(samples.mean(), samples.size, 1e-3)
    assert mean_upper_bound(samples, 1e-3, "bennett") - samples.mean() < 0.5 * (kl - samples.mean())
    assert mean_upper_bound(np.zeros(100), 1e-3, "bennett") > kl_upper_bound(0.0, 100, 1e-3)


@pytest.mark.parametrize("inequality", ["chernoff-hoeffding", "bennett"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1.0, 8.0), min_size=1, max_size=50), st.floats(0.0, 6.0))
def test_a_bound_of_one_set_of_samples_falls_in_epsilon(inequality, losses, epsilon):
    first, second = (
        hockey_stick_upper_bound(np.array(losses), at, beta=0.1, inequality=inequality)
        for at in (epsilon, epsilon + 0.1)
    )
    assert second <= first * (1 + 1e-12)


@pytest.mark.parametrize(("mean", "moment"), [(0.5, 0.2), (-0.1, 0.2), (0.5, 1.1)])
def test_moments_that_no_values_in_0_to_1_have_are_refused(mean, moment):
    with pytest.raises(ValueError, match="must hold"):
        bennett_upper_bound(mean, moment, 10, 0.1)
