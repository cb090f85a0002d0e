"""Encoding of Arrow columns as the columns of a store, one way for all formats.

A format states the kind of each column; a kind decodes a whole column at once.
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
    """Column with an unexpected value.

    `row` counts from 0 in the given arrays; it is None if no single row is at fault.
    """

    def __init__(self, problem: str, *, column: str, row: int | None = None) -> None:
        super().__init__(f"column {column}: {problem}")
        self.problem, self.column, self.row = problem, column, row

    @classmethod
    def unexpected(cls, value: Any, wanted: str, *, column: str, row: int) -> ColumnError:
        """Returns the error of a value that is not `wanted`."""
        if isinstance(value, str) and len(value) > 40:
            value = f"{value[:40]}..."
        text = "nothing" if value is None else ascii(value)
        return cls(f"found {text}, expected {wanted}", column=column, row=row)


class Decoded(NamedTuple):
    """Values of one column, with a mask of the missing ones."""

    values: np.ndarray
    """Labels, numbers, or unsigned integers that stand for categories: [rows]."""
    missing: np.ndarray
    """bool[rows]."""


class Kind(abc.ABC):
    """Kind of the values of a column."""

    @abc.abstractmethod
    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the values of a column; a ColumnError names the first invalid row."""


class Format(abc.ABC):
    """Format of rows outside a store, and their encoding."""

    schema: Schema
    """Columns of the encoded rows."""
    hash_seed: int
    """Public seed of the hash of categories."""
    split: Split
    """Split of the rows."""

    @property
    @abc.abstractmethod
    def kinds(self) -> Mapping[str, Kind]:
        """Kind of each column."""

    @abc.abstractmethod
    def array(self, values: Any, column: str) -> pa.Array:
        """Returns in-memory values as an array for `kinds`, or raises a ColumnError."""

    @property
    def features(self) -> tuple[str, ...]:
        """Columns that a model reads."""
        return (*self.schema.integers, *self.schema.categories)

    def columns_of(self, batch: Mapping[str, pa.Array], label: str | None = None) -> Columns:
        """Returns a batch of rows as the columns of a store.

        Numbers become ``Schema.transformed`` numbers, categories their hashed ids or the indices of
        their declared values, and missing values 0.

        Raises:
            ColumnError: For the first unreadable column, with its first such row.
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
        """Writes blocks of rows as a new store, see `write_blocks`."""
        return write_blocks(
            out, self.schema, blocks, self.split, source=source, hash_seed=self.hash_seed, **how
        )

    def encode(self, rows: Mapping[str, Any]) -> Columns:
        """Returns the rows of a table as unlabelled columns, as from a file.

        Args:
            rows: Column name to its values, as in a file, or as Python, NumPy or Arrow have them.
              None, NaN and the empty text are missing; columns that are not features are ignored.

        Raises:
            ValueError: If a feature is absent or shorter than another, or a value is invalid; the
              message names row (from 0) and column.
        """
        names = [name for name in self.kinds if name in self.features]
        if absent := [name for name in names if name not in rows]:
            raise ValueError(f"the rows have no column {', '.join(absent)}")
        try:
            batch = {name: self.array(rows[name], name) for name in names}
            if len({len(array) for array in batch.values()}) > 1:
                lengths = ", ".join(f"{name} has {len(array):,}" for name, array in batch.items())
                raise ValueError(f"the columns are not of one length: {lengths}")
            return self.columns_of(batch)
        except ColumnError as error:
            location = "" if error.row is None else f"row {error.row}, "
            raise ValueError(f"{location}column {error.column}: {error.problem}") from None


# --- Texts ---------------------------------------------------------------------------------------


def extents(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns each text's offset in the character buffer, and its length in bytes."""
    offsets = np.frombuffer(texts.buffers()[1] or b"\0\0\0\0", np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    return offsets[:-1], np.diff(offsets)


def characters(texts: pa.Array) -> bytes:
    """Returns the concatenation of all texts."""
    starts, lengths = extents(texts)
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return b""
    return data[int(starts[0]) : int(starts[-1] + lengths[-1])].to_pybytes()


def hashed(texts: pa.Array, missing: Sequence[str] = ()) -> Decoded:
    """Returns the hashes of texts; empty texts, null and `missing` are missing.

    Two texts collide with a probability of about 2^-64.
    """
    starts, lengths = extents(texts)
    words = words_of(characters(texts) + b"\0" * 8)
    return Decoded(hash_text(words, starts - starts[:1], lengths), absent(texts, missing))


def absent(texts: pa.Array, missing: Sequence[str] = ()) -> np.ndarray:
    """Returns the mask of missing texts, bool[rows], see `hashed`."""
    import pyarrow.compute as pc

    mask = extents(texts)[1] == 0
    if texts.null_count:
        mask |= np.asarray(texts.is_null())
    for text in missing:
        mask |= np.asarray(pc.equal(texts, text).fill_null(False))
    return mask


def words_of(text: bytes) -> np.ndarray:
    """Returns the eight bytes from each place of `text` (but the last seven) as an integer."""
    return np.ndarray(len(text) - 7, dtype="<u8", buffer=text, strides=(1,))


def first_characters(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the first `lengths` (at most 8) characters of each word, zero-padded."""
    after = (64 - 8 * np.minimum(lengths, 8)).astype(np.uint64)
    return words << after >> after  # NumPy shifts by 64 to zero


def hash_text(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of the `lengths` characters from each of `starts`.

    ``h = mix(h XOR word)`` over the words of eight characters, the last zero-padded, from ``h =
    length * golden ratio``. Every step is a bijection of h and of the word, so two texts of one
    length that differ in one word never collide, and others hardly ever.
    """
    hashes = lengths.astype(np.uint64) * np.uint64(GOLDEN)
    active, offset = np.flatnonzero(lengths > 0), 0
    while len(active):
        remaining, word = lengths[active] - offset, words[starts[active] + offset]
        if remaining.min() < 8:
            word = first_characters(word, remaining)
        hashes[active] = mix(hashes[active] ^ word)
        offset += 8
        active = active[remaining > 8]
    return hashes
