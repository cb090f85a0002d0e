"""Table rows: caught up when read, and rounded to a public grid at a flush.

They cost no privacy: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dpsgd.core.gaussian import (
    GRID_BITS,
    MOMENTUM,
    VALUE,
    TableRows,
    grid,
    normal_at,
    uniform_at,
)
from dpsgd.core.state import Table
from dpsgd.engine.lazy.laws import StepLaws, law_of, norm


class Rows(NamedTuple):
    """Rows of a table, up to date."""

    numbers: Array
    """Row indices, int32 [U], padded with R."""
    table: Table
    """Values and momentum of the rows, [U, ...], and their number of steps, equal in all."""


def unique_rows(every: Array, num_rows: int) -> tuple[Array, Callable[[Array], Array]]:
    """Returns a batch's distinct rows, and their places.

    Args:
      every: Row indices of all look-ups, int32 [look-ups], R for none.
      num_rows: Number R of rows of the table.

    Returns:
      Row indices, int32 [U], padded with R, with U the smaller of the number of look-ups and R; and
      a function from row indices to places among them, int32: U for R, and arbitrary for a row that
      is not read.

    >>> numbers, place_of = unique_rows(jnp.array([7, 3, 7]), 10)
    >>> numbers.tolist(), place_of(jnp.array([7, 3])).tolist()
    ([3, 7, 10], [1, 0])
    """
    if every.size >= num_rows:
        read = jnp.zeros(num_rows, bool).at[every].set(True, mode="drop")
        return jnp.where(read, lax.iota(jnp.int32, num_rows), num_rows), lambda rows: rows
    # Equal ones stay where sorting brings them, the first alone as a row: to move them together
    # would take several times as long as to sort, and make no array smaller.
    ordered = jnp.sort(every)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])

    def place_of(rows: Array) -> Array:
        """Returns the place of each row among the distinct ones."""
        # On a GPU a loop would split the graph of a step. On CPUs XLA fuses an unrolled search
        # into its readers, which repeat it for each coordinate of the rows.
        search = functools.partial(jnp.searchsorted, ordered)
        by_loop, unrolled = (functools.partial(search, method=m) for m in ("scan", "scan_unrolled"))
        place = lax.platform_dependent(rows, cpu=by_loop, default=unrolled).astype(jnp.int32)
        return jnp.where(rows == num_rows, every.size, place)

    return jnp.where(first, ordered, num_rows), place_of


def caught_up(
    old: Table,
    numbers: Array,
    *,
    laws: StepLaws,
    step: Array,
    noise_key: Any,
    leaf: int,
    stddev: Array | None,
) -> Table:
    """Returns rows with the noise of all earlier steps.

    The noise of the steps before `step` is one draw.

    Args:
      old: Rows of theta and m, float32 [U, ...], and their numbers of steps, int32 [U].
      numbers: Indices of the rows in the table, int32 [U].
      laws: Laws of the gaps that end at `step`.
      step: Step t.
      noise_key: uint32 [4], key of the noise stream.
      leaf: Index of the table in its tree.
      stddev: Standard deviation r = sigma C / b; None without noise.
    """
    a, low = law_of(laws, old.steps, step)
    shape = old.values.shape
    state = _in_order(old)
    values = [x for x, _ in state]

    def normal(purpose: int) -> Array | float:
        """Returns noise of standard deviation r for each number of the rows."""
        if stddev is None:
            return 0.0
        z = normal_at(noise_key, step, TableRows(leaf, purpose, numbers, int(np.prod(shape[1:]))))
        return stddev * z.reshape(shape)

    def times(x: Array, y: Any) -> Any:
        """Multiplies each row y by its number x."""
        return x.reshape(-1, *[1] * (len(shape) - 1)) * y

    normals = [normal(purpose) for _, purpose in state]
    by_purpose = {}
    for i, (_, purpose) in enumerate(state):
        terms = [*map(times, a[i], values), *map(times, low[i][: i + 1], normals)]
        by_purpose[purpose] = functools.reduce(operator.add, terms)
    return Table(by_purpose[VALUE], by_purpose.get(MOMENTUM), old.steps)


def _in_order(table: Table) -> list[tuple[Any, int]]:
    """Returns m, if there is one, and theta, in the order of a `GapLaw`, with their purposes."""
    state = (table.momentum, MOMENTUM), (table.values, VALUE)
    return [(x, purpose) for x, purpose in state if x is not None]


def read(table: Table, numbers: Array, first: Any = 0, **how: Any) -> Rows:
    """Returns rows of a table, caught up, see `caught_up` and `written`."""
    old = jax.tree.map(lambda x: x.at[numbers - first].get(mode="fill", fill_value=0), table)
    # The same number in each row, but computed from the read, so that XLA orders the write after
    # it: otherwise it would copy the steps of all rows.
    steps = jnp.maximum(old.steps, how["step"])
    return Rows(numbers, caught_up(old, numbers, **how)._replace(steps=steps))


def written(table: Table, rows: Rows, first: Any = 0) -> Table:
    """Returns a table with distinct rows replaced.

    Args:
      table: Table, or its part from row `first` on.
      rows: New rows; indices beyond the part are dropped.
      first: Index of the part's first row.
    """

    def scatter(into: Array, x: Array) -> Array:
        """Writes the rows into an array."""
        return into.at[rows.numbers - first].set(x, mode="drop", unique_indices=True)

    return jax.tree.map(scatter, table, rows.table)


FLUSHED_BITS = 10
"""Flushed noise has a standard deviation of 2^FLUSHED_BITS to twice that, cells."""

_MOST_CELLS = 13
"""Logarithm of the most cells in a power of two: large numbers have no finer cells."""


def on_grid(x: Array, stddev: Array, uniform: Array) -> Array:
    """Returns x, rounded stochastically to the grid of `stddev`.

    Numbers of 2^`_MOST_CELLS` cells or more have cells of 2^-`_MOST_CELLS` of their power of two;
    with `stddev` 0 no number is rounded.

    Args:
      x: float32 array.
      stddev: Standard deviation of the noise in x.
      uniform: Numbers in (0, 1), of the shape of x.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    coarse = lax.bitcast_convert_type(bits, jnp.float32) * 2.0**-_MOST_CELLS
    spacing = jnp.maximum(grid(stddev) * 2.0 ** (GRID_BITS - FLUSHED_BITS), coarse)
    cells = x / spacing
    below = jnp.floor(cells)
    rounded_cells = below + (cells - below > uniform).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x) & (stddev > 0), rounded_cells * spacing, x)


