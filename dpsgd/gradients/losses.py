"""Losses: functions of parameters and an example, and perhaps a random key.

A key is for randomness within one example, such as dropout: key(i, t) = fold_in(fold_in(K, t), i)
for row i of the data and step t. It costs no privacy: docs/explanation/isolation-of-examples.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

PyTree = Any
LossFn = Callable[..., Array]
"""(params, example) -> scalar, or (params, example, key) -> scalar."""


def identity(part: Any) -> Hashable:
    """Returns an equal key for equal settings of the same functions.

    Plain values are compared by value, tuples and this project's dataclasses by their entries. All
    other objects are compared by address, because their equality may ignore a part of their
    computation. An address is unique only while its object exists.

    >>> identity((1.0, print)) == identity((1.0, print))
    True
    """
    if part is None or isinstance(part, bool | int | float | str):
        return type(part), repr(part)
    if isinstance(part, tuple):
        return type(part), *map(identity, part)
    if isinstance(part, types.MethodType):
        return id(part.__self__), id(part.__func__)
    if dataclasses.is_dataclass(part) and type(part).__module__.partition(".")[0] in _OURS:
        values = (getattr(part, field.name) for field in dataclasses.fields(part))
        return type(part), *map(identity, values)
    return id(part)


_OURS = "accounting", "samplers", "dpsgd"


@dataclass(frozen=True)
class WrappedLoss:
    """Loss that computes another one, of the same signature.

    Attributes:
      loss_fn: (params, example) -> scalar, or (params, example, key) -> scalar.
    """

    loss_fn: Callable[..., Any]

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns the signature of the loss."""
        return inspect.signature(self.loss_fn)

    def __call__(self, *arguments: Any) -> Any:
        """Returns the loss."""
        return self.loss_fn(*arguments)


@dataclass(frozen=True, eq=False)
class Loss(WrappedLoss):
    """Loss of an algorithm, compared by `identity`: JAX keeps traces by the equality of functions.

    Attributes:
      foreign_calls: True to allow host calls and foreign functions, which no guarantee covers.
    """

    foreign_calls: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loss) and identity(self) == identity(other)

    def __hash__(self) -> int:
        return hash(identity(self))


def allows_foreign_calls(loss_fn: LossFn) -> bool:
    """Returns True for a `Loss` with `foreign_calls`."""
    return isinstance(loss_fn, Loss) and loss_fn.foreign_calls


class Keyed(NamedTuple):
    """Example and its key as one example, or [B, ...] of both."""

    example: PyTree
    key: Any


def takes_key(loss_fn: LossFn) -> bool:
    """Returns True if `loss_fn` takes a key.

    Its signature decides: a loss with a key requires three positional arguments, another loss two.

    >>> takes_key(lambda params, example: 0.0), takes_key(lambda params, example, key: 0.0)
    (False, True)

    Raises:
      ValueError: If the loss has other required arguments, any number, or a default key.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions that are written in C have none
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    unfilled = [p for p in parameters if p not in positional and p.kind != p.VAR_KEYWORD]
    fits = (
        len(required) in (2, 3)
        and all(p.default is not p.empty and p.kind == p.KEYWORD_ONLY for p in unfilled)
        and not (len(required) == 2 and {p.name for p in positional[2:]} & {"key", "rng", "rngs"})
    )
    if not fits:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        signature = f" ({', '.join(map(str, parameters))})" if parameters else ""
        raise ValueError(
            f"{name}{signature}: unclear whether this loss takes a key; define it as "
            "loss_fn(params, example) or loss_fn(params, example, key), without a default for the "
            "key and without *args"
        )
    return len(required) == 3


def row_loss(loss_fn: LossFn) -> Callable[[PyTree, PyTree], Array]:
    """Returns the loss of params and row; rows are `Keyed` if it takes a key."""
    if not takes_key(loss_fn):
        return loss_fn

    def loss(params: PyTree, row: Keyed) -> Array:
        """Returns the loss of the row's example under its key."""
        return loss_fn(params, row.example, row.key)

    return Loss(loss, allows_foreign_calls(loss_fn))


def loss_row(loss_fn: LossFn, example: PyTree) -> PyTree:
    """Returns `example` as the loss's row, with a key's shape if it takes one."""
    if not takes_key(loss_fn):
        return example
    return Keyed(example, jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")))


def loss_rows(batch: PyTree, keys: PyTree, keyed: bool) -> PyTree:
    """Returns the rows of a batch as `row_loss` takes them.

    Args:
      batch: Tree of arrays [B, ...].
      keys: Keys [B] of the examples, or None.
      keyed: True if the loss takes a key.

    Raises:
      ValueError: If `keys` is missing or unexpected, or of a kind whose draws are not independent.
    """
    if keyed == (keys is None):
        raise ValueError(
            "loss_fn takes a key: give keys[B], one for each example"
            if keyed
            else "keys are given, but loss_fn(params, example) takes none; leave them out"
        )
    if not keyed:
        return batch
    if "rbg" in str(jax.random.key_impl(keys)):  # also of arrays of words, by the default kind
        raise ValueError(
            "keys of the kind 'rbg' draw by the batch's first key and their position; give keys "
            'from jax.random.key(..., impl="threefry2x32")'
        )
    return Keyed(batch, keys)


def example_keys(
    loss_key: ArrayLike, step: ArrayLike, numbers: ArrayLike, shards: ArrayLike | None = None
) -> Array:
    """Returns each example's key in one step, shaped like `numbers`.

    Args:
      loss_key: uint32 `[2]`, from `RootKey.loss_key`; may be traced.
      step: Number of the step; may be traced.
      numbers: Row indices of the examples in the data or in their shard, integers in [0, 2^32).
      shards: Shard of each example, shaped like `numbers`, if the sampler has several.

    >>> example_keys(jnp.zeros(2, jnp.uint32), 0, jnp.arange(3)).shape
    (3,)
    """
    root = jax.random.wrap_key_data(jnp.asarray(loss_key), impl="threefry2x32")
    step_key = jax.random.fold_in(root, step)
    numbers = jnp.asarray(numbers)
    if shards is None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, numbers.ravel())
    else:
        shard_keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.ravel(shards))
        keys = jax.vmap(jax.random.fold_in)(shard_keys, numbers.ravel())
    return keys.reshape(numbers.shape)
