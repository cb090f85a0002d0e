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

from dpsgd.gradients.rows import with_rows

MIDDLE = 3.5
"""Public constant subtracted from ratings, near their mean in many data sets."""

RIDGE = 3.0
"""Weight of |w_u|^2 beside the squared errors of a user's ratings."""

Params = dict[str, Any]


def init(num_items: int, rank: int, seed: int = 0) -> Params:
    """Returns items without bias and with small random factors.

    >>> {name: x.shape for name, x in init(num_items=3, rank=2).items()}
    {'bias': (3,), 'factor': (3, 2)}
    """
    factors = 0.1 * np.random.default_rng(seed).normal(size=(num_items, rank))
    return {"bias": jnp.zeros(num_items), "factor": jnp.asarray(factors, jnp.float32)}


def own_part(items: Params, user: Any) -> jax.Array:
    """Returns w_u, a user's ridge regression, without derivative.

    w_u is float32[1 + rank].

    Args:
      items: Parameters of the rated items, [tau, ...] each.
      user: "item", "rating" and "weight" of one user's ratings, [tau] each; weight 0 is padding.
    """
    features, residual = jax.lax.stop_gradient(_features(items, user))
    weighted = features * user["weight"][:, None]
    normal = weighted.T @ features + RIDGE * jnp.eye(features.shape[1])
    return jnp.linalg.solve(normal, weighted.T @ jnp.where(user["weight"] > 0, residual, 0.0))


def errors(items: Params, own: jax.Array, user: Any) -> jax.Array:
    """Returns rating - prediction of one user; 0 for padding.

    Args:
      items: Parameters of the rated items, [tau, ...] each.
      own: User part w_u, float32[1 + rank].
      user: "item", "rating" and "weight" of the user's ratings, [tau] each.
    """
    features, residual = _features(items, user)
    return jnp.where(user["weight"] > 0, residual - features @ own, 0.0)


def lookups(row: Any) -> dict[str, Any]:
    """Returns the item indices to look up, by parameter name."""
    return {"bias": row["item"], "factor": row["item"]}


def loss_of_items(params: Params, items: Params, row: Any) -> jax.Array:
    """Returns half the sum of squared errors of one clipped unit.

    A unit is several ratings of a user, or one. The user part w_u is fitted to the unit's ratings:
    it minimises this loss (with the ridge), so its derivative adds nothing to the items' gradient
    and is omitted. A single rating has no user part.

    Args:
      params: Parameters without values, as all are looked up.
      items: Parameters of the rated items, [tau, ...] each; or of one item.
      row: "item" and "rating", [tau] each, and "weight", 0 for padding; or scalars.
    """
    if jnp.ndim(row["item"]):
        user = _weighted(row)
        user_part = own_part(items, user)
    else:
        items, row = jax.tree.map(lambda x: jnp.asarray(x)[None], (items, row))
        user, user_part = _weighted(row), jnp.zeros(1 + items["factor"].shape[1])
    return 0.5 * jnp.sum(jnp.square(errors(items, user_part, user)))


loss = with_rows(lookups, loss_of_items)
"""(params, row) -> loss of one clipped unit, see `loss_of_items`."""


@jax.jit
def predict(params: Params, rows: Any) -> jax.Array:
    """Returns predicted ratings in [1, 5], float32[rows].

    Args:
      params: Parameters of the items.
      rows: "item", [rows]; "known": a user's "item", "rating" and "weight", [rows, tau] each.
    """

    def predict_row(item: Any, known: Any) -> jax.Array:
        user_part = own_part(_looked_up(params, known), known)
        features = jnp.concatenate([jnp.ones(1), params["factor"][item]])
        return MIDDLE + params["bias"][item] + features @ user_part

    return jnp.clip(jax.vmap(predict_row)(rows["item"], rows["known"]), 1.0, 5.0)


def _weighted(user: Any) -> Any:
    return user if "weight" in user else {**user, "weight": jnp.ones_like(user["rating"])}


def _looked_up(params: Params, user: Any) -> Params:
    return {name: params[name][index] for name, index in lookups(user).items()}


def _features(items: Params, user: Any) -> tuple[jax.Array, jax.Array]:
    factors = items["factor"]
    features = jnp.concatenate([jnp.ones((factors.shape[0], 1)), factors], axis=1)
    return features, user["rating"] - MIDDLE - items["bias"]
