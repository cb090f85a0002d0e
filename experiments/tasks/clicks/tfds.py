"""Prepared data sets of TensorFlow Datasets as stores, without TensorFlow.

Features are single values, encoded like a table's columns (`experiments.tasks.clicks.kinds`), so
that files and tables with the same columns can be scored. Numbers become numeric columns; class
labels (negative is missing), booleans and texts become categories, hashed into tables of the
classes' sizes, or of given ones. Other features are refused by name unless they are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.formats import BUCKETS, table_format
from experiments.tasks.clicks.schema import Schema, default_buckets
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.splits import Columns
from experiments.tasks.tfds import DataSet, SourceError


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
    data_set = DataSet(name, data_dir, label)
    data_set.check_features(leave_out)
    schema, numbered = _schema(data_set, leave_out, text_buckets, tuple(classes))
    format = table_format(schema, hash_seed)

    def decode(records: list[dict[str, Any]]) -> Columns:
        names = [format.label, *format.features]
        batch = {name: pa.array([record[name] for record in records]) for name in names}
        for name in numbered:
            negative = pc.less(batch[name], 0)
            batch[name] = pc.if_else(negative, pa.scalar(None, batch[name].type), batch[name])
        return format.columns_of(batch, format.label)

    with StoreWriter(out, schema, hash_seed=hash_seed) as writer:
        for split, rows in data_set.parts(decode):
            writer.append(rows, split)
            if progress is not None:
                progress(writer.num_rows)
        return writer.complete({"format": "tfds", "name": data_set.name})


def _schema(
    data_set: DataSet, leave_out: Collection[str], text_buckets: int, labels: tuple[str, ...]
) -> tuple[Schema, list[str]]:
    """Returns the schema, and the features that are class labels."""
    import tensorflow_datasets as tfds

    numbers, buckets, unsupported, classes = [], {}, [], []
    for feature, kind in data_set.features.items():
        if feature == data_set.label or feature in leave_out:
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
            f"{data_set.name} has features that are not single numbers, classes or texts: "
            f"{', '.join(unsupported)}; leave them out by --leave-out"
        )
    schema = Schema(
        name=f"tfds:{data_set.name.partition('/')[0]}",
        integers=tuple(numbers),
        categories=tuple(buckets),
        buckets=tuple(buckets.values()),
        label=data_set.label,
        classes=labels,
    )
    return schema, classes
