"""Noised Newton steps of logistic models: gradient and Hessian of a row in one bounded vector.

Claim and proof: docs/explanation/private-calibration.md.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def hessian_weight(most_square: float) -> float:
    """Returns k, at which the Hessian is released within the sensitivity of the gradient alone.

    Args:
      most_square: Q, most of a row's |x|^2; the vector of `logistic_sums` has a norm of at most
        sqrt(Q).
    """
    return math.sqrt(8 / most_square)


def logistic_sums(state: Any, x: Any, y: Any, most_square: float) -> jax.Array:
    r"""Returns the gradient and the weighted Hessian of the log loss of a row, as one vector.

    .. math:: v = \left((p - y)\, x,\; k\, p (1 - p)\, [x_i x_j]_{i \le j}\right), \quad
        p = \mathrm{sigmoid}(\theta \cdot x)

    with entries off the diagonal times sqrt(2), so that norms are those of the matrix.

    Args:
      state: theta, float32[d].
      x: Features of the row, float32[d].
      y: Its label, 0 or 1.
      most_square: Q.
    """
    p = jax.nn.sigmoid(jnp.sum(state * x))
    i, j, scale = _upper(x.size)
    w = hessian_weight(most_square) * p * (1 - p)
    return jnp.concatenate([(p - y) * x, w * scale * (x[i] * x[j])])


def derivatives(mean: Any, size: int, most_square: float) -> tuple[jax.Array, jax.Array]:
    """Returns gradient, [d], and Hessian, [d, d], of which `mean` is the mean of vectors.

    Args:
      mean: Of `logistic_sums`, with noise.
      size: d.
      most_square: Q.
    """
    i, j, scale = _upper(size)
    half = jnp.zeros((size, size)).at[i, j].set(mean[size:] / scale)
    hessian = half + jnp.triu(half, 1).T
    return mean[:size], hessian / hessian_weight(most_square)


def newton_step(gradient: Any, hessian: Any, least_curvature: float) -> jax.Array:
    """Returns -H^{-1} g, where eigenvalues of H count as at least `least_curvature` > 0."""
    curvatures, axes = jnp.linalg.eigh(hessian)
    return -axes @ ((axes.T @ gradient) / jnp.maximum(curvatures, least_curvature))


def _upper(size: int) -> tuple[Any, Any, jax.Array]:
    i, j = jnp.triu_indices(size)
    return i, j, jnp.where(i == j, 1.0, math.sqrt(2)).astype(jnp.float32)
