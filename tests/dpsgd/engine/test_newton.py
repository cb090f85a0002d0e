"""Gradient and Hessian of a row's log loss in one vector: its norm, and what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd.engine.newton import derivatives, logistic_sums


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
