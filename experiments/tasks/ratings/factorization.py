"""Matrix factorization whose user parts stay with the users.

r_ui = 3.5 + b_i + (1, v_i) . w_u: the items' biases b and factors v are trained under differential
privacy and released; w_u is fitted to the user's own ratings alone, given b and v, and used for
that user alone. The released model is private, and each user's prediction depends on it and on that
user's data (the billboard model: Hsu et al., "Private Matchings and Allocations", STOC 2014).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIDDLE = 3.5
"""Public constant subtracted from ratings, near their mean in many data sets."""

RIDGE = 3.0
"""Weight of |w_u|^2 beside the squared errors of a user's ratings."""

Params = dict[str, Any]


def init(num_items: int, rank: int, seed: int = 0) -> Params:
    """Returns items without bias and with small random factors."""
    factors = 0.1 * np.random.default_rng(seed).normal(size=(num_items, rank))
    return {"bias": jnp.zeros(num_items), "factor": jnp.asarray(factors, jnp.float32)}


def own_part(params: Params, user: Any) -> jax.Array:
    """Returns w_u, a user's ridge regression, without derivative: [1 + rank].

    Args:
      params: Parameters of the items.
      user: "item", "rating" and "weight" of one user's ratings, [tau] each; weight 0 is padding.
    """
    features, residual = jax.lax.stop_gradient(_features(params, user))
    weighted = features * user["weight"][:, None]
    normal = weighted.T @ features + RIDGE * jnp.eye(features.shape[1])
    return jnp.linalg.solve(normal, weighted.T @ jnp.where(user["weight"] > 0, residual, 0.0))


def errors(params: Params, own: jax.Array, user: Any) -> jax.Array:
    """Returns rating - prediction for one user, 0 for padding: [tau]."""
    features, residual = _features(params, user)
    return jnp.where(user["weight"] > 0, residual - features @ own, 0.0)


def loss_fn(params: Params, user: Any) -> jax.Array:
    """Returns half the squared errors of a user's ratings.

    The user's part w_u is fitted to them: it minimises this loss (with the ridge), so that its
    derivative adds nothing to the items' gradient, and is left out.
    """
    user_part = own_part(params, user)
    return 0.5 * jnp.sum(jnp.square(errors(params, user_part, user)))


def rating_loss(params: Params, rating: Any) -> jax.Array:
    """Returns the loss of a single rating, without a user part."""
    rows = {name: jnp.asarray(column)[None] for name, column in rating.items()}
    no_part = jnp.zeros(1 + params["factor"].shape[1])
    return 0.5 * jnp.sum(jnp.square(errors(params, no_part, _weighted(rows))))


def loss(params: Params, row: Any) -> jax.Array:
    """Returns the loss of one clipped unit, several ratings or one.

    Args:
      params: Parameters of the items.
      row: "item" and "rating", [tau] each, and "weight" for padding; or scalars.
    """
    if jnp.ndim(row["item"]):
        return loss_fn(params, _weighted(row))
    return rating_loss(params, row)


@jax.jit
def predict(params: Params, rows: Any) -> jax.Array:
    """Returns predicted ratings in [1, 5], float32[rows].

    Args:
      params: Parameters of the items.
      rows: "item", [rows]; and as "known" each user's known "item", "rating" and "weight", [rows,
        tau].
    """

    def predict_row(item: Any, known: Any) -> jax.Array:
        user_part = own_part(params, known)
        features = jnp.concatenate([jnp.ones(1), params["factor"][item]])
        return MIDDLE + params["bias"][item] + features @ user_part

    return jnp.clip(jax.vmap(predict_row)(rows["item"], rows["known"]), 1.0, 5.0)


def _weighted(user: Any) -> Any:
    return user if "weight" in user else {**user, "weight": jnp.ones_like(user["rating"])}


def _features(params: Params, user: Any) -> tuple[jax.Array, jax.Array]:
    factors = params["factor"][user["item"]]
    features = jnp.concatenate([jnp.ones((factors.shape[0], 1)), factors], axis=1)
    return features, user["rating"] - MIDDLE - params["bias"][user["item"]]
