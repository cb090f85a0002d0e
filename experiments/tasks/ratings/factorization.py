"""Matrix factorization in which what belongs to a user stays with the user.

r_ui = 3.5 + b_i + (1, v_i) . w_u: the items' biases b and factors v are trained under differential
privacy and released; w_u is found from the user's own ratings alone, given b and v, and is used for
that user alone. So the released model is private, and each user's prediction depends on it and on
that user's data (the billboard model: Hsu et al., "Private Matchings and Allocations", STOC 2014).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIDDLE = 3.5
"""Subtracted from ratings: a public constant, near their mean in many data sets."""

RIDGE = 3.0
"""Weight of |w_u|^2 beside the squared errors of a user's ratings."""

Params = dict[str, Any]


def init(num_items: int, rank: int, seed: int = 0) -> Params:
    """Returns items without bias and with small random factors, a public choice."""
    factors = 0.1 * np.random.default_rng(seed).normal(size=(num_items, rank))
    return {"bias": jnp.zeros(num_items), "factor": jnp.asarray(factors, jnp.float32)}


def own_part(params: Params, user: Any) -> jax.Array:
    """Returns w_u, the ridge regression of one user's ratings: [1 + rank], without derivative.

    Args:
      params: Items.
      user: item, rating and weight of one user, [tau] each; weight 0 is padding.
    """
    features, residual = jax.lax.stop_gradient(_features(params, user))
    weighted = features * user["weight"][:, None]
    normal = weighted.T @ features + RIDGE * jnp.eye(features.shape[1])
    return jnp.linalg.solve(normal, weighted.T @ jnp.where(user["weight"] > 0, residual, 0.0))


def errors(params: Params, own: jax.Array, user: Any) -> jax.Array:
    """Returns rating - prediction for one user with part `own`, 0 where padded: [tau]."""
    features, residual = _features(params, user)
    return jnp.where(user["weight"] > 0, residual - features @ own, 0.0)


def loss_fn(params: Params, user: Any) -> jax.Array:
    """Returns half the squared errors of one user's ratings, their own part fitted to them.

    w_u minimises this loss (with the ridge), so that its derivative by w_u adds nothing to the
    gradient by the items, and is left out.
    """
    own = own_part(params, user)
    return 0.5 * jnp.sum(jnp.square(errors(params, own, user)))


def rating_loss(params: Params, rating: Any) -> jax.Array:
    """Returns the loss of one rating by itself, of a user without a part of their own."""
    one = {name: jnp.asarray(column)[None] for name, column in rating.items()}
    no_part = jnp.zeros(1 + params["factor"].shape[1])
    return 0.5 * jnp.sum(jnp.square(errors(params, no_part, _weighted(one))))


def loss(params: Params, row: Any) -> jax.Array:
    """Returns the loss of what is clipped as one: some ratings of a user, or a rating by itself.

    Args:
      params: Items.
      row: item and rating, [tau] each, and weight where some are padding; or scalars.
    """
    if jnp.ndim(row["item"]):
        return loss_fn(params, _weighted(row))
    return rating_loss(params, row)


@jax.jit
def predict(params: Params, rows: Any) -> jax.Array:
    """Returns the predicted ratings, in [1, 5], of some items by some users: float32[rows].

    Args:
      params: Items.
      rows: item, [rows]; and of who is asked, as far as known, item, rating and weight as "known":
        [rows, tau] each.
    """

    def of_one(item: Any, known: Any) -> jax.Array:
        own = own_part(params, known)
        features = jnp.concatenate([jnp.ones(1), params["factor"][item]])
        return MIDDLE + params["bias"][item] + features @ own

    return jnp.clip(jax.vmap(of_one)(rows["item"], rows["known"]), 1.0, 5.0)


def _weighted(user: Any) -> Any:
    return user if "weight" in user else {**user, "weight": jnp.ones_like(user["rating"])}


def _features(params: Params, user: Any) -> tuple[jax.Array, jax.Array]:
    factors = params["factor"][user["item"]]
    features = jnp.concatenate([jnp.ones((factors.shape[0], 1)), factors], axis=1)
    return features, user["rating"] - MIDDLE - params["bias"][user["item"]]
