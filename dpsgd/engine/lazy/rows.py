"""Rows of a table that are caught up when they are read, and rounded to a public grid at a flush.

Why it costs nothing: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dpsgd.core.state import Table
from dpsgd.engine.lazy.gaps import GapLaw
from dpsgd.noise.gaussian import GRID_BITS, MOMENTUM, VALUE, grid, normal_at, uniform_at


class Rows(NamedTuple):
    """Some rows of a table, all up to date."""

    numbers: Array
    """Which: int32 [U], R where there is none."""
    values: Array
    """theta: float [U, ...]."""
    momentum: Array | None
    """m."""
    steps: Array
    """That are in them: int32 [U], as many in each."""


Matrix = list[list[Array]]
"""d x d arrays of one shape: of many small matrices, all entries (i, j) in one."""


class LawTables(NamedTuple):
    """What `Gaps` holds, in float32, for one step: A and V of a gap by two look-ups."""

    to_multiple: Any
    """float32 [N + 1, 2 d^2]."""
    from_multiples: Any
    """float32 [N / K + 1, 2 d^2]."""
    from_recent: Any
    """float32 [K, 2 d^2]."""


def packed(law: GapLaw) -> np.ndarray:
    """Returns A and V side by side: float32 [..., 2 d^2].

    Raises:
      ValueError: if they are too large for float32: late noise would not be that of the steps.
    """
    flat = np.concatenate([x.reshape(*x.shape[:-2], -1) for x in law], axis=-1)
    if not np.abs(flat).max(initial=0) <= np.finfo(np.float32).max:
        raise ValueError("noise of lazy tables grows beyond float32: take shorter steps")
    return flat.astype(np.float32)


def law_of(tables: LawTables, starts: Array, step: Array) -> tuple[Matrix, Matrix]:
    """Returns A and V of the gaps from `starts` to `step`: d x d numbers, float32 as `starts`."""
    tables = LawTables(*map(jnp.asarray, tables))
    spacing = tables.from_recent.shape[0]
    multiple = -(-starts // spacing)
    order = round((tables.from_recent.shape[-1] // 2) ** 0.5)
    each = range(order)

    def unpacked(rows: Array) -> tuple[Matrix, Matrix]:
        a, v = ([[rows[..., k + order * i + j] for j in each] for i in each] for k in (0, order**2))
        return a, v

    # Entry by entry: CPUs take ten times as long for arrays with axes of length 2.
    def times(x: Matrix, y: Matrix) -> Matrix:
        products = [[[x[i][k] * y[k][j] for k in each] for j in each] for i in each]
        return [[functools.reduce(operator.add, terms) for terms in row] for row in products]

    def transposed(x: Matrix) -> Matrix:
        return [[x[j][i] for j in each] for i in each]

    def chosen(x: Matrix, y: Matrix) -> Matrix:
        return [[jnp.where(long, x[i][j], y[i][j]) for j in each] for i in each]

    a1, v1 = unpacked(tables.to_multiple[starts])
    a2, v2 = unpacked(tables.from_multiples[multiple])
    a3, v3 = unpacked(tables.from_recent[starts % spacing])
    long = multiple * spacing <= step
    carried = times(times(a2, v1), transposed(a2))
    both = [[carried[i][j] + v2[i][j] for j in each] for i in each]
    return chosen(times(a2, a1), a3), chosen(both, v3)


def caught_up(
    values: Array,
    momentum: Array | None,
    steps: Array,
    numbers: Array,
    *,
    laws: LawTables,
    step: Array,
    noise_key: Any,
    leaf: int,
    stddev: Array | None,
) -> tuple[Array, Array | None]:
    """Returns rows brought from the steps that are in them up to `step`.

    Args:
      values: theta of these rows: float32 [U, ...].
      momentum: m.
      steps: That are in each row: int32 [U].
      numbers: Which rows of the table they are: int32 [U].
      laws: Of gaps that end at `step`.
      step: t.
      noise_key: uint32 [4].
      leaf: Number of the table.
      stddev: r = sigma C / b; None without noise.
    """
    a, v = law_of(laws, steps, step)
    wide = (-1, *[1] * (values.ndim - 1))
    width = int(np.prod(values.shape[1:]))

    def normal(purpose: int) -> Array | float:
        if stddev is None:
            return 0.0
        z = normal_at(noise_key, step, leaf, purpose, numbers, width)
        return stddev * z.reshape(values.shape)

    def entry(x: Matrix, i: int, j: int) -> Array:
        return x[i][j].reshape(wide)

    if momentum is None:
        noise = jnp.sqrt(entry(v, 0, 0)) * normal(VALUE)
        return entry(a, 0, 0) * values + noise, None
    first = jnp.sqrt(entry(v, 0, 0))
    second = jnp.where(first > 0, entry(v, 1, 0) / jnp.where(first > 0, first, 1), 0)
    third = jnp.sqrt(jnp.maximum(entry(v, 1, 1) - second * second, 0))
    x, y = normal(MOMENTUM), normal(VALUE)
    m = entry(a, 0, 0) * momentum + entry(a, 0, 1) * values + first * x
    theta = entry(a, 1, 0) * momentum + entry(a, 1, 1) * values + second * x + third * y
    return theta, m


def read(table: Table, numbers: Array, first: Any = 0, **how: Any) -> Rows:
    """Returns rows of a table, up to date.

    Args:
      table: Of R rows, or a part of it.
      numbers: Which rows of the part: int32 [U], R where there is none.
      first: Number of the first row of the part.
      **how: See `caught_up`.
    """

    def of(x: Array | None) -> Any:
        return None if x is None else x.at[numbers - first].get(mode="fill", fill_value=0)

    values, momentum, steps = map(of, table)
    # One number, but made of what was read, so that it is written later: of two that may come in
    # any order, XLA lets the second have a copy of the steps of all rows.
    now = jnp.maximum(steps, how["step"])
    return Rows(numbers, *caught_up(values, momentum, steps, numbers, **how), now)


def written(table: Table, rows: Rows, first: Any = 0) -> Table:
    """Returns the table with these rows, in place where it is donated.

    Args:
      table: Of R rows, or a part of it.
      rows: Of the part, no two of them one; R where there is none.
      first: Number of the first row of the part.
    """

    def put(into: Array | None, x: Any) -> Any:
        if into is None:
            return None
        return into.at[rows.numbers - first].set(x, mode="drop", unique_indices=True)

    return Table(*map(put, table, (rows.values, rows.momentum, rows.steps)))


FLUSHED_BITS = 10
"""The noise of what is flushed has a standard deviation of 2^FLUSHED_BITS to twice that, cells."""

_MOST_CELLS = 13
"""In a power of two, in bits: as many floats are in each as in one of small numbers."""


def on_grid(x: Array, stddev: Array, uniform: Array) -> Array:
    """Returns numbers, rounded stochastically to the grid of noise with this standard deviation.

    Numbers of 2^`_MOST_CELLS` cells or more have cells of 2^-`_MOST_CELLS` of their power of two.

    Args:
      x: float32.
      stddev: 0 for a grid that no number is rounded to.
      uniform: In (0, 1), as many as x.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    coarse = lax.bitcast_convert_type(bits, jnp.float32) * 2.0**-_MOST_CELLS
    spacing = jnp.maximum(grid(stddev) * 2.0 ** (GRID_BITS - FLUSHED_BITS), coarse)
    cells = x / spacing
    below = jnp.floor(cells)
    whole = below + (cells - below > uniform).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x) & (stddev > 0), whole * spacing, x)


