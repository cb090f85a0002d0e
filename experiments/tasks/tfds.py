"""Prepared data sets of TensorFlow Datasets, read as array_record without TensorFlow.

Of the splits, "train" trains, "validation" and "test" are what they are called; where one of the
two is wanting, the rows of the other are halved at random, and where both are, "train" is split
80/10/10 at random. Rows of other splits are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.tasks.splits import Columns, random_halves, random_split

SPLITS = ("train", "validation", "test")


class SourceError(ValueError):
    """A data set that cannot be read: one line that says which, why and what to do."""


def parts_of(
    builder: Any, read: Callable[[str], Iterable[Columns]]
) -> Iterator[tuple[str, Columns]]:
    """Yield blocks of rows, which `read` yields of each split, with the parts to which they go."""
    splits = builder.info.splits
    held = [split for split in ("validation", "test") if split in splits]
    for split in filter(splits.__contains__, SPLITS):
        done = 0
        for columns in read(split):
            if split == "train":
                yield from ([(split, columns)] if held else random_split(columns, done).items())
            elif len(held) == 2:
                yield split, columns
            else:
                yield from random_halves(columns, done).items()
            done += len(columns["label"])


def open_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Return the builder of a data set that lies prepared on the disk as array_record."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    try:
        if Path(name).is_dir():
            builder = tfds.builder_from_directory(name)
        else:  # by its code, the library would leave a folder behind, and may need TensorFlow
            builder = read_only_builder.builder_from_files(name, data_dir=data_dir)
    # DatasetNotFoundError is a ValueError; a version that does not exist is an AssertionError.
    except (ValueError, OSError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise SourceError(f"{name} cannot be opened as a TensorFlow data set: {first}") from None
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
    """Yield the records of `split` in order, some at a time; all of them, or a SourceError."""
    from array_record.python.array_record_module import ArrayRecordReader

    shards = builder.info.splits[split]
    for path, promised in zip(shards.filepaths, shards.shard_lengths, strict=True):
        try:
            found = ArrayRecordReader(os.fspath(path)).num_records()
        except (RuntimeError, ValueError) as error:
            raise SourceError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        if found != promised:
            raise SourceError(
                f"{path} has {found:,} records, and {promised:,} by the account of "
                f"{builder.info.full_name}: build it again"
            )
    source = builder.as_data_source(split=split)
    for begin in range(0, len(source), at_once):
        yield source.__getitems__(range(begin, min(begin + at_once, len(source))))


def features_of(builder: Any) -> dict[str, Any]:
    """Return the features of a data set by name, sorted: its file holds them in any order."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    if not isinstance(features, tfds.features.FeaturesDict):
        raise SourceError(f"{builder.info.full_name} has no named features")
    return dict(sorted(features.items()))


def label_of(builder: Any, label: str | None = None) -> str:
    """Return the feature to predict: `label`, or what the data set says, or "label"."""
    if label is not None:
        return label
    supervised: Any = builder.info.supervised_keys
    return str(supervised[1]) if supervised else "label"


def check_features(builder: Any, names: Collection[str]) -> None:
    """Raise SourceError unless the data set has features of all these names."""
    features = features_of(builder)
    for name in names:
        if name not in features:
            raise SourceError(
                f"{builder.info.full_name} has no feature {name!a}; it has {', '.join(features)}"
            )
