"""Raw rows in files or in memory, encoded as the columns of a store.

Callers name the columns and declare their kinds; other columns are not read. Nothing is inferred
from rows, which are private: bucket counts, splits and transforms are constants or declared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.tasks.clicks.schema import MISSING, Schema
from experiments.tasks.clicks.store import Store, empty_columns
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.files import Batch, RowFile, open_rows
from experiments.tasks.kinds import Category, Kind
from experiments.tasks.splits import RANDOM, ColumnError, Columns, Split
from experiments.tasks.streams import DataError, Span, paths_of

EMPTY = "has a header but no rows"
"""Problem of files without rows."""


@dataclass(frozen=True)
class Format:
    """Format of rows in files or in memory, and their encoding as the columns of a store."""

    schema: Schema
    kinds: Mapping[str, Kind]
    """Kind of each column that may be read, the label's included."""
    label: str
    """Column of the label."""
    layouts: tuple[tuple[str, ...], ...] = ()
    """Names of the columns of headerless text, with labels first, then without; empty for text
    whose header names the columns."""
    split: Split = RANDOM
    hash_seed: int = 0
    """Public seed of the hash of categories."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.features if name not in self.kinds]:
            raise ValueError(f"{self.schema.name} files have no column {', '.join(unknown)}")
        if self.schema.user and self.split.order == "chronological":
            raise ValueError(
                f"user {self.schema.user}: a chronological split would test the model on users who "
                "trained it; leave out --order, or prepare later rows as a store to evaluate on"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Columns that a model reads."""
        return (*self.schema.integers, *self.schema.categories)

    def open(self, path: Path, *, labelled: bool = True, span: Span | None = None) -> RowFile:
        """Opens a file of rows.

        Raises:
            DataError: If the file cannot be read, or lacks a column.
        """
        layouts = [x for x in self.layouts if {*self.features} <= {*x}]
        return open_rows(path, self._columns(labelled), layouts[: 1 if labelled else None], span)

    def read(self, source: str | os.PathLike[str], *, labelled: bool = True) -> Iterator[Columns]:
        """Yields the rows of a file as blocks of encoded columns.

        Args:
            source: Path of the file.
            labelled: True to include the labels; otherwise the file may lack them.

        Raises:
            DataError: If the file cannot be read, or does not have the format.
        """
        return self._blocks([self.open(Path(source), labelled=labelled)], labelled)

    def prepare(
        self,
        sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Writes the rows of files as a new store.

        Args:
            sources: Path of a file, or paths of several, read in this order.
            out: Store to create; complete at the end, or absent.
            progress: Function of the number of rows written, called now and then.

        Raises:
            DataError: If a file cannot be read, or does not have the format.
            StoreError: If `out` exists, or cannot be written.
            ValueError: If a file is given twice.
        """
        paths = paths_of(sources)
        files = [self.open(path) for path in paths]
        blocks = self._blocks(files, labelled=True)
        return self.write(out, blocks, self.source(paths), progress=progress)

    def source(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Returns the origin of the rows, for the store's manifest."""
        return {"format": self.schema.name, "files": [path.name for path in paths]}

    def write(
        self, out: str | os.PathLike[str], blocks: Iterable[Columns], source: Any, **how: Any
    ) -> Store:
        """Writes blocks of rows as a new store, see `StoreWriter.write`."""
        writer = StoreWriter(out, self.schema, hash_seed=self.hash_seed)
        return writer.write(blocks, self.split, source, **how)

    def encoded(self, file: RowFile, labelled: bool = True) -> Iterator[Columns]:
        """Yields the rows of an opened file as encoded columns.

        Raises:
            DataError: For the first row that does not have the format.
        """
        text, dictionary = pa.string(), pa.dictionary(pa.int32(), pa.string())
        arrow_types = {
            name: dictionary if isinstance(self.kinds[name], Category) else text
            for name in self._columns(labelled)
        }
        rows, label = 0, self.label if labelled else None
        for batch in file.batches(arrow_types):
            try:
                block = self.columns_of(batch, label)
            except ColumnError as error:
                raise file.located(self._first_error(batch, label, error), rows) from None
            rows += len(block["categories"])
            yield block

    def _first_error(self, batch: Batch, label: str | None, error: ColumnError) -> ColumnError:
        """Returns the error of the earliest faulty row among all columns."""
        while error.row:
            try:
                self.columns_of({name: x[: error.row] for name, x in batch.items()}, label)
            except ColumnError as earlier:
                error = earlier
            else:
                break
        return error

    def _blocks(self, files: Sequence[RowFile], labelled: bool) -> Iterator[Columns]:
        """Yields the rows of files, one after the other; some must have rows."""
        empty = True
        for file in files:
            for block in self.encoded(file, labelled):
                empty = False
                yield block
        if empty:
            raise DataError(files[0].path, EMPTY)

    def columns_of(self, batch: Batch, label: str | None = None) -> Columns:
        """Encodes a batch of rows as the columns of a store.

        Numbers become ``Schema.transformed`` numbers, categories their hashed ids or the indices of
        their declared values, and missing values 0. Users, read with the label, are names in bytes,
        which `StoreWriter.write` numbers.

        Raises:
            ColumnError: For the first unreadable column, with its first such row.
        """
        schema, kinds = self.schema, self.kinds
        columns = empty_columns(schema, len(next(iter(batch.values()))))
        if label is None:
            columns = {name: x for name, x in columns.items() if name not in ("label", "user")}
        else:
            columns["label"][:] = kinds[label].decode(batch[label], label).values
            if user := schema.user:
                columns["user"] = kinds[user].decode(batch[user], user).values
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
                indices = np.asarray(batch[name].indices.fill_null(len(ids)))
                ids = np.append(ids, np.int32(MISSING))[indices]
            columns["categories"][:, j] = ids
        return columns

    def encode(self, rows: Any) -> Columns:
        """Encodes the rows of a table without labels.

        >>> from experiments.tasks.clicks.formats import table_format, table_schema
        >>> rows = {"age": [31, None], "city": ["Oslo", "Oslo"]}
        >>> format = table_format(table_schema("y", categories=["city"], numbers=["age"]))
        >>> columns = format.encode(rows)
        >>> columns["integers"].ravel().round(2), columns["categories"].ravel()
        (array([3.47, 0.  ], dtype=float32), array([30349, 30349], dtype=int32))

        Args:
            rows: Column name -> values: texts as in a file, or Python, NumPy or Arrow values. None,
              NaN and the empty text are missing. Columns that are not features are ignored.

        Raises:
            TypeError: If `rows` is not a mapping of columns, or a column is a single value.
            ValueError: If a feature is absent, lengths differ, or a value is invalid; the message
              names row (from 0) and column.
        """
        if not hasattr(rows, "keys"):
            raise TypeError(
                "rows must map each column name to a list of values, one per row; got "
                f"{type(rows).__name__}"
            )
        names = [name for name in self.kinds if name in self.features]
        if absent := [name for name in names if name not in rows]:
            raise ValueError(f"rows have no column {', '.join(absent)}; add it")
        for name in names:
            if isinstance(rows[name], (str, bytes)) or not hasattr(rows[name], "__len__"):
                raise TypeError(
                    f"column {name}: expected a list of values, one per row, got {rows[name]!a:.40}"
                )
        try:
            batch = {name: as_arrow(rows[name], name) for name in names}
            if len({len(array) for array in batch.values()}) > 1:
                lengths = ", ".join(f"{name} has {len(array):,}" for name, array in batch.items())
                raise ValueError(f"columns must have equal lengths: {lengths}")
            return self.columns_of(batch)
        except ColumnError as error:
            location = "" if error.row is None else f"row {error.row}, "
            raise ValueError(f"{location}column {error.column}: {error.problem}") from None

    def left_out(self, files: Sequence[RowFile]) -> tuple[str, ...]:
        """Returns the columns of files that are not read."""
        names = dict.fromkeys(name for file in files for name in file.names)
        return tuple(name for name in names if name not in self._columns(labelled=True))

    def texts(self, path: Path, column: str) -> Iterator[str]:
        """Yields the values of one column of a file as texts.

        Missing values are empty texts.

        Raises:
            DataError: If the file cannot be read, or has no such column.
        """
        file = open_rows(path, [column])
        # The columns of `read`, so that both see the same rows and refuse the same ones.
        arrow_types = dict.fromkeys([column, *self._columns(labelled=False)], pa.string())
        return (
            value or ""
            for batch in file.batches(arrow_types)
            for value in texts(batch[column], column).to_pylist()
        )

    def _columns(self, labelled: bool) -> list[str]:
        users = [self.schema.user] * bool(self.schema.user)
        return [*([self.label, *users] if labelled else []), *self.features]


def as_arrow(values: Any, column: str) -> pa.Array:
    """Returns a list, or an array of NumPy, pandas or Arrow, as one of Arrow; NaN is null."""
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        problem = f"expected values of one type: {reason:.200}"
        raise ColumnError(problem, column=column) from None
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    # Texts may lie under nulls.
    return array.fill_null("") if array.null_count and pa.types.is_string(array.type) else array


def texts(array: pa.Array, column: str) -> pa.Array:
    """Converts a column to texts.

    Raises:
        ColumnError: If the values have no text form.
    """
    try:
        return array.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ColumnError(f"holds {array.type}, expected texts", column=column) from None