def flushed_table(table: Table, chunk: int, first: Any = 0, *, step: Array, **how: Any) -> Table:
    """Returns the table with all rows up to date, and on a grid, in passes over `chunk` rows.

    Args:
      table: Of R rows, or a part of it.
      chunk: The last ones may hold rows that are up to date already, and stay as they are.
      first: Number of the first row of the part.
      step: t.
      **how: See `caught_up`.
    """
    count = len(table.steps)
    chunk = min(chunk, count)
    covariance = law_of(how["laws"], jnp.int32(0), step)[1]

    def rounded(x: Any, place: int, purpose: int, numbers: Array) -> Any:
        if x is None or how["stddev"] is None:
            return x
        stddev = how["stddev"] * jnp.sqrt(covariance[place][place])
        name = how["noise_key"], step, how["leaf"], purpose
        uniform = uniform_at(*name, numbers, int(np.prod(x.shape[1:])))
        return on_grid(x, stddev, uniform.reshape(x.shape))

    def body(i: Array, table: Table) -> Table:
        begin = jnp.minimum(i * chunk, count - chunk)
        numbers = first + begin + lax.iota(jnp.int32, chunk)

        def of(x: Array | None) -> Any:
            return None if x is None else lax.dynamic_slice_in_dim(x, begin, chunk)

        def put(into: Array | None, x: Any) -> Any:
            return None if into is None else lax.dynamic_update_slice_in_dim(into, x, begin, 0)

        def up_to_date(rows: Table) -> Table:
            values, momentum = caught_up(*rows, numbers, step=step, **how)
            values = rounded(values, -1, VALUE, numbers)
            momentum = rounded(momentum, 0, MOMENTUM, numbers)
            return Table(values, momentum, jnp.full_like(rows.steps, step))

        # All of a chunk is read before any is written: else XLA copies whole tables for CPUs.
        return Table(*map(put, table, _once(up_to_date, Table(*map(of, table)))))

    return lax.fori_loop(0, -(-count // chunk), body, table)


def _once(function: Callable[[Any], Any], x: Any) -> Any:
    """Returns what a function makes of a tree of the same shapes, in arrays of its own.

    A loop of one round: across its border XLA fuses nothing, so that nothing is computed twice.
    """
    rounds = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(jnp.int32(0), rounds, lambda _, x: function(x), x)
