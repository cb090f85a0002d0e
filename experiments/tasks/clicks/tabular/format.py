"""One's own table: which columns are what, how its files become a store, and how rows are scored.

Nothing is guessed from rows, which are private: a column is a number, a category or the label
because its name was given, and the others are left out. How many buckets a category has, where a
row goes and what becomes of numbers are constants, or given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from experiments.tasks.clicks.encoding import ColumnError, encode, encode_rows
from experiments.tasks.clicks.raw.files import DataError, paths_of
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.tabular.files import Batch, TableFile, open_table
from experiments.tasks.clicks.tabular.kinds import Category, kinds_of
from experiments.tasks.clicks.tabular.private import Counts, PrivateColumns
from experiments.tasks.clicks.writer import Order, StoreWriter, refuse_existing
from experiments.tasks.splits import (
    FRACTIONS,
    check_fractions,
    chronological_split,
    random_masks,
)

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
    transform: Literal["log1p", "none"] = "log1p",
    missing: Sequence[str] = (),
    classes: Sequence[str] = (),
    label_bounds: Sequence[float] = (),
    weight: str = "",
    weight_bound: float = 1.0,
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
        transform: What becomes of numbers: ``sign(x) * log1p(|x|)``, or nothing.
        missing: Texts that stand for a missing value, beside the empty one.
        classes: Texts of the label that mean 0, 1, ..., where it is not zeros and ones.
        label_bounds: Public (low, high) of a label that is a number.
        weight: Column of the weights of rows, if any.
        weight_bound: Public bound to which these are clipped.
        bounds: Public (low, high) of numbers, by column.
        values: Public values of categories, by column: they are not hashed, and all others are
            missing.

    Raises:
        ValueError: a column is named twice, or none is a feature; or the buckets, bounds or values
            do not fit.
    """
    names = [label, *([weight] if weight else []), *categories, *numbers]
    if not label:
        raise ValueError("--label must name a column")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(
            f"{', '.join(twice)}: a column is label, weight, a category or a number, and named once"
        )
    if not categories and not numbers:
        raise ValueError("name the columns to learn from: --categories, --numbers or both")
    bounds, values = bounds or {}, values or {}
    if unknown := [name for name in bounds if name not in numbers]:
        raise ValueError(f"bounds are for columns of numbers, not for {', '.join(unknown)}")
    if unknown := [name for name in values if name not in categories]:
        raise ValueError(f"values are for columns of categories, not for {', '.join(unknown)}")
    hashed = [name for name in categories if name not in values]
    if len(buckets) not in (1, len(hashed)):
        raise ValueError(
            f"--buckets takes one number, or one for each of the {len(hashed)} categories"
            f"{' without declared values' * bool(values)}, not {len(buckets)}"
        )
    sizes = dict(zip(hashed, [*buckets] * (len(hashed) if len(buckets) == 1 else 1), strict=True))
    schema = Schema(
        name="table",
        integers=tuple(numbers),
        categories=tuple(categories),
        buckets=tuple(sizes.get(name, 1) for name in categories),
        label=label,
        transform=transform,
        missing=tuple(missing),
        classes=tuple(classes),
        label_bounds=tuple(label_bounds),
        weight=weight,
        weight_bound=weight_bound,
    )
    return schema.choosing(bounds, {name: tuple(texts) for name, texts in values.items()})