def flushed_table(table: Table, chunk: int, first: Any = 0, *, step: Array, **how: Any) -> Table:
    """Returns a table with all rows up to date, on a grid.

    Args:
      table: Table, or its part from row `first` on.
      chunk: Number of rows processed at a time; the last chunks may overlap.
      first: Index of the part's first row.
      step: Step t of the flush.
      **how: Other keyword arguments of `caught_up`.
    """
    count = len(table.steps)
    chunk = min(chunk, count)
    low = law_of(how["laws"], jnp.int32(0), step)[1]
    places = [purpose for _, purpose in _in_order(table)]

    def rounded(x: Any, purpose: int, numbers: Array) -> Any:
        """Returns numbers on the grid of the longest gap's noise."""
        if x is None or how["stddev"] is None:
            return x
        row = low[places.index(purpose)]
        stddev = how["stddev"] * norm(row[: 1 + places.index(purpose)])
        rows = TableRows(how["leaf"], purpose, numbers, int(np.prod(x.shape[1:])))
        uniform = uniform_at(how["noise_key"], step, rows)
        return on_grid(x, stddev, uniform.reshape(x.shape))

    def body(i: Array, table: Table) -> Table:
        """Returns the table with chunk `i` flushed."""
        begin = jnp.minimum(i * chunk, count - chunk)
        numbers = first + begin + lax.iota(jnp.int32, chunk)

        def up_to_date(rows: Table) -> Table:
            """Returns rows caught up to `step` and rounded."""
            new = caught_up(rows, numbers, step=step, **how)
            values = rounded(new.values, VALUE, numbers)
            momentum = rounded(new.momentum, MOMENTUM, numbers)
            return Table(values, momentum, jnp.full_like(rows.steps, step))

        # All of a chunk is read before any is written: else XLA copies whole tables for CPUs.
        old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin, chunk), table)
        put_chunk = functools.partial(lax.dynamic_update_slice_in_dim, start_index=begin, axis=0)
        return jax.tree.map(put_chunk, table, _once(up_to_date, old))

    return lax.fori_loop(0, -(-count // chunk), body, table)


def _once(function: Callable[[Any], Any], x: Any) -> Any:
    # A loop of one round: across its border XLA fuses nothing, so that nothing is computed twice.
    rounds = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(jnp.int32(0), rounds, lambda _, x: function(x), x)
