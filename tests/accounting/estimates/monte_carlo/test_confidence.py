"""Confidence bounds invert the divergence, and fail no more often than they say."""

import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting.estimates.monte_carlo import hockey_stick_upper_bound, kl_upper_bound


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-9, 1.0 - 1e-9), st.integers(1, 10**9), st.floats(1e-12, 0.5))
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


def test_kl_upper_bound_fails_no_more_often_than_beta():
    rng, beta, trials, m = np.random.default_rng(0), 0.05, 4_000, 200
    for truth in (0.002, 0.03, 0.4):
        means = rng.binomial(m, truth, trials) / m
        failures = sum(kl_upper_bound(q, m, beta) < truth for q in means)
        # Chernoff's exponent ignores a polynomial factor, so the count is well below β; never above
        # it.
        assert failures <= stats.binom.ppf(1 - 1e-8, trials, beta)


def test_hockey_stick_bound_never_underflows_to_zero():
    assert hockey_stick_upper_bound(np.zeros(10), 1.0, beta=0.1, event_probability=0.0) > 0.0
