"""Synthetic rows for an audit: of the data's shapes and types, never of their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from samplers.batches import zeros

PyTree = Any
Generated = PyTree | Callable[[int], PyTree]
"""A few rows, or a function that makes as many as it is given, for those that know the data."""


_UNITS = 16
"""Most generated examples (blocks of rows, where these are clipped as one) among the data."""

_SMALL = 2**26
"""Most bytes of a column that is filled with generated rows throughout, and not with zeros."""

_NEAR = 128
"""Blocks of rows among the first of which huge examples find a place."""

_MARKED = 2**14
"""Draws of the rows that are marked."""

_HUGE = 2.0**50, -(2.0**50), 2.0**100, -(2.0**100), 2.0**127
"""Times example 0: gradients overflow, or the squares of finite ones do.

Not infinity: a loop of the loss might never come to its end.
"""

_ALIKE = 1
"""Number of the example whose whole numbers are all alike, as where an id comes several times."""


def generated_rows(
    columns: PyTree, count: int, generated: Generated | None = None, *, block: int = 1
) -> PyTree:
    """Returns rows of the shapes and types of `columns`, none of whose values is read.

    By default floats are standard normal, in every other block their absolute values, of which
    roots and logarithms can be taken. Booleans are fair coins, and whole numbers 0 or 1: the only
    ones that are sure to be labels of any classification and to name rows of any table of two. How
    far they go in the data, only private rows could tell; `generated` may say more.

    Args:
      columns: Tree of arrays [rows, ...], or of their shapes.
      count: Rows that are wanted, at least one.
      generated: Rows like those of `columns`, any number, or a function of `count` that makes them.
      block: Rows that are clipped as one.

    Raises:
      ValueError: if what `generated` gives has another structure, shape or type than `columns`.

    >>> rows = generated_rows({"x": np.zeros((9, 2), np.float32), "y": np.arange(9)}, 4)
    >>> rows["x"].shape, rows["x"].dtype, set(rows["y"].tolist()) <= {0, 1}
    ((4, 2), dtype('float32'), True)
    """
    if generated is None:
        rng, positive = np.random.default_rng(0), np.arange(count) // block % 2 == 1
        return jax.tree.map(lambda x: _drawn(rng, positive, x.shape[1:], x.dtype), columns)
    rows = generated(count) if callable(generated) else generated
    structure: Any = jax.tree.structure(columns)
    if structure != jax.tree.structure(rows):
        raise ValueError(
            f"generated rows are {jax.tree.structure(rows)}, but the data are {structure}"
        )
    rows = jax.tree.map(np.asarray, rows)
    pairs = zip(jax.tree_util.tree_leaves_with_path(rows), jax.tree.leaves(columns), strict=True)
    for (path, leaf), column in pairs:
        same_type = canonicalize_dtype(leaf.dtype) == canonicalize_dtype(column.dtype)
        if not (same_type and leaf.ndim and leaf.shape[1:] == column.shape[1:] and leaf.size):
            wanted = ", ".join(["rows", *map(str, column.shape[1:])])
            raise ValueError(
                f"generated{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but the "
                f"data have {column.dtype}[{wanted}]"
            )
    if len(sizes := {len(leaf) for leaf in jax.tree.leaves(rows)}) > 1:
        raise ValueError(f"generated columns have different numbers of rows: {sorted(sizes)}")
    return rows


def varied_rows(rows: PyTree, ranges: Mapping[int, int], *, block: int = 1) -> PyTree:
    """Returns rows of which every other one looks up any rows of tables: few numbers are alike.

    Their logarithms are uniform, so that some are small and some large; in one of eight rows they
    are one beyond the table.

    Args:
      rows: Generated rows, [rows, ...] each leaf.
      ranges: Number of a column that looks up rows -> rows of the table.
      block: Rows that are clipped as one.
    """
    leaves, tree = jax.tree.flatten(rows)
    rng, numbers = np.random.default_rng(0), np.arange(len(leaves[0])) // block
    for leaf, table_rows in ranges.items():
        column = np.array(leaves[leaf])
        if jnp.issubdtype(column.dtype, jnp.integer):
            most = int(np.iinfo(column.dtype).max)
            drawn = np.exp(rng.uniform(0, math.log(table_rows), column.shape)) - 1
            drawn[numbers % 8 == 7] = table_rows
            odd = numbers % 2 == 1
            column[odd] = np.minimum(drawn, most).astype(column.dtype)[odd]
            leaves[leaf] = column
    return jax.tree.unflatten(tree, leaves)


def _drawn(
    rng: np.random.Generator, positive: np.ndarray, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    shape = (positive.size, *shape)
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
        return rng.integers(0, 2, shape).astype(dtype)
    drawn = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * rng.normal(size=shape)
    else:
        drawn[positive] = np.abs(drawn[positive])
    return drawn.astype(dtype)


class ProbeColumns(NamedTuple):
    """Rows of a run's number, none of them private.

    Attributes:
      columns: The data.
      units: Synthetic examples, by number 0, ..., units - 1.
      nan: Number of the example whose floats are NaN, or None where rows hold no floats, or there
        is one row.
      huge: Numbers of examples whose floats are those of example 0 times 2^50 and more, of both
        signs; none where rows hold no floats, or there is no space for them.
      starts: Row in which each example begins: int64[examples].
      marked: Rows that no example lies in, and whose floats are NaN: they show in which batches of
        whole blocks they are. bool[n].
    """

    columns: PyTree
    units: int
    nan: int | None
    huge: range
    starts: np.ndarray
    marked: np.ndarray


def probe_columns(rows: PyTree, n: int, block: int) -> ProbeColumns:
    """Returns n rows, among which synthetic examples lie from the first row to the last.

    Where rows are very many, those between are zeros.

    Args:
      rows: Synthetic examples, [rows, ...] each leaf; some of the first are used.
      n: Rows of the run.
      block: Rows that are clipped as one.

    Raises:
      ValueError: if there are no rows.
    """
    counts = {len(leaf) for leaf in jax.tree.leaves(rows)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"the audit needs data with equally many rows, got {sorted(counts)}")
    count, room = counts.pop(), n // block
    poisoned = room > 1 and any(map(_is_float, jax.tree.leaves(rows)))
    units = max(1, min(_UNITS, count // block, room - poisoned))
    starts = np.linspace(0, n - block, units + poisoned).astype(np.int64)
    if poisoned:  # somewhere in the middle: first and last are examples like others
        starts = np.append(np.delete(starts, units // 2), starts[units // 2])
    strewn = len(starts)
    free = (
        start
        for start in range(0, min(n - block + 1, _NEAR * block), block)
        if np.abs(starts - start).min() >= block
    )
    if poisoned:
        starts = np.append(starts, list(itertools.islice(free, len(_HUGE)))).astype(np.int64)

    def column(leaf):
        leaf = np.asarray(leaf)
        made = zeros((n, *leaf.shape[1:]), leaf.dtype)
        if made.nbytes <= _SMALL:
            made[:] = leaf[np.arange(n) % count]
        for number, start in enumerate(starts):
            one = number if number < strewn else 0
            unit = leaf[(one * block + np.arange(block)) % count]
            if poisoned and number == units and _is_float(leaf):
                unit[:] = np.nan
            elif number >= strewn and _is_float(leaf):
                most = min(float(jnp.finfo(t).max) for t in (leaf.dtype, np.float32))
                scaled = unit.astype(np.float64) * _HUGE[number - strewn]
                unit[:] = np.clip(scaled, -most, most).astype(leaf.dtype)
            elif number == _ALIKE and unit.ndim > 1 and np.issubdtype(leaf.dtype, np.integer):
                unit[:] = unit.min(initial=np.iinfo(leaf.dtype).max)  # a column may have no width
            made[start : start + block] = unit
        return made

    columns, marked = jax.tree.map(column, rows), np.zeros(n, bool)
    if poisoned:
        marked[np.random.default_rng(0).integers(0, n, min(n // 2, _MARKED))] = True
        for start in starts:
            marked[start : start + block] = False
        for leaf in filter(_is_float, jax.tree.leaves(columns)):
            leaf[marked] = np.nan
    nan, huge = units if poisoned else None, range(strewn, len(starts))
    return ProbeColumns(columns, units, nan, huge, starts, marked)


def _is_float(leaf: Any) -> bool:
    """Whether a column holds floats: one of no width, as of a table without numbers, holds none."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and math.prod(leaf.shape[1:]) > 0
