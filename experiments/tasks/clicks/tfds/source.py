"""Any data set of TensorFlow Datasets, read once into a store; needs no TensorFlow.

It must lie prepared on the disk, as array_record. What it may hold:

- blocks of rows, as `experiments.tasks.clicks.tfds.builders` writes them: taken as they are;
- or one row a record, of features that are single values, which are encoded as a table's are
  (`experiments.tasks.clicks.tabular.kinds`), so that files and tables with the same columns can
  be scored. The label is 0 or 1. Numbers (integers, floats; NaN is missing) become numeric columns,
  through ``sign(x) * log1p(|x|)``; class labels (negative is missing), booleans and texts (empty is
  missing) become categories, hashed into tables whose sizes are those of the classes, or given.
  Nothing is learned from the rows.

Anything else (images, sequences, nested features) is refused by name, unless it is left out by
name. Of the splits, "train" trains, "validation" and "test" are what they are called; where one of
the two is wanting, the rows of the other are halved at random, and where both are, "train" is split
80/10/10 at random. Rows of other splits are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpsgd.runs.records import build, checked
from experiments.tasks.clicks.encoding import ColumnError, encode
from experiments.tasks.clicks.schema import Schema, default_buckets
from experiments.tasks.clicks.store import Columns, Store, columns_of
from experiments.tasks.clicks.tabular.format import BUCKETS
from experiments.tasks.clicks.tabular.kinds import kinds_of
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.tfds import (
    SPLITS,
    SourceError,
    check_features,
    divide,
    features_of,
    label_of,
    open_prepared,
    records_of,
)

ROWS_PER_READ = 4096


def prepare(
    name: str,
    out: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    label: str | None = None,
    leave_out: Collection[str] = (),
    text_buckets: int = BUCKETS,
    classes: Collection[str] = (),
    hash_seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Read the data set `name` into a store in the new directory `out`, and return the store.

    Args:
        name: As TensorFlow Datasets knows it, or the directory of one version of it.
        out: Store to create; whole in the end, or absent.
        data_dir: Where data sets lie; by default where TensorFlow Datasets puts them.
        label: Feature to predict; by default what the data set says, or "label".
        leave_out: Features not to read.
        text_buckets: Hash buckets of a text, a power of two; see the note on *Nothing is learned*.
        classes: Values of the label that mean 0, 1, ..., where it is not 0 or 1.
        hash_seed: Public seed of the hash of categories.
        progress: Called with the number of rows done, now and then.

    Raises:
        SourceError: there is no such data set, or it is not one that can be read.
        StoreError: `out` exists, or cannot be written.
    """
    builder = open_prepared(name, data_dir)
    metadata = dict(builder.info.metadata or {})
    reader: _Blocks | _Rows
    if "schema" in metadata:
        reader = _Blocks.of(builder, metadata, hash_seed, bool(label or leave_out or classes))
    else:
        reader = _Rows.of(builder, label, leave_out, text_buckets, tuple(classes), hash_seed)
    with StoreWriter(out, reader.schema, hash_seed=hash_seed) as writer:
        for split in filter(builder.info.splits.__contains__, SPLITS):
            done = 0
            for columns in reader.read(split):
                for part, rows in divide(columns, done, split, builder.info.splits).items():
                    writer.append(rows, part)
                done += len(columns["label"])
                if progress is not None:
                    progress(writer.num_rows)
        for part in SPLITS:  # a part without rows is a part
            writer.append({name: column[:0] for name, column in columns.items()}, part)
        source = {"format": "tfds", "name": builder.info.full_name}
        return writer.finish(splits=writer.parts, source=source)


# --- Blocks of rows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    builder: Any
    schema: Schema

    @classmethod
    def of(
        cls, builder: Any, metadata: dict[str, Any], hash_seed: int, other_options: bool
    ) -> _Blocks:
        where = f"metadata of {builder.info.full_name}"
        schema = build(Schema, metadata["schema"], f"{where}: schema")
        seed = checked(metadata.get("hash_seed"), int, f"{where}: hash_seed")
        if seed != hash_seed or other_options:
            raise SourceError(
                f"{builder.info.full_name} holds columns that are ready, hashed with seed {seed}: "
                "leave label, features and buckets as they are, and the seed too"
            )
        return cls(builder, schema)

    def read(self, split: str) -> Iterator[Columns]:
        """Yield the columns of a store."""
        for (record,) in records_of(self.builder, split, 1):
            rows = len(record["label"])
            yield {
                # Columns without a width are not among the features.
                name: record[name] if name in record else np.empty((rows, 0), dtype)
                for name, (dtype, _) in columns_of(self.schema).items()
            }


# --- One row a record ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    builder: Any
    schema: Schema
    classes: tuple[str, ...]
    """Features that are numbers of classes, of which a negative one is missing."""
    hash_seed: int

    @classmethod
    def of(
        cls,
        builder: Any,
        label: str | None,
        leave_out: Collection[str],
        text_buckets: int,
        labels: tuple[str, ...],
        hash_seed: int,
    ) -> _Rows:
        import tensorflow_datasets as tfds

        info, name = builder.info, builder.info.full_name
        features = features_of(builder)
        label = label_of(builder, label)
        check_features(builder, (label, *leave_out))
        numbers, buckets, others, classes = [], {}, [], []
        for feature, kind in features.items():
            if feature == label or feature in leave_out:
                continue
            dtype = None if kind.shape != () else np.dtype(kind.np_dtype)
            if isinstance(kind, tfds.features.ClassLabel):
                buckets[feature] = default_buckets(kind.num_classes or 1)
                classes.append(feature)
            elif isinstance(kind, tfds.features.Text) or (dtype and dtype.kind in "OSU"):
                buckets[feature] = text_buckets
            elif dtype and dtype.kind == "b":
                buckets[feature] = default_buckets(2)
            elif dtype and dtype.kind in "iuf":
                numbers.append(feature)
            else:
                others.append(f"{feature} ({type(kind).__name__})")
        if others:
            raise SourceError(
                f"{name} has features that are not single numbers, classes or texts: "
                f"{', '.join(others)}; leave them out by name"
            )
        schema = Schema(
            name=f"tfds:{info.name}",
            integers=tuple(numbers),
            categories=tuple(buckets),
            buckets=tuple(buckets.values()),
            label=label,
            classes=labels,
        )
        return cls(builder, schema, tuple(classes), hash_seed)

    def read(self, split: str) -> Iterator[Columns]:
        """Yield the columns of a store."""
        done = 0
        for records in records_of(self.builder, split, ROWS_PER_READ):
            yield self._columns(records, f"{self.builder.info.full_name}, split {split}", done)
            done += len(records)

    def _columns(self, records: list[dict[str, Any]], where: str, first: int) -> Columns:
        wanted = [self.schema.label, *self.schema.integers, *self.schema.categories]
        batch = {name: pa.array([record[name] for record in records]) for name in wanted}
        for name in self.classes:
            negative = pc.less(batch[name], 0)
            batch[name] = pc.if_else(negative, pa.scalar(None, batch[name].type), batch[name])
        try:
            kinds = kinds_of(self.schema)
            return encode(batch, self.schema, kinds, self.hash_seed, label=self.schema.label)
        except ColumnError as error:
            row = "" if error.row is None else f", record {first + error.row}"
            raise SourceError(f"{where}{row}, feature {error.column}: {error.problem}") from None
