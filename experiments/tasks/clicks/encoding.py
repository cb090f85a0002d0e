"""Columns of rows, as Arrow arrays, become the columns of a store: one way for all formats.

A format says of which kind each of its columns is; a kind decodes a whole column at once.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.tasks.clicks.schema import MISSING, Schema
from experiments.tasks.clicks.store import Columns, Store, empty_columns
from experiments.tasks.clicks.writer import write_blocks
from experiments.tasks.splitmix import GOLDEN, mix
from experiments.tasks.splits import Split

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


class Kind(abc.ABC):
    """What a column holds."""

    @abc.abstractmethod
    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the values of a column; a ColumnError names the first row that has none."""


class Format(abc.ABC):
    """How rows are written outside a store, and how they become one."""

    schema: Schema
    """The columns that rows become."""
    hash_seed: int
    """Public seed of the hash of categories."""
    split: Split
    """Which rows are for training."""

    @property
    @abc.abstractmethod
    def kinds(self) -> Mapping[str, Kind]:
        """What each column holds."""

    @abc.abstractmethod
    def array(self, values: Any, column: str) -> pa.Array:
        """Return values of a table in memory as `kinds` decode them, or raise a ColumnError."""

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that a model reads."""
        return (*self.schema.integers, *self.schema.categories)

    def columns_of(self, batch: Mapping[str, pa.Array], label: str | None = None) -> Columns:
        """Return the columns of a store for a batch of rows: column name to values.

        Numbers become ``Schema.transformed`` of themselves, categories their hashed ids or the
        places of their declared values, and what is missing becomes 0.

        Raises:
            ColumnError: names the first column that cannot be read, and its first such row.
        """
        schema, kinds = self.schema, self.kinds
        columns = empty_columns(schema, len(next(iter(batch.values()))))
        if label is None:
            del columns["label"]
        else:
            columns["label"][:] = kinds[label].decode(batch[label], label).values
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
                ids = schema.hash(values, j, self.hash_seed)
            ids[missing] = MISSING
            if distinct is not batch[name]:
                places = np.asarray(batch[name].indices.fill_null(len(ids)))
                ids = np.append(ids, np.int32(MISSING))[places]
            columns["categories"][:, j] = ids
        return columns

    def write(
        self, out: str | os.PathLike[str], blocks: Iterable[Columns], source: Any, **how: Any
    ) -> Store:
        """Write blocks of rows as a new store, see `write_blocks`."""
        return write_blocks(
            out, self.schema, blocks, self.split, source=source, hash_seed=self.hash_seed, **how
        )

    def encode(self, rows: Mapping[str, Any]) -> Columns:
        """Return rows of a table as the columns that a file with the same rows has, unlabelled.

        Args:
            rows: Column name to its values, as they stand in a file, or as Python, NumPy or Arrow
                have them. None, NaN and the empty text are missing; columns that are no features
                are not looked at.

        Raises:
            ValueError: a feature is not there or has fewer rows than another, or a value is not
                what the column holds; the line names row (from 0) and column.
        """
        wanted = [name for name in self.kinds if name in self.features]
        if absent := [name for name in wanted if name not in rows]:
            raise ValueError(f"the rows have no column {', '.join(absent)}")
        try:
            batch = {name: self.array(rows[name], name) for name in wanted}
            if len({len(array) for array in batch.values()}) > 1:
                shown = ", ".join(f"{name} has {len(array):,}" for name, array in batch.items())
                raise ValueError(f"the columns are not of one length: {shown}")
            return self.columns_of(batch)
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


def words_of(text: bytes) -> np.ndarray:
    """Return the eight bytes from each place of `text` on (but the last seven) as one integer."""
    return np.ndarray(len(text) - 7, dtype="<u8", buffer=text, strides=(1,))


def first_characters(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first `lengths` (at most 8 count) characters of each word, zeros after them."""
    after = (64 - 8 * np.minimum(lengths, 8)).astype(np.uint64)
    return words << after >> after  # NumPy shifts by 64 to zero


def hash_text(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of the `lengths` characters from each of `starts`.

    ``h = mix(h XOR word)`` over the words of eight characters, the last filled up with zeros, from
    ``h = length * golden ratio``. Every step is a bijection of h and of the word, so two texts of
    one length that differ in one word never collide, and others hardly ever.
    """
    hashes = lengths.astype(np.uint64) * np.uint64(GOLDEN)
    active, at = np.flatnonzero(lengths > 0), 0
    while len(active):
        left, word = lengths[active] - at, words[starts[active] + at]
        if left.min() < 8:
            word = first_characters(word, left)
        hashes[active] = mix(hashes[active] ^ word)
        at += 8
        active = active[left > 8]
    return hashes
