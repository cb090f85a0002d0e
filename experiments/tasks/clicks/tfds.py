"""Prepared data sets of TensorFlow Datasets as stores, without TensorFlow.

A data set lies on the disk as array_record, one row a record. Features are single values, encoded
like a table's columns (`experiments.tasks.clicks.kinds`), so that files and tables with the same
columns can be scored. Numbers become numeric columns; class labels (negative is missing), booleans
and texts become categories, hashed into tables of the classes' sizes, or of given ones. Other
features are refused by name unless they are left out. Splits: see `experiments.tasks.tfds`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.formats import BUCKETS, Format, table_format
from experiments.tasks.clicks.kinds import ColumnError
from experiments.tasks.clicks.schema import Schema, default_buckets
from experiments.tasks.clicks.store import Store, StoreWriter
from experiments.tasks.splits import Columns
from experiments.tasks.tfds import (
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
    """Writes a data set as a new store.

    Args:
        name: Name of the data set, or the directory of one version.
        out: Store to create; whole in the end, or absent.
        data_dir: Folder of the data sets; by default TensorFlow Datasets' own.
        label: Feature to predict; by default the data set's own, or "label".
        leave_out: Features not to read.
        text_buckets: Hash buckets of a text feature, a power of two.
        classes: Values of the label that mean 0, 1, ...; empty for 0 and 1.
        hash_seed: Public seed of the hash of categories.
        progress: Function of the number of rows done, called now and then.

    Raises:
        SourceError: If there is no such data set, or it cannot be read.
        StoreError: If `out` exists, or cannot be written.
    """
    builder = open_prepared(name, data_dir)
    schema, numbered = _schema(builder, label, leave_out, text_buckets, tuple(classes))
    read = functools.partial(_encoded, builder, table_format(schema, hash_seed), numbered)
    with StoreWriter(out, schema, hash_seed=hash_seed) as writer:
        for part, rows in parts_of(builder, read):
            writer.append(rows, part)
            if progress is not None:
                progress(writer.num_rows)
        return writer.complete({"format": "tfds", "name": builder.info.full_name})


def _schema(
    builder: Any,
    label: str | None,
    leave_out: Collection[str],
    text_buckets: int,
    labels: tuple[str, ...],
) -> tuple[Schema, list[str]]:
    """Returns the schema, and the features that are numbers of classes."""
    import tensorflow_datasets as tfds

    info, features = builder.info, features_of(builder)
    label = label_of(builder, label)
    check_features(builder, (label, *leave_out))
    numbers, buckets, unsupported, classes = [], {}, [], []
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
            unsupported.append(f"{feature} ({type(kind).__name__})")
    if unsupported:
        raise SourceError(
            f"{info.full_name} has features that are not single numbers, classes or texts: "
            f"{', '.join(unsupported)}; leave them out by name"
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
    builder: Any, format: Format, numbered: Collection[str], split: str
) -> Iterator[Columns]:
    """Yields the columns of a split's records."""
    done, label = 0, format.label
    for records in records_of(builder, split, ROWS_PER_READ):
        names = [label, *format.features]
        batch = {name: pa.array([record[name] for record in records]) for name in names}
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
