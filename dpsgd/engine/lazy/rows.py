"""Rows of a table that are caught up when they are read, and rounded to a public grid at a flush.

Why it costs nothing: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dpsgd.core.state import Table
from dpsgd.engine.lazy.laws import LawTables, Matrix, law_of
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
    """Returns theta and m of rows, brought from the `steps` that are in them up to `step`.

    Args:
      values: theta: float32 [U, ...].
      momentum: m.
      steps: int32 [U].
      numbers: Of the rows in the table: int32 [U].
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
    """Returns rows, caught up, of a table or of its part from `first` on: see `caught_up`."""

    def of(x: Array | None) -> Any:
        return None if x is None else x.at[numbers - first].get(mode="fill", fill_value=0)

    values, momentum, steps = map(of, table)
    # One number, but made of what was read, so that it is written later: of two that may come in
    # any order, XLA lets the second have a copy of the steps of all rows.
    now = jnp.maximum(steps, how["step"])
    return Rows(numbers, *caught_up(values, momentum, steps, numbers, **how), now)


def written(table: Table, rows: Rows, first: Any = 0) -> Table:
    """Returns a table, or its part from `first` on, with these rows, no two of which are one."""

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
    """Returns x, rounded stochastically to the grid of noise with this standard deviation.

    Numbers of 2^`_MOST_CELLS` cells or more have cells of 2^-`_MOST_CELLS` of their power of two;
    with `stddev` 0, no number is rounded. `uniform` are numbers in (0, 1), of the shape of x.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    coarse = lax.bitcast_convert_type(bits, jnp.float32) * 2.0**-_MOST_CELLS
    spacing = jnp.maximum(grid(stddev) * 2.0 ** (GRID_BITS - FLUSHED_BITS), coarse)
    cells = x / spacing
    below = jnp.floor(cells)
    whole = below + (cells - below > uniform).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x) & (stddev > 0), whole * spacing, x)


def flushed_table(table: Table, chunk: int, first: Any = 0, *, step: Array, **how: Any) -> Table:
    """Returns a table, or its part from `first` on, with all rows up to date and on a grid.

    It goes over `chunk` rows at a time: the last ones may be up to date already, and stay.
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
    # A loop of one round: across its border XLA fuses nothing, so that nothing is computed twice.
    rounds = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(jnp.int32(0), rounds, lambda _, x: function(x), x)
