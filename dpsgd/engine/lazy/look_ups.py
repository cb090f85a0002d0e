"""Tables: parameters that a loss only looks up whole rows from.

The loss is traced on one example. A leaf is a table if each of its uses looks up whole rows by
indices from the example alone. The rows that a batch reads are then known before the read, and the
loss is a function of these rows: `TableLoss.loss` is the same loss on small tables, which hold the
rows in any order, and on the places of the example's rows in them. Gradient clipping sees that
loss, and never a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.interpreters import partial_eval

from dpsgd.core.algorithm import Algorithm
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.gradients.ghost.uses import row_axes
from dpsgd.gradients.losses import loss_row, row_loss
from dpsgd.gradients.taps import Path, Taps, Use, find_taps

PyTree = Any


class Row(NamedTuple):
    """Example of a loss on small tables."""

    example: PyTree
    places: dict[Path, Array]
    """Places of each look-up's rows in the small table, int32 [rows]; the small table's number of
    rows for a missing row."""


class TableLoss:
    """Loss split at its tables: the rows that an example reads, and the loss of these rows.

    Args:
      loss_fn: (params, example) -> scalar.
      params: Tree of arrays, or of their shapes.
      example: One example, arrays or shapes.

    Attributes:
      tables: Leaf indices of `params` that are tables.
      why_not: Reason for each other leaf, in a few words.
      frozen: Indices of the leaves without a path to the loss.

    Raises:
      ValueError: As from `find_taps`.
    """

    def __init__(self, loss_fn: Callable[[PyTree, PyTree], Array], params: PyTree, example: PyTree):
        self._taps = find_taps(loss_fn, params, example)
        leaves = jax.tree.leaves(params)
        self.frozen = frozen_leaves(loss_fn, params, example)
        self.why_not: dict[int, str] = dict.fromkeys(
            self.frozen, "no derivative of the loss reaches it"
        )
        stopped = "it is read under stop_gradient too: look up its rows first, and stop these"
        for leaf in self._taps.stopped:  # a small table has other rows in the same places
            self.why_not.setdefault(leaf, stopped)
        for leaf, shape in enumerate(map(jnp.shape, leaves)):
            if why := _no_table(self._taps, leaf, shape):
                self.why_not.setdefault(leaf, why)
        self.tables = tuple(k for k in range(len(leaves)) if k not in self.why_not)
        self._num_rows = {k: jnp.shape(leaves[k])[0] for k in self.tables}
        self._indices = self._traced_indices(leaves, example)

    def uses(self, table: int) -> list[Use]:
        """Returns the look-ups of a table."""
        return self._taps.uses[table]

    def index_ranges(self) -> dict[int, int]:
        """Returns table sizes by example leaf of row indices."""
        owners = [k for k in self.tables for _ in self.uses(k)]
        leaves = [leaf for leaf, used in enumerate(self._used) if used]
        rows_by_leaf: dict[int, int] = {}
        for k in self.tables:
            _, used = partial_eval.dce_jaxpr(self._indices.jaxpr, [k == owner for owner in owners])
            for leaf in (leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used):
                rows_by_leaf[leaf] = max(rows_by_leaf.get(leaf, 0), self._num_rows[k])
        return rows_by_leaf

    def _traced_indices(self, leaves: Sequence[Any], example: PyTree) -> core.ClosedJaxpr:
        """Returns the indices of all look-ups as a function of the example alone."""

        def indices(leaves: Sequence[Array], example: PyTree) -> list[Any]:
            _, operands = self._taps.loss(leaves, example, {})
            return [operands[u.path][0] for k in self.tables for u in self.uses(k)]

        closed = jax.make_jaxpr(indices)(leaves, example)
        owners = [k for k in self.tables for _ in self.uses(k)]
        for k in self.tables:
            _, used = partial_eval.dce_jaxpr(closed.jaxpr, [owner == k for owner in owners])
            if any(used[: len(leaves)]):
                self.why_not[k] = "which of its rows the loss looks up depends on parameters"
        self.tables = tuple(k for k in self.tables if k not in self.why_not)
        of_tables = [owner in self.tables for owner in owners]
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, of_tables)
        outputs = zip(closed.jaxpr.outvars, of_tables, strict=True)
        self._index_shapes = [v.aval.shape for v, of_table in outputs if of_table]
        self._used = used[len(leaves) :]
        return core.ClosedJaxpr(jaxpr, closed.consts)

    def rows(self, example: PyTree) -> dict[Path, Array]:
        """Returns each look-up's rows, int32 [rows], R if missing."""
        inputs = [x for x, used in zip(jax.tree.leaves(example), self._used, strict=True) if used]
        indices = core.jaxpr_as_fun(self._indices)(*inputs)
        uses = [(k, u) for k in self.tables for u in self.uses(k)]
        return {
            u.path: _rows(u, index, self._num_rows[k])
            for (k, u), index in zip(uses, indices, strict=True)
        }

    def loss(self, params: PyTree, row: Row) -> Array:
        """Returns an example's loss on small tables of its rows.

        Args:
          params: Parameters with small tables.
          row: Example and the places of its rows in them.
        """
        operands = {}
        uses = [u for k in self.tables for u in self.uses(k)]
        for u, shape in zip(uses, self._index_shapes, strict=True):
            place = row.places[u.path].reshape(shape)
            zeros = len(u.operand.shape) - 1 if u.op == "dynamic_slice" else 0  # axes from 0 on
            operands[u.path] = [place, *[jnp.int32(0)] * zeros]
        return self._taps.loss(jax.tree.leaves(params), row.example, {}, operands)[0]


