"""Losses: functions of parameters and an example, or of these and a random key.

A key is for randomness within one example, such as dropout: key(i, t) = fold_in(fold_in(K, t), i)
for row i of the data and step t. It costs no privacy: docs/explanation/isolation-of-examples.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dpsgd.gradients.isolation import ForeignCalls

PyTree = Any
LossFn = Callable[..., Array]
"""(params, example) -> scalar, or (params, example, key) -> scalar."""


class Keyed(NamedTuple):
    """An example and its key as one example, for a loss of two arguments; or [B, ...] of them."""

    example: PyTree
    key: Any


def takes_key(loss_fn: LossFn) -> bool:
    """Returns whether `loss_fn` takes a key beside parameters and example, by its signature.

    It does if it requires three positional arguments, and does not if it requires two.

    >>> takes_key(lambda params, example: 0.0), takes_key(lambda params, example, key: 0.0)
    (False, True)

    Raises:
      ValueError: if it requires other arguments, takes any number, or has a default for the key.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions that are written in C have none
        parameters = []
    at_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in at_place if p.default is p.empty]
    others = [p for p in parameters if p not in at_place and p.kind != p.VAR_KEYWORD]
    fits = (
        len(required) in (2, 3)
        and all(p.default is not p.empty and p.kind == p.KEYWORD_ONLY for p in others)
        and not (len(required) == 2 and {p.name for p in at_place[2:]} & {"key", "rng", "rngs"})
    )
    if not fits:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        found = f" ({', '.join(map(str, parameters))})" if parameters else ""
        raise ValueError(
            f"{name}{found}: it cannot be told whether this loss takes a key; define it as "
            "loss_fn(params, example) or loss_fn(params, example, key), without a default for the "
            "key and without *args"
        )
    return len(required) == 3


def of_row(loss_fn: LossFn) -> Callable[[PyTree, PyTree], Array]:
    """Returns the loss as one of two arguments: its example is `Keyed` where it takes a key."""
    if not takes_key(loss_fn):
        return loss_fn

    def loss(params: PyTree, row: Keyed) -> Array:
        return loss_fn(params, row.example, row.key)

    return ForeignCalls(loss) if isinstance(loss_fn, ForeignCalls) else loss


def row_of(loss_fn: LossFn, example: PyTree) -> PyTree:
    """Returns what `of_row(loss_fn)` takes for `example`, with the shape of a key if it has one."""
    if not takes_key(loss_fn):
        return example
    return Keyed(example, jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")))


def rows_of(batch: PyTree, keys: PyTree, keyed: bool) -> PyTree:
    """Returns the rows of a batch as `of_row` of the loss takes them.

    Args:
      batch: Tree of arrays [B, ...].
      keys: [B], or None.
      keyed: Whether the loss takes a key.

    Raises:
      ValueError: if there are keys and the loss takes none, or the other way round, or one key has
        a part in what another draws.
    """
    if keyed == (keys is None):
        raise ValueError(
            "loss_fn takes a key: give keys[B], one for each example"
            if keyed
            else "keys are given, but the loss is loss_fn(params, example), without a key"
        )
    if not keyed:
        return batch
    if "rbg" in str(jax.random.key_impl(keys)):  # also of arrays of words, by the default kind
        raise ValueError(
            "keys of the kind 'rbg' draw by the first of a batch and their place in it; give keys "
            'from jax.random.key(..., impl="threefry2x32")'
        )
    return Keyed(batch, keys)


def example_keys(
    loss_key: ArrayLike, step: ArrayLike, numbers: ArrayLike, shards: ArrayLike | None = None
) -> Array:
    """Returns the key of each example in one step: typed keys of the shape of `numbers`.

    Args:
      loss_key: uint32 `[2]`, from `RootKey.loss_key`; may be traced.
      step: Number of the step; may be traced.
      numbers: Row number of each example in the data, integers in [0, 2^32); or in its shard.
      shards: The shard of each, of the shape of `numbers`, where the sampler has several.
    """
    root = jax.random.wrap_key_data(jnp.asarray(loss_key), impl="threefry2x32")
    of_step = jax.random.fold_in(root, step)
    numbers = jnp.asarray(numbers)
    if shards is None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(of_step, numbers.ravel())
    else:
        of_shard = jax.vmap(jax.random.fold_in, (None, 0))(of_step, jnp.ravel(shards))
        keys = jax.vmap(jax.random.fold_in)(of_shard, numbers.ravel())
    return keys.reshape(numbers.shape)
