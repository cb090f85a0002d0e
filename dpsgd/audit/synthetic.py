"""Generates synthetic rows from the shapes and dtypes of data, not from values."""

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
"""Tree of synthetic rows, or a function of their number that returns them."""


_UNITS = 16
"""Largest number of synthetic examples (blocks of rows that are clipped as one) in the data."""

_SMALL = 2**26
"""Largest column, in bytes, that generated rows fill; a larger one has zeros between examples."""

_NEAR = 128
"""Number of first blocks of rows that may become huge examples."""

_MARKED = 2**14
"""Largest number of draws of marked rows."""

_HUGE = 2.0**50, -(2.0**50), 2.0**100, -(2.0**100), 2.0**127
"""Factors of example 0 for which gradients, or the squares of finite ones, overflow.

Infinity is no factor: a loop of the loss might never end.
"""

_ALIKE = 1
"""Index of the example whose integers are equal in each column, as repeated ids."""


def generated_rows(
    columns: PyTree, count: int, generated: Generated | None = None, *, block: int = 1
) -> PyTree:
    """Returns synthetic rows with the shapes and dtypes of `columns`.

    No value of `columns` is read. By default floats are standard normal, and in every other block
    their absolute values, so that roots and logarithms exist. Booleans are fair coins, and integers
    0 or 1, which are labels of any classification, and row indices of any table with two rows. The
    range of integers in the data is known from private rows alone; `generated` may declare it.

    Args:
      columns: Tree of arrays [rows, ...], or of their shapes.
      count: Number of rows, at least one.
      generated: Synthetic rows in the structure of `columns`, or a function of `count` that returns
        them; either may have another number of rows, at least one.
      block: Number of rows that are clipped as one.

    Raises:
      ValueError: If `generated` gives another structure, shape or dtype than `columns`.

    >>> rows = generated_rows({"x": np.zeros((9, 2), np.float32), "y": np.arange(9)}, 4)
    >>> rows["x"].shape, rows["x"].dtype, set(rows["y"].tolist()) <= {0, 1}
    ((4, 2), dtype('float32'), True)
    """
    if generated is None:
        rng, positive = np.random.default_rng(0), np.arange(count) // block % 2 == 1
        return jax.tree.map(lambda x: _random_column(rng, positive, x.shape[1:], x.dtype), columns)
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
            column_shape = ", ".join(["rows", *map(str, column.shape[1:])])
            raise ValueError(
                f"generated{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but the "
                f"data have {column.dtype}[{column_shape}]"
            )
    if len(sizes := {len(leaf) for leaf in jax.tree.leaves(rows)}) > 1:
        raise ValueError(f"generated columns have different numbers of rows: {sorted(sizes)}")
    return rows


def varied_rows(rows: PyTree, ranges: Mapping[int, int], *, block: int = 1) -> PyTree:
    """Replaces the row indices in every other block of rows.

    Logarithms of the new indices are uniform, so that small and large indices occur and few are
    equal; in one of eight blocks, all indices are one beyond the table.

    Args:
      rows: Generated rows, each leaf [rows, ...].
      ranges: Index of a leaf of row indices -> number of rows of the table.
      block: Number of rows that are clipped as one.
    """
    leaves, tree = jax.tree.flatten(rows)
    rng, numbers = np.random.default_rng(0), np.arange(len(leaves[0])) // block
    for leaf, table_rows in ranges.items():
        column = np.array(leaves[leaf])
        if jnp.issubdtype(column.dtype, jnp.integer):
            most = int(np.iinfo(column.dtype).max)
            new_indices = np.exp(rng.uniform(0, math.log(table_rows), column.shape)) - 1
            new_indices[numbers % 8 == 7] = table_rows
            odd = numbers % 2 == 1
            column[odd] = np.minimum(new_indices, most).astype(column.dtype)[odd]
            leaves[leaf] = column
    return jax.tree.unflatten(tree, leaves)


def _random_column(
    rng: np.random.Generator, positive: np.ndarray, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    shape = (positive.size, *shape)
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
        return rng.integers(0, 2, shape).astype(dtype)
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=shape)
    else:
        values[positive] = np.abs(values[positive])
    return values.astype(dtype)


class ProbeColumns(NamedTuple):
    """Synthetic data with a run's number of rows.

    Attributes:
      columns: Tree of arrays [n, ...].
      units: Number of ordinary examples; they have the indices 0, ..., units - 1.
      nan: Index of the example whose floats are NaN; None if rows hold no floats, or the data are
        one block.
      huge: Indices of the examples with the floats of example 0 times +-2^50 or more; empty if rows
        hold no floats, or there is no space.
      starts: First row of each example: int64[examples].
      marked: bool[n], True for rows with NaN floats outside the examples; in full blocks of steps,
        they show which batches contain them.
    """

    columns: PyTree
    units: int
    nan: int | None
    huge: range
    starts: np.ndarray
    marked: np.ndarray


def probe_columns(rows: PyTree, n: int, block: int) -> ProbeColumns:
    """Places synthetic examples among n rows, from first to last.

    Large columns are zero between the examples; others repeat `rows`.

    Args:
      rows: Generated rows, each leaf [rows, ...]; the first of them become examples.
      n: Number of rows of the run.
      block: Number of rows that are clipped as one.

    Raises:
      ValueError: If there are no rows, or the leaves have different numbers of rows.
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
        filled = zeros((n, *leaf.shape[1:]), leaf.dtype)
        if filled.nbytes <= _SMALL:
            filled[:] = leaf[np.arange(n) % count]
        for number, start in enumerate(starts):
            source = number if number < strewn else 0
            unit = leaf[(source * block + np.arange(block)) % count]
            if poisoned and number == units and _is_float(leaf):
                unit[:] = np.nan
            elif number >= strewn and _is_float(leaf):
                most = min(float(jnp.finfo(t).max) for t in (leaf.dtype, np.float32))
                scaled = unit.astype(np.float64) * _HUGE[number - strewn]
                unit[:] = np.clip(scaled, -most, most).astype(leaf.dtype)
            elif number == _ALIKE and unit.ndim > 1 and np.issubdtype(leaf.dtype, np.integer):
                unit[:] = unit.min(initial=np.iinfo(leaf.dtype).max)  # a column may have no width
            filled[start : start + block] = unit
        return filled

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
    """Returns True if a column holds floats, and its rows are not empty."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and math.prod(leaf.shape[1:]) > 0