def index_ranges(algorithm: Algorithm, params: PyTree, rows: PyTree, *lead: int) -> dict[int, int]:
    """Returns table sizes by data column of row indices.

    Args:
      algorithm: Algorithm whose loss looks up the rows; without a known loss the result is empty.
      params: Parameters, or their shapes.
      rows: Columns [rows, ...], or their shapes.
      *lead: Shape of one clipped unit.
    """
    loss = getattr(algorithm.clipped_sum, "loss_fn", None)
    if loss is None or not any(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(rows)):
        return {}
    example = loss_row(loss, shapes_of_rows(rows, *lead))
    return TableLoss(row_loss(loss), params, example).index_ranges()


def unique_rows(every: Array, num_rows: int) -> tuple[Array, Callable[[Array], Array]]:
    """Returns a batch's distinct rows, and their places.

    Args:
      every: Row indices of all look-ups, int32 [look-ups], R for none.
      num_rows: Number R of rows of the table.

    Returns:
      Row indices, int32 [U], padded with R, with U the smaller of the number of look-ups and R; and
      a function from row indices to places among them, int32: U for R, and arbitrary for a row that
      is not read.
    """
    if every.size >= num_rows:
        read = jnp.zeros(num_rows, bool).at[every].set(True, mode="drop")
        return jnp.where(read, lax.iota(jnp.int32, num_rows), num_rows), lambda rows: rows
    # Equal ones stay where sorting brings them, the first alone as a row: to move them together
    # would take several times as long as to sort, and make no array smaller.
    ordered = jnp.sort(every)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])

    def place_of(rows: Array) -> Array:
        place = jnp.searchsorted(ordered, rows).astype(jnp.int32)
        return jnp.where(rows == num_rows, every.size, place)

    return jnp.where(first, ordered, num_rows), place_of


def _no_table(taps: Taps, leaf: int, shape: tuple[int, ...]) -> str | None:
    """Returns the reason why a leaf is not a table, or None."""
    if leaf in taps.obstacle:
        return f"it is used by {taps.obstacle[leaf]}"
    for use in taps.uses[leaf]:
        if use.op not in ("gather", "dynamic_slice"):
            return f"it is used by {use.op}"
        if not use.view.identity:
            return f"it is looked up after a {use.view.chain[0][0].name}"
        if row_axes(use) != (0,):
            return f"{use.op} does not read whole rows, single ones along axis 0"
    return None


def _rows(use: Use, index: Array, num_rows: int) -> Array:
    """Returns a look-up's row indices, int32 [rows], `num_rows` for a missing row."""
    index = jnp.asarray(index).ravel()
    unsigned = jnp.issubdtype(index.dtype, jnp.unsignedinteger)
    index = index.astype(jnp.promote_types(index.dtype, jnp.uint32 if unsigned else jnp.int32))
    last = jnp.asarray(num_rows - 1, index.dtype)
    inside = (index >= 0) & (index <= last)
    # Every mode but one clamps a missing index to the nearest row of the table (a small table's
    # nearest row depends on the rest of the batch). That row gets the gradient, too, which JAX's
    # own derivative of plain indexing leaves out.
    if use.op == "dynamic_slice" or use.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        inside = jnp.ones_like(inside)
    return jnp.where(inside, jnp.clip(index, 0, last).astype(jnp.int32), num_rows)
