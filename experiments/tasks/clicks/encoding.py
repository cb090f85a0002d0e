"""Columns of rows, as Arrow arrays, become the columns of a store: one way for all formats.

A format says of which kind each of its columns is; a kind decodes a whole column at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from experiments.tasks.clicks.hashing import hash_text, words_of
from experiments.tasks.clicks.schema import MISSING, Schema
from experiments.tasks.clicks.store import LABELS, Columns, columns_of

if TYPE_CHECKING:
    import pyarrow as pa


class ColumnError(ValueError):
    """A column that is not what it is taken for.

    `row` counts from 0, in the arrays that were given; it is None where no one row is at fault.
    """

    def __init__(self, problem: str, *, column: str, row: int | None = None) -> None:
        super().__init__(f"column {column}: {problem}")
        self.problem, self.column, self.row = problem, column, row

    @classmethod
    def found(cls, value: Any, wanted: str, *, column: str, row: int) -> ColumnError:
        """Return the error of a value that is not what is wanted."""
        if isinstance(value, str) and len(value) > 40:
            value = f"{value[:40]}..."
        shown = "nothing" if value is None else ascii(value)
        return cls(f"found {shown}, expected {wanted}", column=column, row=row)


class Decoded(NamedTuple):
    """The values of one column; a value that is `missing` means nothing."""

    values: np.ndarray
    """Labels, numbers, or unsigned integers that stand for categories: [rows]."""
    missing: np.ndarray
    """bool[rows]."""


@runtime_checkable
class Kind(Protocol):
    """What a column holds."""

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the values of a column; a ColumnError names the first row that has none."""


def encode(
    batch: Mapping[str, pa.Array],
    schema: Schema,
    kinds: Mapping[str, Kind],
    hash_seed: int,
    *,
    label: str | None = None,
) -> Columns:
    """Return the columns of a store for a batch of rows.

    Numbers become ``Schema.transformed`` of themselves, categories their hashed ids or the places
    of their declared values, and what is missing becomes 0.

    Args:
        batch: Column name to its values, all of one length.
        schema: Which columns are numbers and categories.
        kinds: What each of these columns holds.
        hash_seed: Public seed of the hash of categories.
        label: Column of the label; None for rows without one, and without weights.

    Raises:
        ColumnError: names the first column that cannot be read, and its first such row.
    """
    rows = len(next(iter(batch.values())))
    columns: Columns = {
        name: np.empty((rows,) if width is None else (rows, width), dtype)
        for name, (dtype, width) in columns_of(schema).items()
    }
    if label is None:
        columns = {name: x for name, x in columns.items() if name not in LABELS}
    else:
        columns["label"][:] = kinds[label].decode(batch[label], label).values
        if schema.weight:
            column = schema.weight
            columns["weight"][:] = kinds[column].decode(batch[column], column).values
    for j, name in enumerate(schema.integers):
        values, missing = kinds[name].decode(batch[name], name)
        columns["integers"][:, j] = np.where(missing, 0, schema.transformed(values))
        columns["integers_missing"][:, j] = missing
    for j, name in enumerate(schema.categories):
        distinct = getattr(batch[name], "dictionary", batch[name])  # each is hashed once
        values, missing = kinds[name].decode(distinct, name)
        if name in schema.declared:
            ids = 1 + values.astype(np.int32)
        else:
            ids = schema.hash(values, j, hash_seed)
        ids[missing] = MISSING
        if distinct is not batch[name]:
            places = np.asarray(batch[name].indices.fill_null(len(ids)))
            ids = np.append(ids, np.int32(MISSING))[places]
        columns["categories"][:, j] = ids
    return columns


def encode_rows(
    rows: Mapping[str, Any],
    schema: Schema,
    kinds: Mapping[str, Kind],
    to_array: Callable[[Any, str], pa.Array],
    hash_seed: int,
) -> Columns:
    """Return rows of a table in memory as the columns of a store, without "label".

    Args:
        rows: Column name to its values; columns that are no features are not looked at.
        schema: Which columns are numbers and categories.
        kinds: What each of these columns holds.
        to_array: (values, column) -> the array that `kinds` decode, or a ColumnError.
        hash_seed: Public seed of the hash of categories.

    Raises:
        ValueError: a feature is not there or has fewer rows than another, or a value is not what
            the column holds; the line names row (from 0) and column.
    """
    wanted = [name for name in kinds if name in {*schema.integers, *schema.categories}]
    if absent := [name for name in wanted if name not in rows]:
        raise ValueError(f"the rows have no column {', '.join(absent)}")
    try:
        batch = {name: to_array(rows[name], name) for name in wanted}
        if len({len(array) for array in batch.values()}) > 1:
            shown = ", ".join(f"{name} has {len(array):,}" for name, array in batch.items())
            raise ValueError(f"the columns are not of one length: {shown}")
        return encode(batch, schema, kinds, hash_seed)
    except ColumnError as error:
        where = "" if error.row is None else f"row {error.row}, "
        raise ValueError(f"{where}column {error.column}: {error.problem}") from None


# --- Texts ---------------------------------------------------------------------------------------


def extents(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each text begins in the buffer of characters, and its length in bytes."""
    offsets = np.frombuffer(texts.buffers()[1] or b"\0\0\0\0", np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    return offsets[:-1], np.diff(offsets)


def characters(texts: pa.Array) -> bytes:
    """Return all texts without anything between them."""
    starts, lengths = extents(texts)
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return b""
    return data[int(starts[0]) : int(starts[-1] + lengths[-1])].to_pybytes()


def hashed(texts: pa.Array, missing: Sequence[str] = ()) -> Decoded:
    """Return the hashes of texts; missing is the empty one, null, and those that are given.

    Two texts have the same hash with a probability of about 2^-64.
    """
    starts, lengths = extents(texts)
    words = words_of(characters(texts) + b"\0" * 8)
    return Decoded(hash_text(words, starts - starts[:1], lengths), absent(texts, missing))


def absent(texts: pa.Array, missing: Sequence[str] = ()) -> np.ndarray:
    """Return which texts say that there is no value: bool[rows]; see `hashed`."""
    import pyarrow.compute as pc

    found = extents(texts)[1] == 0
    if texts.null_count:
        found |= np.asarray(texts.is_null())
    for text in missing:
        found |= np.asarray(pc.equal(texts, text).fill_null(False))
    return found
