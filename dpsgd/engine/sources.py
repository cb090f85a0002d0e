"""Row sources: data that are read row by row, from tables or files, as a run needs them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

PyTree = Any


@runtime_checkable
class RowSource(Protocol):
    """Rows that are read by their indices, in place of arrays."""

    def __len__(self) -> int:
        """Returns the number of rows, which stays the same."""

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns rows as a pytree of arrays, [len(indices), ...] each.

        Args:
          indices: int64[rows], sorted and distinct; the result has their order. A background thread
            calls this method while the previous block of steps computes.
        """


@dataclass(frozen=True)
class Table:
    """Rows of a table in memory or memory-mapped: a dictionary with an array per column.

    Attributes:
      length: Number of rows.
      column: Function of a column's name and of indices that returns an array.
      names: Names of the columns.
    """

    length: int
    column: Callable[[str, np.ndarray], np.ndarray]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(self.column(name, indices)) for name in self.names}


@dataclass(frozen=True)
class Examples:
    """Rows of a sequence of examples, such as a random-access source of grain or of PyTorch.

    Attributes:
      sequence: Object with a length, whose items are pytrees of numbers or arrays of one shape;
        read by `__getitems__`, a list of indices at a time, if it has this method.
    """

    sequence: Any

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, indices: np.ndarray) -> PyTree:
        numbers = indices.tolist()
        batch = getattr(self.sequence, "__getitems__", None)
        examples = batch(numbers) if batch else [self.sequence[number] for number in numbers]
        return jax.tree.map(lambda *values: np.stack([np.asarray(x) for x in values]), *examples)


def row_source(table: Any, columns: Sequence[str] | None = None) -> RowSource:
    """Returns the row source of a table or of a sequence of examples.

    Args:
      table: Table of Arrow, frame of pandas or polars, or sequence of examples.
      columns: Columns to read, by name; all by default. Not for sequences.

    Raises:
      ValueError: If `table` has no such column, or is of another kind.

    >>> source = row_source([{"x": 1.0}, {"x": 2.0}, {"x": 4.0}])
    >>> source.take(np.array([0, 2]))["x"].tolist()
    [1.0, 4.0]
    """
    library = _library(table)
    if not is_table(table):
        has_items = hasattr(table, "__len__") and hasattr(table, "__getitem__")
        if not has_items or columns is not None or library in _READERS:
            raise ValueError(
                f"table is a {type(table).__name__}, not a table of Arrow, pandas or polars; "
                "sequences of examples have no columns"
            )
        return Examples(table)
    known = list(table.column_names if library == "pyarrow" else table.columns)
    names = known if columns is None else list(columns)
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"columns names {missing[0]!r}; the table has {', '.join(known)}")
    read = _READERS[library]
    return Table(len(table), lambda name, rows: read(table, name, rows), tuple(names))


_READERS: dict[str, Callable[[Any, str, np.ndarray], Any]] = {
    "pandas": lambda frame, name, rows: frame[name].to_numpy()[rows],
    "polars": lambda frame, name, rows: frame[name].gather(rows).to_numpy(),
    "pyarrow": lambda table, name, rows: table[name].take(rows).to_numpy(),
}
"""Functions of a table, a column's name and indices that return an array, by library."""


