"""Noised Newton steps of a logistic regression: their sensitivity, their fit, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile
from dpsgd import private_logistic_regression
from dpsgd.engine.newton import derivatives, logistic_sums
from samplers import FullBatch

N, D, R = 3_000, 4, 1.5
RNG = np.random.default_rng(0)
X = np.concatenate([np.ones((N, 1)), RNG.uniform(-0.6, 0.6, (N, D - 1))], axis=1)
Y = RNG.random(N) < special.expit(X @ [-1.0, 2.0, 0.0, -3.0])


def log_loss(theta, x=X, y=Y):
    return np.mean(np.logaddexp(0, x @ theta) - y * (x @ theta))


def fitted(x=X, y=Y, *, epsilon=1e5, **given):
    given = {"largest_norm": R, "delta": 0.05, "audit": False, "epsilon": epsilon, **given}
    return private_logistic_regression(x, y, **given)


@pytest.mark.parametrize("size", [1, 3, 20])
def test_gradient_and_hessian_of_any_row_have_together_the_norm_of_the_gradient_alone(size):
    # Rows of norm sqrt(Q), along the coefficients and not, for all probabilities.
    most = 2.0
    x = np.random.default_rng(1).normal(size=(50, size))
    x *= np.sqrt(most) / np.linalg.norm(x, axis=1, keepdims=True)
    z = np.linspace(-12, 12, 49)
    theta = x[:, None] * z[:, None] / most  # theta . x = z

    @jax.jit
    @jax.vmap
    @jax.vmap
    def norm(theta, x, y):
        return jnp.linalg.norm(logistic_sums(theta, x, y, most))

    for y in (0.0, 1.0):
        rows = np.broadcast_to(x[:, None], theta.shape)
        norms = norm(theta.astype(np.float32), rows.astype(np.float32), np.full(theta.shape[:2], y))
        assert np.sqrt(most) * 0.999 < norms.max() <= np.sqrt(most) * (1 + 1e-5)


def test_the_vector_of_a_row_holds_the_derivatives_of_its_log_loss():
    theta, x = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.3, 0.1, -0.6])

    def loss(theta):
        z = jnp.sum(theta * x)
        return jnp.logaddexp(0.0, z) - z

    @jax.jit
    def both():
        found = derivatives(logistic_sums(theta, x, 1.0, 3.0), 3, 3.0)
        return found, (jax.grad(loss)(theta), jax.hessian(loss)(theta))

    for ours, theirs in zip(*both(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_without_noise_the_steps_end_at_the_least_log_loss():
    best = optimize.minimize(log_loss, np.zeros(D)).x
    np.testing.assert_allclose(fitted().value, best, atol=0.02)


@pytest.mark.long
def test_under_noise_it_learns_with_the_guarantee_that_was_asked_for():
    theta, guarantee = fitted(epsilon=1.0, delta=1e-4, audit=True)
    assert log_loss(theta) < log_loss(np.zeros(D)) - 0.05
    assert 0.99 < guarantee.epsilon.upper <= 1.0
    mechanism = guarantee.mechanism
    assert mechanism.sampler == FullBatch(N, 6)
    one = GaussianProfile(mechanism.noise_multiplier / np.sqrt(6))
    assert one.epsilon(1e-4).upper == pytest.approx(guarantee.epsilon.upper, abs=1e-6)
    assert "the draws keep what the guarantee assumes" in guarantee.notes[-1]


def test_a_row_beyond_the_bound_or_without_numbers_moves_the_fit_like_any_other():
    long, empty = X.copy(), X.copy()
    long[:900] *= 1e6
    long[:300] *= 1e30  # the square of such a number is none of float32
    empty[0] = np.nan
    shortened, without = X.copy(), np.delete(X, 0, axis=0)
    shortened[:900] *= R / np.linalg.norm(X[:900], axis=1, keepdims=True)
    for one, other in ((long, shortened), (empty, without)):
        y = Y if len(other) == N else Y[1:]
        np.testing.assert_allclose(fitted(one).value, fitted(other, y).value, atol=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": X[0]}, r"features must be vectors, float\[n, d\], and are float64\(4,\)"),
        ({"y": Y[1:]}, "labels must be 0 or 1 of each of the 3000 rows"),
        ({"y": Y + 1}, "labels must be 0 or 1"),
        ({"largest_norm": 0.0}, "largest_norm must be finite and > 0, got 0"),
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_a_line(given, message):
    with pytest.raises(ValueError, match=message) as refused:
        fitted(**given)
    assert "\n" not in str(refused.value)
