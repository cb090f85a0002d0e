"""Rows that are nobody's, for an audit: of the data's shapes and types, never of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

PyTree = Any
Generated = PyTree | Callable[[int], PyTree]
"""A few rows, or a function that makes as many as it is given, for those that know the data."""


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