class _Reader:
    """Reads rows of a source, and checks them."""

    def __init__(self, source: RowSource) -> None:
        self.source, self.length = source, len(source)
        if self.length < 1:
            raise ValueError("data is a RowSource without rows")
        columns, self.structure = _columns(source.take(np.arange(1)), "data.take")
        self.paths = list(columns)
        self.shapes = [(leaf.shape[1:], leaf.dtype) for leaf in columns.values()]
        indices = np.unique([0, self.length // 3, self.length - 1])
        together = self._take(indices)
        for k, index in enumerate(indices):
            for column, row in zip(together, self._take(indices[k : k + 1]), strict=True):
                if column.dtype != object and column[k].tobytes() != row[0].tobytes():
                    raise ValueError(
                        f"data.take returned different rows for index {index} alone and within the "
                        f"indices {indices.tolist()}; return rows in the order of the indices"
                    )

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """Returns the columns of rows by their indices, in any order, with repeats."""
        distinct, places = np.unique(indices, return_inverse=True)
        return [leaf[places] for leaf in self._take(distinct.astype(np.int64))]

    def _take(self, indices: np.ndarray) -> list[np.ndarray]:
        place = f"data.take of {len(indices)} rows from index {indices[0]}"
        try:
            rows, length = self.source.take(indices), len(self.source)
        except Exception as error:
            raise ValueError(f"{place} failed: {type(error).__name__}: {error}") from error
        if length != self.length:
            raise ValueError(f"data has {length} rows, {self.length} before {place}")
        columns, structure = _columns(rows, place)
        if structure != self.structure:
            lacks = [path for path in self.paths if path not in columns]
            added = [path for path in columns if path not in self.paths]
            said = [f"without {', '.join(lacks)}"] * bool(lacks)
            said += [f"with {', '.join(added)}"] * bool(added)
            difference = " and ".join(said) or "in another tree structure"
            raise ValueError(f"{place} returned columns {difference}, unlike before")
        leaves = list(columns.values())
        for leaf, (shape, dtype) in zip(leaves, self.shapes, strict=True):
            if leaf.shape != (len(indices), *shape) or leaf.dtype != dtype:
                raise ValueError(
                    f"{place} returned {leaf.dtype}{list(leaf.shape)} in place of "
                    f"{dtype}{[len(indices), *shape]}"
                )
        return leaves


def _columns(rows: PyTree, place: str) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the columns of rows by their paths, and the tree's structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(rows)
    columns = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    for path, leaf in columns.items():
        if np.ndim(leaf) == 0:  # e.g. an item of a list
            raise ValueError(
                f"{place} returned a value of type {type(leaf).__name__} at {path or 'its root'}; "
                "return arrays with one row per index"
            )
    return {path: np.asarray(leaf) for path, leaf in columns.items()}, structure


@dataclass(frozen=True, eq=False)
class SourceColumn:
    """Column of a row source: shape and dtype, and rows for `take_rows`."""

    reader: _Reader
    number: int
    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.reader.shapes[self.number][0])

    @property
    def dtype(self) -> np.dtype:
        return self.reader.shapes[self.number][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> SourceColumn:
        return replace(self, rows=self.rows[rows])


def take_rows(columns: PyTree, rows: np.ndarray | slice) -> PyTree:
    """Returns rows of columns as arrays; a source is read once for all its columns.

    Args:
      columns: Pytree of arrays [examples, ...], or of the columns of one source.
      rows: Indices of the rows, in any order and with repeats; or their range.
    """
    if not is_streamed(columns):
        return jax.tree.map(lambda column: column[rows], columns)
    first = jax.tree.leaves(columns)[0]
    if isinstance(rows, slice):
        rows = np.arange(*rows.indices(len(first)))
    values = first.reader.read(rows + np.int64(first.rows.start))
    return jax.tree.map(lambda column: values[column.number], columns)


def columns_of_source(data: Any) -> PyTree:
    """Returns the columns of a row source; other data `by_place`.

    Args:
      data: `RowSource`, table of Arrow, pandas or polars, or a pytree of arrays.

    Raises:
      ValueError: If the source has no rows.
    """
    if is_table(data):
        data = row_source(data)
    if _library(data) in _READERS or hasattr(data, "dtype") or not isinstance(data, RowSource):
        return by_place(data)
    reader = _Reader(data)
    columns = [SourceColumn(reader, k, range(reader.length)) for k in range(len(reader.shapes))]
    return jax.tree.unflatten(reader.structure, columns)


def by_place(columns: PyTree) -> PyTree:
    """Returns columns with arrays in the place of series and frames.

    A series of pandas reads rows by the labels of its index, which may be others than their places.
    """
    return jax.tree.map(lambda x: np.asarray(x) if _library(x) in _READERS else x, columns)


def is_table(data: Any) -> bool:
    """Returns True for a table of Arrow, or a frame of pandas or polars."""
    has_columns = hasattr(data, "columns") or hasattr(data, "column_names")
    return has_columns and _library(data) in _READERS


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def is_streamed(data: PyTree) -> bool:
    """Returns True if columns are read from a source, row by row."""
    return any(isinstance(leaf, SourceColumn) for leaf in jax.tree.leaves(data))


def arrays_digest(arrays: PyTree, prefix: str = "") -> str:
    """Returns the SHA-256 of arrays, names, dtypes and shapes.

    >>> arrays_digest({"x": np.zeros(2)}) == arrays_digest({"x": np.zeros((2, 1))})
    False

    Args:
      arrays: Pytree of arrays.
      prefix: Text that is hashed first.
    """
    digest = hashlib.sha256(prefix.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        array = np.asanyarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        array = np.atleast_1d(array)
        rows = max(1, _READ_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
    return digest.hexdigest()


_READ_BYTES = 2**24
"""Largest number of bytes that are hashed at once."""
