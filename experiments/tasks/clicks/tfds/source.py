"""Any data set of TensorFlow Datasets, read once into a store; needs no TensorFlow.

It must lie prepared on the disk, as array_record, with one row a record. Features are single
values, encoded as a table's columns are (`experiments.tasks.clicks.tabular.kinds`), so that files
and tables with the same columns can be scored. The label is 0 or 1. Numbers (integers, floats; NaN
is missing) become numeric columns, through ``sign(x) * log1p(|x|)``; class labels (negative is
missing), booleans and texts (empty is missing) become categories, hashed into tables whose sizes
are those of the classes, or given. Nothing is learned from the rows.

Anything else (images, sequences, nested features) is refused by name, unless it is left out by
name. Splits are those of `experiments.tasks.tfds`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.encoding import ColumnError
from experiments.tasks.clicks.schema import Schema, default_buckets
from experiments.tasks.clicks.store import Columns, Store, empty_columns
from experiments.tasks.clicks.tabular.format import BUCKETS, TableFormat
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.splits import RANDOM
from experiments.tasks.tfds import (
    SPLITS,
    SourceError,
    check_features,
    features_of,
    label_of,
    open_prepared,
    parts_of,
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
    schema, numbered = _schema(builder, label, leave_out, text_buckets, tuple(classes))
    read = functools.partial(_encoded, builder, TableFormat(schema, hash_seed), numbered)
    with StoreWriter(out, schema, hash_seed=hash_seed) as writer:
        for part, rows in parts_of(builder, read):
            writer.append(rows, part)
            if progress is not None:
                progress(writer.num_rows)
        for part in SPLITS:  # a part without rows is a part
            writer.append(empty_columns(schema, 0), part)
        source = {"format": "tfds", "name": builder.info.full_name}
        return writer.finish(splits=RANDOM.ranges(writer.sizes), source=source)


def _schema(
    builder: Any,
    label: str | None,
    leave_out: Collection[str],
    text_buckets: int,
    labels: tuple[str, ...],
) -> tuple[Schema, list[str]]:
    """Return the columns of rows, and those that are numbers of classes: a negative is missing."""
    import tensorflow_datasets as tfds

    info, features = builder.info, features_of(builder)
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
            f"{info.full_name} has features that are not single numbers, classes or texts: "
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
    return schema, classes


def _encoded(
    builder: Any, format: TableFormat, numbered: Collection[str], split: str
) -> Iterator[Columns]:
    """Yield the columns of rows that are a record each."""
    done, label = 0, format.schema.label
    for records in records_of(builder, split, ROWS_PER_READ):
        wanted = [label, *format.features]
        batch = {name: pa.array([record[name] for record in records]) for name in wanted}
        for name in numbered:
            negative = pc.less(batch[name], 0)
            batch[name] = pc.if_else(negative, pa.scalar(None, batch[name].type), batch[name])
        try:
            yield format.columns_of(batch, label)
        except ColumnError as error:
            row = "" if error.row is None else f", record {done + error.row}"
            where = f"{builder.info.full_name}, split {split}{row}, feature {error.column}"
            raise SourceError(f"{where}: {error.problem}") from None
        done += len(records)
