"""Noised Newton steps of logistic models: a row's gradient and Hessian in one vector.

Claim and proof: docs/explanation/private-calibration.md.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def hessian_weight(most_square: float) -> float:
    """Returns the Hessian's weight k that keeps the gradient's sensitivity.

    `most_square` is a bound Q on a row's |x|^2; the vector of `logistic_sums` has norm at most
    sqrt(Q).
    """
    return math.sqrt(8 / most_square)


def logistic_sums(state: Any, x: Any, y: Any, most_square: float) -> jax.Array:
    r"""Returns a row's gradient and weighted Hessian, one vector.

    .. math:: v = \left((p - y)\, x,\; k\, p (1 - p)\, [x_i x_j]_{i \le j}\right), \quad
        p = \mathrm{sigmoid}(\theta \cdot x)

    with entries off the diagonal times sqrt(2), so that norms equal the matrix's.

    Args:
      state: Parameters theta, float32[d].
      x: Features of the row, float32[d].
      y: Label of the row, 0 or 1.
      most_square: Bound Q on |x|^2.
    """
    p = jax.nn.sigmoid(jnp.sum(state * x))
    i, j, scale = _upper(x.size)
    w = hessian_weight(most_square) * p * (1 - p)
    return jnp.concatenate([(p - y) * x, w * scale * (x[i] * x[j])])


def derivatives(mean: Any, size: int, most_square: float) -> tuple[jax.Array, jax.Array]:
    """Unpacks the gradient [d] and Hessian [d, d].

    Args:
      mean: Noised mean of `logistic_sums`.
      size: Number d of features.
      most_square: Bound Q on |x|^2.
    """
    i, j, scale = _upper(size)
    half = jnp.zeros((size, size)).at[i, j].set(mean[size:] / scale)
    hessian = half + jnp.triu(half, 1).T
    return mean[:size], hessian / hessian_weight(most_square)


def newton_step(gradient: Any, hessian: Any, least_curvature: float) -> jax.Array:
    """Returns the Newton step -H^{-1} g with bounded curvature.

    >>> newton_step(jnp.ones(2), jnp.diag(jnp.array([2.0, 0.1])), 0.5).tolist()
    [-0.5, -2.0]

    Args:
      gradient: Gradient g, [d].
      hessian: Symmetric matrix H, [d, d].
      least_curvature: Lower bound > 0 on the eigenvalues of H.
    """
    curvatures, axes = jnp.linalg.eigh(hessian)
    return -axes @ ((axes.T @ gradient) / jnp.maximum(curvatures, least_curvature))


def _upper(size: int) -> tuple[Any, Any, jax.Array]:
    i, j = jnp.triu_indices(size)
    return i, j, jnp.where(i == j, 1.0, math.sqrt(2)).astype(jnp.float32)
