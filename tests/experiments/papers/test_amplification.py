"""Amplification by subsampling: closed forms at high precision, bounds as laws, and the limits."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from experiments.papers.amplification import (
    amplify,
    deamplify,
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
    laplace_noise_scale,
    mean_squared_error,
)

EPSILONS = st.floats(1e-12, 2e3)
PROBABILITIES = st.floats(1e-9, 1.0)


@given(EPSILONS, PROBABILITIES)
def test_amplify_and_deamplify_are_accurate_and_inverse(epsilon, prob):
    amplified, delta = amplify(epsilon, 1e-3, prob)
    needed, needed_delta = deamplify(epsilon, 1e-3 * prob, prob)
    with mpmath.workdps(60 + int(0.44 * epsilon)):
        e, p = mpmath.mpf(epsilon), mpmath.mpf(prob)
        assert amplified == pytest.approx(float(mpmath.log1p(p * mpmath.expm1(e))), rel=1e-13)
        assert needed == pytest.approx(float(mpmath.log1p(mpmath.expm1(e) / p)), rel=1e-13)
    assert delta == 1e-3 * prob
    assert needed_delta == pytest.approx(1e-3, rel=1e-13)
    assert amplified <= epsilon * (1 + 1e-15) <= needed * (1 + 1e-14)
    assert amplify(needed, needed_delta, prob)[0] == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize(
    ("prob", "sigma", "epsilon"), [(0.01, 0.5, 3.0), (0.3, 1.0, 0.5), (0.9, 1.0, 1.0)]
)
def test_theorem_is_exact_for_one_sampled_gaussian(prob, sigma, epsilon):
    # Removing an example: the divergence is p times that of the mechanism; adding: not more.
    base = GaussianProfile(sigma).delta(epsilon)
    amplified, delta = amplify(epsilon, base.upper, prob)
    sampled = PoissonProfile(sigma, prob, 1).delta(amplified)
    assert sampled.lower <= delta * (1 + 1e-9)
    assert sampled.upper == pytest.approx(delta, rel=1e-2)


@given(EPSILONS, PROBABILITIES)
def test_laplace_ratio_lies_within_its_bounds(epsilon, prob):
    ratio = laplace_noise_ratio(epsilon, prob)
    c = epsilon / prob
    assert ratio <= 1.0
    assert ratio >= (1 - 1e-12) * math.log1p(c) / c
    assert ratio >= (1 - 1e-12) * prob / (prob + epsilon)
    assert 1.0 / ratio <= laplace_noise_penalty(c) * (1 + 1e-12)


@given(st.floats(0.0, 1e12))
def test_penalties_begin_at_one_and_gaussian_noise_suffers_less(c):
    assert gaussian_noise_penalty_many_steps(c) >= 1 - 1e-15
    assert laplace_noise_penalty(c) >= 1 - 1e-15
    if c <= 1.0:
        assert gaussian_noise_penalty_many_steps(c) <= laplace_noise_penalty(c) + 1e-15


def test_gaussian_penalty_falls_to_its_limit_with_many_steps():
    epsilon, delta, c = 1.0, 1e-5, 0.5

    def excess(steps):
        prob = 1.0 / (c * full_batch_noise(steps, epsilon=epsilon, delta=delta))
        exact = gaussian_noise_penalty(prob, steps, epsilon=epsilon, delta=delta)
        return exact - gaussian_noise_penalty_many_steps(c)

    # The error of the central limit theorem is of order 1/√k: ten times smaller over this range.
    few, many = excess(100), excess(10_000)
    assert 0.0 < many < 0.2 * few


@pytest.mark.parametrize("probs", [1.0, 0.2, np.linspace(0.1, 0.9, 50)])
def test_mean_squared_error_of_a_sampled_mean_matches_simulation(probs):
    rng, epsilon = np.random.default_rng(0), 0.5
    values = rng.uniform(-1, 1, 50)
    scale = max(laplace_noise_scale(epsilon, 50, p) for p in np.atleast_1d(probs))
    drawn = rng.random((40_000, 50)) < probs
    means = (drawn * (values / probs)).sum(axis=1) / 50 + rng.laplace(0, scale, 40_000)
    squares = (means - values.mean()) ** 2
    error = mean_squared_error(values, epsilon, probs)
    assert abs(squares.mean() - error) <= 4 * squares.std() / 200
    # Each row's own theorem 1: the one that is drawn least often pays epsilon, no other more.
    paid = [amplify(1 / (50 * p * scale), 0.0, p)[0] for p in np.atleast_1d(probs)]
    assert max(paid) == paid[0] == pytest.approx(epsilon)
