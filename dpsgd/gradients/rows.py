"""Losses of looked-up rows: an example's loss gets its own table rows, and no table.

A loss that receives only these rows cannot read the rows of another example.
Claim and proof: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from dpsgd.gradients.frozen import AbsentTable, leaf_names, named_leaves
from dpsgd.gradients.isolation import Isolated, isolated
from dpsgd.gradients.losses import Keyed, LossFn, WrappedLoss, loss_row

PyTree = Any


def with_rows(
    lookups: Callable[..., dict[str, jax.Array]], loss: Callable[..., jax.Array]
) -> RowLoss:
    """Returns a loss with declared table look-ups.

    The result is an ordinary loss, called as (params, example) or (params, example, key): it trains
    with and without `LazyTables`. Row indices below 0 read row 0, and indices beyond the table its
    last row; mask padding in the loss.

    Args:
      lookups: Pure function (example) -> {name of a table: row indices, int[...]}, or (example,
        key). A name is the path of the parameter, such as `embedding.kernel`.
      loss: Pure function (params, rows, example) -> scalar, or (params, rows, example, key).
        `rows` has the looked-up rows by name, [..., width]; `params` has no values of tables.

    >>> loss = with_rows(
    ...     lambda example: {"table": example["id"]},
    ...     lambda params, rows, example: rows["table"] @ params["w"] - example["y"],
    ... )
    >>> params = {"table": jnp.eye(3), "w": jnp.array([1.0, 2.0, 4.0])}
    >>> float(loss(params, {"id": 2, "y": 1.0}))
    3.0

    Raises:
      ValueError: If the signature of either function is another; from a call, if a look-up names no
        parameter or has no integer indices, or `loss` reads a table.
    """
    arguments = {"lookups": (lookups, "example"), "loss": (loss, "params, rows, example")}
    for name, (function, expected) in arguments.items():
        count, arity = expected.count(",") + 1, _num_required(function)
        if arity not in (count, count + 1):
            raise ValueError(
                f"{name} takes {arity} arguments; define it as {name}({expected}) or "
                f"{name}({expected}, key)"
            )
    lookups_keyed, keyed = _num_required(lookups) == 2, _num_required(loss) == 4
    if lookups_keyed and not keyed:
        raise ValueError("lookups takes a key, but loss does not; give loss a key argument, too")
    return RowLoss(lookups, loss, lookups_keyed, keyed)


def _num_required(function: Callable[..., Any]) -> int:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


class LocatedExample(NamedTuple):
    """Example with the places of its rows in the tables at hand."""

    example: PyTree
    places: dict[str, jax.Array]
    """Row indices by table name, int32[...]."""


@dataclass(frozen=True, eq=False)
class RowLoss:
    """Loss with declared look-ups, see `with_rows`.

    Attributes:
      lookups: Function of the example, and of its key if `lookups_keyed`.
      loss: Function of parameters, rows and example, and of the example's key if `keyed`.
      lookups_keyed: True if the look-ups take the key.
      keyed: True if the loss takes a key.
    """

    lookups: Callable[..., dict[str, jax.Array]]
    loss: Callable[..., jax.Array]
    lookups_keyed: bool
    keyed: bool

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns the signature of the loss without rows."""
        names = "params", "example", *["key"] * self.keyed
        kind = inspect.Parameter.POSITIONAL_ONLY
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, params: PyTree, example: PyTree, *key: Any) -> jax.Array:
        """Returns the loss of an example, from whole tables or from tables of a batch's rows."""
        if not isinstance(example, LocatedExample):
            example = LocatedExample(example, self.places(params, example, *key))
        names, (leaves, structure) = leaf_names(params), jax.tree.flatten(params)
        rows = {}
        for name, places in example.places.items():
            leaf = names.index(name)
            rows[name] = jnp.take(leaves[leaf], places, axis=0, mode="clip")
            leaves[leaf] = AbsentTable(name)
        dense = jax.tree.unflatten(structure, leaves)
        return self.loss(dense, rows, example.example, *key)

    def places(self, params: PyTree, example: PyTree, *key: Any) -> dict[str, jax.Array]:
        """Returns an example's row indices, int32[...] by table name."""
        ids = self.lookups(example, *key[: self.lookups_keyed])
        if not isinstance(ids, dict):
            raise ValueError(
                "lookups must return a dict {name of a table: row indices}, not "
                f"{type(ids).__name__}"
            )
        shapes = {name: jnp.shape(leaf) for name, leaf in named_leaves(params).items()}
        return {name: _clipped(name, index, shapes) for name, index in ids.items()}


def _clipped(name: str, index: Any, shapes: dict[str, tuple[int, ...]]) -> jax.Array:
    if not shapes.get(name):
        tables = ", ".join(table for table, shape in shapes.items() if shape)
        raise ValueError(f"lookups names {name!r}, which is no table; choose among {tables}")
    index = jnp.asarray(index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"lookups of {name!r} must be integers, not {index.dtype}")
    wide = jnp.uint32 if jnp.issubdtype(index.dtype, jnp.unsignedinteger) else jnp.int32
    index = index.astype(jnp.promote_types(index.dtype, wide))
    last = jnp.asarray(shapes[name][0] - 1, index.dtype)
    return jnp.clip(index, 0, last).astype(jnp.int32)


def declared_rows(loss_fn: LossFn | None) -> RowLoss | None:
    """Returns the `RowLoss` in a run's loss.

    The result is None if the loss declares no look-ups. Only wrappers that read no value of a table
    are looked through.
    """
    while isinstance(loss_fn, WrappedLoss):
        loss_fn = loss_fn.loss_fn
    return loss_fn if isinstance(loss_fn, RowLoss) else None


def traced_places(declared: RowLoss, loss_fn: LossFn, params: PyTree, example: PyTree) -> Isolated:
    """Returns the look-ups as an isolated trace on one row.

    Raises:
      ValueError: As from `isolated`.
    """

    def places(row: PyTree) -> dict[str, jax.Array]:
        """Returns the row indices of one row of the loss, by table name."""
        return declared.places(params, *(row if isinstance(row, Keyed) else (row,)))

    return isolated(places, loss_row(loss_fn, example))


def lookups_read_keys(loss_fn: LossFn | None, params: PyTree, example: PyTree) -> bool:
    """Returns True if an example's look-ups depend on its key."""
    declared = declared_rows(loss_fn)
    if declared is None or loss_fn is None or not declared.lookups_keyed:
        return False
    trace = traced_places(declared, loss_fn, params, example)
    _, used = partial_eval.dce_jaxpr(trace.trace.jaxpr, [True] * trace.structure.num_leaves)
    return any(used[len(jax.tree.leaves(example)) :])  # a key comes after the example


def index_ranges(loss_fn: LossFn | None, params: PyTree, example: PyTree) -> dict[int, int]:
    """Returns the table size for each example leaf of row indices.

    The result is empty without declared look-ups.
    """
    declared = declared_rows(loss_fn)
    if declared is None or loss_fn is None:
        return {}
    tables = named_leaves(params)
    trace = traced_places(declared, loss_fn, params, example)
    names = trace.structure.unflatten(range(trace.structure.num_leaves))
    ranges: dict[int, int] = {}
    for name, output in names.items():
        outputs = [k == output for k in range(len(names))]
        _, used = partial_eval.dce_jaxpr(trace.trace.jaxpr, outputs)
        of_example = used[: len(jax.tree.leaves(example))]  # a key comes after it
        for leaf in [leaf for leaf, is_used in enumerate(of_example) if is_used]:
            ranges[leaf] = max(ranges.get(leaf, 0), tables[name].shape[0])
    return ranges