@dataclass(frozen=True)
class Prepared:
    """A store, and the columns of its files that are not in it."""

    store: Store
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class TableFormat:
    """Reads the rows of files and of tables in memory into the columns of `schema`."""

    schema: Schema

    def prepare(
        self,
        sources: Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        order: Order = "random",
        fractions: tuple[float, float, float] = FRACTIONS,
        hash_seed: int = 0,
        progress: Callable[[int], None] | None = None,
        private: PrivateColumns | None = None,
    ) -> Prepared:
        """Turn the rows of files, one file after the other, into a store in the directory `out`.

        `progress` is called with the number of rows done, after every block. Memory is constant.
        Either `out` is a whole store in the end or it does not exist.

        Args:
            sources: CSV, TSV and Parquet files, each with all columns of the schema, in any order.
            out: Store to create.
            order: How rows are split; see `experiments.tasks.clicks.splits`.
            fractions: Of the rows that train, validate and test.
            hash_seed: Public seed of the hash of categories.
            progress: See above.
            private: Bounds and values that are chosen privately, of the training rows alone: then
                all rows are read once more, before.

        Raises:
            DataError: a file cannot be read, or is not of the columns of the schema.
            StoreError: `out` exists, or cannot be written.
            ValueError: the fractions do not add up to 1, a file is there twice, or what is to be
                chosen cannot be.
        """
        check_fractions(fractions)
        paths = paths_of(sources)
        files = [self.open(path) for path in paths]
        format, released = self, None
        if private is not None:
            refuse_existing(Path(out))
            counts = self._counts(files, private, order, fractions)
            schema, released = counts.released(private)
            format = TableFormat(schema)
        with StoreWriter(out, format.schema, hash_seed=hash_seed) as writer:
            blocks = format._blocks(files, hash_seed, labelled=True)
            splits = writer.append_all(blocks, order, fractions, progress)
            store = writer.finish(splits=splits, source=self.source(paths), released=released)
            return Prepared(store, self.left_out(files))

    def _counts(
        self,
        files: Sequence[TableFile],
        private: PrivateColumns,
        order: Order,
        fractions: tuple[float, float, float],
    ) -> Counts:
        """Return the counts of the training rows; every row is read as the store's will be."""
        counts, done = private.counts(self.schema), 0
        category = Category(self.schema.missing)
        last = 0
        if order == "chronological":  # how many rows there are decides which of them train
            whole = sum(len(block["label"]) for block in self._blocks(files, 0, labelled=True))
            last = chronological_split(whole, fractions)["train"][1]
        for file in files:
            begun = done
            for batch, block in self._encoded(file, 0):
                numbers = np.arange(done, done + len(block["label"]), dtype=np.uint64)
                is_train = numbers < last
                if order == "random":
                    is_train = random_masks(numbers, fractions)["train"]
                try:
                    texts = {name: category.texts(batch[name], name) for name in counts.texts}
                    counts.add(block, texts, is_train)
                except ColumnError as error:
                    raise file.located(error, done - begun) from None
                done += len(numbers)
        return counts

    def source(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return where rows are from, for the manifest of their store."""
        return {"format": self.schema.name, "files": [path.name for path in paths]}

    def left_out(self, files: Sequence[TableFile]) -> tuple[str, ...]:
        """Return the columns of files that are not among those of the schema."""
        named = dict.fromkeys(name for file in files for name in file.names)
        return tuple(name for name in named if name not in self._wanted(labelled=True))

    def read(
        self, source: str | os.PathLike[str], *, hash_seed: int = 0, labelled: bool = True
    ) -> Iterator[Columns]:
        """Yield the rows of a file as blocks of columns, those of a store, in file order.

        Where the rows need not be `labelled`, the file may have the label or lack it: the blocks
        have none.

        Raises:
            DataError: the file cannot be read, or is not of the columns of the schema.
        """
        file = open_table(Path(source), self._wanted(labelled))
        return self._blocks([file], hash_seed, labelled)

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

    def encode(self, rows: Mapping[str, Any], *, hash_seed: int = 0) -> Columns:
        """Return rows of a table as the columns that a file with the same rows has, unlabelled.

        Args:
            rows: Column name to its values: a list, or an array of NumPy, pandas or Arrow. None,
                NaN and the empty text are missing; columns that are no features are not looked at.
            hash_seed: Public seed of the hash of categories.

        Raises:
            ValueError: a feature is not there or has fewer rows than another, or a value is not
                what the column holds; the line names row (from 0) and column.
        """
        return encode_rows(rows, self.schema, kinds_of(self.schema), _array, hash_seed)

    def _wanted(self, labelled: bool) -> list[str]:
        """Return the columns that are read."""
        features = [*self.schema.integers, *self.schema.categories]
        weight = [self.schema.weight] if self.schema.weight else []
        return [self.schema.label, *weight, *features] if labelled else features

    def _blocks(
        self, files: Sequence[TableFile], hash_seed: int, labelled: bool
    ) -> Iterator[Columns]:
        """Yield the rows of files, one after the other; some have to have rows."""
        found = False
        for file in files:
            for block in self.blocks(file, hash_seed, labelled):
                found = True
                yield block
        if not found:
            raise DataError(files[0].path, EMPTY)

    def blocks(self, file: TableFile, hash_seed: int, labelled: bool = True) -> Iterator[Columns]:
        """Yield the rows of an opened file, which may have none; as `read` does."""
        return (block for _, block in self._encoded(file, hash_seed, labelled))

    def _encoded(
        self, file: TableFile, hash_seed: int, labelled: bool = True
    ) -> Iterator[tuple[Batch, Columns]]:
        """Yield the rows of an opened file as they stand there, and as a store has them."""
        rows, kinds = 0, kinds_of(self.schema)
        label = self.schema.label if labelled else None
        for batch in file.batches(self._wanted(labelled)):
            try:
                block = encode(batch, self.schema, kinds, hash_seed, label=label)
            except ColumnError as error:
                raise file.located(error, rows) from None
            rows += len(block["categories"])
            yield batch, block

    def open(self, path: Path) -> TableFile:
        """Open a file whose rows have labels; a DataError if it lacks a column."""
        return open_table(path, self._wanted(labelled=True))


def texts(array: pa.Array, column: str) -> pa.Array:
    """Return a column as texts; a ColumnError if it holds none."""
    try:
        return array.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ColumnError(f"holds {array.type}, which is no text", column=column) from None


def _array(values: Any, column: str) -> pa.Array:
    """Return the values of one column as an Arrow array; NaN is null among texts."""
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError) as error:
        why = " ".join(str(error).split())
        problem = f"values of one kind are expected: {why:.200}"
        raise ColumnError(problem, column=column) from None
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
