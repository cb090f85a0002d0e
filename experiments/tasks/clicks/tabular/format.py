"""One's own table: which columns are what, how its files become a store, and how rows are scored.

Nothing is guessed from rows, which are private: a column is a number, a category or the label
because its name was given, and the others are left out. How many buckets a category has, where a
row goes and what becomes of numbers are constants, or given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from experiments.tasks.clicks.encoding import ColumnError, Format, Kind
from experiments.tasks.clicks.raw.files import ByteRange, DataError, paths_of
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.tabular.files import TableFile, open_table
from experiments.tasks.clicks.tabular.kinds import kinds_of
from experiments.tasks.splits import RANDOM, Split

EMPTY = "has a header and no rows"
"""What is wrong with a file if all are so."""

BUCKETS = 1 << 16
"""Hash buckets of a category, unless others are asked for."""


def table_schema(
    label: str,
    *,
    categories: Sequence[str] = (),
    numbers: Sequence[str] = (),
    buckets: Sequence[int] = (BUCKETS,),
    transform: Literal["log1p", "none", "both"] = "both",
    missing: Sequence[str] = (),
    classes: Sequence[str] = (),
    label_bounds: Sequence[float] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    values: Mapping[str, Sequence[str]] | None = None,
) -> Schema:
    """Return the schema of a table with these columns.

    Args:
        label: Column to predict: zeros and ones, declared classes, or numbers with bounds.
        categories: Columns whose values are hashed.
        numbers: Columns of numbers.
        buckets: Hash buckets, a power of two: one for all categories without declared values, or
            one for each of these.
        transform: What becomes of numbers: see `Schema.transform`.
        missing: Texts that stand for a missing value, beside the empty one.
        classes: Texts of the label that mean 0, 1, ..., where it is not zeros and ones.
        label_bounds: Public (low, high) of a label that is a number.
        bounds: Public (low, high) of numbers, by column.
        values: Public values of categories, by column: they are not hashed, and all others are
            missing.

    Raises:
        ValueError: a column is named twice, or none is a feature; or the buckets, bounds or values
            do not fit.
    """
    names = [label, *categories, *numbers]
    if not label:
        raise ValueError("--label must name a column")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(
            f"{', '.join(twice)}: a column is the label, a category or a number, and named once"
        )
    if not categories and not numbers:
        raise ValueError("name the columns to learn from: --categories, --numbers or both")
    bounds = bounds or {}
    known = {name: tuple(texts) for name, texts in (values or {}).items()}
    if unknown := [name for name in bounds if name not in numbers]:
        raise ValueError(f"bounds are for columns of numbers, not for {', '.join(unknown)}")
    if unknown := [name for name in known if name not in categories]:
        raise ValueError(f"values are for columns of categories, not for {', '.join(unknown)}")
    hashed = [name for name in categories if name not in known]
    if len(buckets) not in (1, len(hashed)):
        raise ValueError(
            f"--buckets takes one number, or one for each of the {len(hashed)} categories"
            f"{' without declared values' * bool(known)}, not {len(buckets)}"
        )
    sizes = dict(zip(hashed, [*buckets] * (len(hashed) if len(buckets) == 1 else 1), strict=True))
    return Schema(
        name="table",
        integers=tuple(numbers),
        categories=tuple(categories),
        buckets=tuple(len(known[x]) if x in known else sizes[x] for x in categories),
        label=label,
        transform=transform,
        missing=tuple(missing),
        classes=tuple(classes),
        label_bounds=tuple(label_bounds),
        bounds=tuple(bounds.get(name) for name in numbers) if bounds else (),
        values=tuple(known.get(name) for name in categories) if known else (),
    )


@dataclass(frozen=True)
class TableFormat(Format):
    """Reads the rows of files and of tables in memory into the columns of `schema`."""

    schema: Schema
    hash_seed: int = 0
    split: Split = RANDOM

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """Those of the schema's columns."""
        return kinds_of(self.schema)

    def prepare(
        self,
        sources: Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Turn the rows of files, one file after the other, into a store; see `write_blocks`.

        The files are CSV, TSV or Parquet, each with all columns of the schema, in any order.

        Raises:
            DataError: a file cannot be read, or is not of the columns of the schema.
            StoreError: `out` exists, or cannot be written.
            ValueError: a file is there twice.
        """
        paths = paths_of(sources)
        files = [self.open(path) for path in paths]
        blocks = self._blocks(files, labelled=True)
        return self.write(out, blocks, self.source(paths), progress=progress)

    def source(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return where rows are from, for the manifest of their store."""
        return {"format": self.schema.name, "files": [path.name for path in paths]}

    def left_out(self, files: Sequence[TableFile]) -> tuple[str, ...]:
        """Return the columns of files that are not among those of the schema."""
        named = dict.fromkeys(name for file in files for name in file.names)
        return tuple(name for name in named if name not in self._wanted(labelled=True))

    def read(self, source: str | os.PathLike[str], *, labelled: bool = True) -> Iterator[Columns]:
        """Yield the rows of a file as blocks of columns, those of a store, in file order.

        Where the rows need not be `labelled`, the file may have the label or lack it: the blocks
        have none.

        Raises:
            DataError: the file cannot be read, or is not of the columns of the schema.
        """
        file = open_table(Path(source), self._wanted(labelled))
        return self._blocks([file], labelled)

    def texts(self, path: Path, column: str) -> Iterator[str]:
        """Return the values of any column of a file as texts, in file order; null is empty.

        Raises:
            DataError: the file cannot be read, or has no such column.
        """
        file = open_table(path, [column])
        # The columns of `read`, so that both see the same rows and refuse the same ones.
        wanted = [column, *(name for name in self._wanted(labelled=False) if name != column)]
        return (
            "" if value is None else value
            for batch in file.batches(wanted)
            for value in texts(batch[column], column).to_pylist()
        )

    def array(self, values: Any, column: str) -> pa.Array:
        """Return a list, or an array of NumPy, pandas or Arrow, as one of Arrow; NaN is null."""
        try:
            array = pa.array(values, from_pandas=True)
        except (pa.ArrowException, OverflowError) as error:
            why = " ".join(str(error).split())
            problem = f"values of one kind are expected: {why:.200}"
            raise ColumnError(problem, column=column) from None
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array

    def _wanted(self, labelled: bool) -> list[str]:
        """Return the columns that are read."""
        return [*([self.schema.label] if labelled else []), *self.features]

    def _blocks(self, files: Sequence[TableFile], labelled: bool) -> Iterator[Columns]:
        """Yield the rows of files, one after the other; some have to have rows."""
        found = False
        for file in files:
            for block in self._encoded(file, labelled):
                found = True
                yield block
        if not found:
            raise DataError(files[0].path, EMPTY)

    def ranges(self, paths: Sequence[Path], range_bytes: int) -> list[ByteRange]:
        """Return one range a file: a line end may stand within a field."""
        return [ByteRange(number, 0, str(path)) for number, path in enumerate(paths)]

    def read_range(self, span: ByteRange, lines: Any = None) -> Iterator[Columns]:
        """Yield the rows of a file, which may have none, up to its first fault: a DataError."""
        return self._encoded(self.open(Path(span.path)))

    def no_rows(self, path: Path, rows: int, all_rows: int) -> DataError | None:
        """Return what is wrong with a file of so many rows: nothing if any file has some."""
        return None if all_rows else DataError(path, EMPTY)

    def _encoded(self, file: TableFile, labelled: bool = True) -> Iterator[Columns]:
        """Yield the rows of an opened file as a store has them."""
        rows = 0
        label = self.schema.label if labelled else None
        for batch in file.batches(self._wanted(labelled)):
            try:
                block = self.columns_of(batch, label)
            except ColumnError as error:
                raise file.located(error, rows) from None
            rows += len(block["categories"])
            yield block

    def open(self, path: Path) -> TableFile:
        """Open a file whose rows have labels; a DataError if it lacks a column."""
        return open_table(path, self._wanted(labelled=True))


def texts(array: pa.Array, column: str) -> pa.Array:
    """Return a column as texts; a ColumnError if it holds none."""
    try:
        return array.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ColumnError(f"holds {array.type}, which is no text", column=column) from None
