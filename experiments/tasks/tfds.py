"""Prepared data sets of TensorFlow Datasets, read as array_record without TensorFlow.

The split "train" trains; "validation" and "test" keep their meaning. If one of the two is missing,
the other's rows are halved at random; if both are, "train" is split 80/10/10 at random. Other
splits are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.tasks.splits import SPLITS, Columns, random_halves, random_split


class SourceError(ValueError):
    """Unreadable data set: one line with its name, the reason and the remedy."""


def parts_of(
    builder: Any, read: Callable[[str], Iterable[Columns]]
) -> Iterator[tuple[str, Columns]]:
    """Yields (split, rows) blocks of a data set, its splits completed.

    Args:
      builder: Builder of the data set.
      read: Function of a split's name that yields its blocks of rows.
    """
    splits = builder.info.splits
    named = [split for split in ("validation", "test") if split in splits]
    for split in filter(splits.__contains__, SPLITS):
        row = 0
        for columns in read(split):
            if split == "train":
                yield from ([(split, columns)] if named else random_split(columns, row).items())
            elif len(named) == 2:
                yield split, columns
            else:
                yield from random_halves(columns, row).items()
            row += len(columns["label"])


def open_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Returns the builder of a data set prepared on disk as array_record."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    try:
        if Path(name).is_dir():
            builder = tfds.builder_from_directory(name)
        else:  # by its code, the library would leave a folder behind, and may need TensorFlow
            builder = read_only_builder.builder_from_files(name, data_dir=data_dir)
    # DatasetNotFoundError is a ValueError; a version that does not exist is an AssertionError.
    except (ValueError, OSError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(f"{name} cannot be opened as a TensorFlow data set: {reason}") from None
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise SourceError(
            f"{name} lies as {builder.info.file_format.value} in {builder.data_dir}, and only "
            "array_record is read without TensorFlow and without loss: build it with "
            "file_format='array_record'"
        )
    if "train" not in builder.info.splits:
        raise SourceError(f"{name} has no split train; it has {', '.join(builder.info.splits)}")
    return builder


def records_of(builder: Any, split: str, at_once: int) -> Iterator[list[dict[str, Any]]]:
    """Yields a split's records in order, `at_once` at a time.

    Raises SourceError unless all records are there.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    shards = builder.info.splits[split]
    for path, expected in zip(shards.filepaths, shards.shard_lengths, strict=True):
        try:
            count = ArrayRecordReader(os.fspath(path)).num_records()
        except (RuntimeError, ValueError) as error:
            raise SourceError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        if count != expected:
            raise SourceError(
                f"{path} has {count:,} records, and {expected:,} by the account of "
                f"{builder.info.full_name}: build it again"
            )
    source = builder.as_data_source(split=split)
    for begin in range(0, len(source), at_once):
        yield source.__getitems__(range(begin, min(begin + at_once, len(source))))


def features_of(builder: Any) -> dict[str, Any]:
    """Returns the features of a data set by name, sorted."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    if not isinstance(features, tfds.features.FeaturesDict):
        raise SourceError(f"{builder.info.full_name} has no named features")
    return dict(sorted(features.items()))


def label_of(builder: Any, label: str | None = None) -> str:
    """Returns the feature to predict: `label`, the data set's, or "label"."""
    if label is not None:
        return label
    supervised: Any = builder.info.supervised_keys
    return str(supervised[1]) if supervised else "label"


def check_features(builder: Any, names: Collection[str]) -> None:
    """Raises SourceError unless the data set has all these features."""
    features = features_of(builder)
    for name in names:
        if name not in features:
            raise SourceError(
                f"{builder.info.full_name} has no feature {name!a}; it has {', '.join(features)}"
            )
