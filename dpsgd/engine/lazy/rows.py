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
from dpsgd.engine.lazy.laws import LawTables, law_of, norm
from dpsgd.noise.gaussian import (
    GRID_BITS,
    MOMENTUM,
    VALUE,
    grid,
    normal_at,
    uniform_at,
)


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
    old: Table,
    numbers: Array,
    *,
    laws: LawTables,
    step: Array,
    noise_key: Any,
    leaf: int,
    stddev: Array | None,
) -> Table:
    """Returns rows, brought from the steps that are in them up to `step`, by one draw.

    Args:
      old: Numbers of theta and m, float32 [U, ...], and steps, int32 [U].
      numbers: Of the rows in the table: int32 [U].
      laws: Of gaps that end at `step`.
      step: t.
      noise_key: uint32 [4].
      leaf: Number of the table.
      stddev: r = sigma C / b; None without noise.
    """
    a, low = law_of(laws, old.steps, step)
    shape = old.values.shape
    state = [(x, purpose) for x, purpose in _in_order(old) if x is not None]
    before = [x for x, _ in state]

    def normal(purpose: int) -> Array | float:
        if stddev is None:
            return 0.0
        z = normal_at(noise_key, step, leaf, purpose, numbers, int(np.prod(shape[1:])))
        return stddev * z.reshape(shape)

    def times(x: Array, y: Any) -> Any:
        return x.reshape(-1, *[1] * (len(shape) - 1)) * y

    normals = [normal(purpose) for _, purpose in state]
    found = {}
    for i, (_, purpose) in enumerate(state):
        terms = [*map(times, a[i], before), *map(times, low[i][: i + 1], normals)]
        found[purpose] = functools.reduce(operator.add, terms)
    return Table(found[VALUE], found.get(MOMENTUM), old.steps)


def _in_order(table: Table) -> list[tuple[Any, int]]:
    """Returns m and theta, in the order of a `GapLaw`, and their purposes."""
    return [(table.momentum, MOMENTUM), (table.values, VALUE)]


def read(table: Table, numbers: Array, first: Any = 0, **how: Any) -> Rows:
    """Returns rows, caught up, of a table or of its part from `first` on: see `caught_up`."""

    def of(x: Array | None) -> Any:
        return None if x is None else x.at[numbers - first].get(mode="fill", fill_value=0)

    found = Table(*map(of, table))
    # One number, but made of what was read, so that it is written later: of two that may come in
    # any order, XLA lets the second have a copy of the steps of all rows.
    now = jnp.maximum(found.steps, how["step"])
    return Rows(numbers, *caught_up(found, numbers, **how)._replace(steps=now))


def written(table: Table, rows: Rows, first: Any = 0) -> Table:
    """Returns a table, or its part from `first` on, with these rows, no two of which are one."""

    def put(into: Array | None, x: Any) -> Any:
        if into is None:
            return None
        return into.at[rows.numbers - first].set(x, mode="drop", unique_indices=True)

    return Table(*map(put, table, rows[1:]))


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
    low = law_of(how["laws"], jnp.int32(0), step)[1]
    places = [purpose for x, purpose in _in_order(table) if x is not None]

    def rounded(x: Any, purpose: int, numbers: Array) -> Any:
        if x is None or how["stddev"] is None:
            return x
        row = low[places.index(purpose)]
        stddev = how["stddev"] * norm(row[: 1 + places.index(purpose)])
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
            new = caught_up(rows, numbers, step=step, **how)
            values = rounded(new.values, VALUE, numbers)
            momentum = rounded(new.momentum, MOMENTUM, numbers)
            return Table(values, momentum, jnp.full_like(rows.steps, step))

        # All of a chunk is read before any is written: else XLA copies whole tables for CPUs.
        return Table(*map(put, table, _once(up_to_date, Table(*map(of, table)))))

    return lax.fori_loop(0, -(-count // chunk), body, table)


def _once(function: Callable[[Any], Any], x: Any) -> Any:
    # A loop of one round: across its border XLA fuses nothing, so that nothing is computed twice.
    rounds = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(jnp.int32(0), rounds, lambda _, x: function(x), x)
