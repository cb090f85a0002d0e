"""Prepared data sets of TensorFlow Datasets, read as array_record without TensorFlow.

The split "train" trains; "validation" and "test" keep their meaning. If one of the two is missing,
the other's rows are halved at random; if both are, "train" is split 80/10/10 at random. Other
splits are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from experiments.tasks.splits import SPLITS, ColumnError, Columns, random_halves, random_split

ROWS_PER_READ = 2048


class SourceError(ValueError):
    """Unreadable data set: one line with its name, the reason and the remedy."""


class DataSet:
    """Data set on the disk.

    Args:
      name: Name of the data set, or the directory of one version.
      data_dir: Folder of the data sets; by default TensorFlow Datasets' own.
      label: Feature to predict; by default the data set's own, or "label".

    Attributes:
      name: Name with configuration and version.
      features: Features by name, sorted.

    Raises:
      SourceError: If there is no such data set, or it lacks the label.
    """

    def __init__(
        self, name: str, data_dir: str | os.PathLike[str] | None = None, label: str | None = None
    ) -> None:
        import tensorflow_datasets as tfds

        self._builder = _open(name, data_dir)
        info = self._builder.info
        if not isinstance(info.features, tfds.features.FeaturesDict):
            raise SourceError(f"{info.full_name} has no named features")
        self.name, self.features = info.full_name, dict(sorted(info.features.items()))
        supervised: Any = info.supervised_keys
        self.label = label or (str(supervised[1]) if supervised else "label")
        self.check_features([self.label])

    def check_features(self, names: Collection[str]) -> None:
        """Raises SourceError unless the data set has all these features."""
        for name in names:
            if name not in self.features:
                raise SourceError(
                    f"{self.name} has no feature {name!a}; it has {', '.join(self.features)}"
                )

    def parts(
        self, decode: Callable[[list[dict[str, Any]]], Columns]
    ) -> Iterator[tuple[str, Columns]]:
        """Yields (split, rows) blocks; missing splits are filled.

        Args:
          decode: Function (records) -> columns of consecutive records, "label" included; raises
            ColumnError for an invalid record.

        Raises:
          SourceError: If a record is missing or invalid; the message names record and feature.
        """
        available = self._builder.info.splits
        named = [split for split in ("validation", "test") if split in available]
        for split in filter(available.__contains__, SPLITS):
            row = 0
            for records in self._records(split):
                try:
                    columns = decode(records)
                except ColumnError as error:
                    record = "" if error.row is None else f", record {row + error.row}"
                    location = f"{self.name}, split {split}{record}, feature {error.column}"
                    raise SourceError(f"{location}: {error.problem}") from None
                if split == "train":
                    blocks = {split: columns} if named else random_split(columns, row)
                else:
                    complete = len(named) == 2
                    blocks = {split: columns} if complete else random_halves(columns, row)
                yield from blocks.items()
                row += len(records)

    def _records(self, split: str) -> Iterator[list[dict[str, Any]]]:
        from array_record.python.array_record_module import ArrayRecordReader

        shards = self._builder.info.splits[split]
        for path, expected in zip(shards.filepaths, shards.shard_lengths, strict=True):
            try:
                count = ArrayRecordReader(os.fspath(path)).num_records()
            except (RuntimeError, ValueError) as error:
                raise SourceError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
            if count != expected:
                raise SourceError(
                    f"{path} has {count:,} records, but {self.name} declares {expected:,}; build "
                    "the data set again"
                )
        source = self._builder.as_data_source(split=split)
        for begin in range(0, len(source), ROWS_PER_READ):
            yield source.__getitems__(range(begin, min(begin + ROWS_PER_READ, len(source))))


def _open(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Returns the builder of a data set with a split "train", as array_record."""
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
            f"{name} is stored as {builder.info.file_format.value} in {builder.data_dir}, and only "
            "array_record can be read without TensorFlow; build it with "
            "file_format='array_record'"
        )
    if "train" not in builder.info.splits:
        raise SourceError(f"{name} has no split 'train'; it has {', '.join(builder.info.splits)}")
    return builder
