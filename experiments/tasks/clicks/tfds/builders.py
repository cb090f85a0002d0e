"""Criteo's data sets for TensorFlow Datasets, without TensorFlow: blocks of rows in array_record.

    from experiments.tasks.clicks.tfds.builders import CriteoDisplayBlocks
    CriteoDisplayBlocks(data_dir=DATA).download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=FOLDER_OF_THE_RAW_FILE)
    )

A record is 4,096 rows (the last of a split has fewer) in the columns of a store, hashed with seed
0: "label", "integers", "integers_missing" and "categories"; the metadata hold the schema. One row a
record would take hours and gigabytes more for as many rows as these, and give back the same.
(The data set *criteo* that comes with TensorFlow Datasets is another one: uplift modelling.)
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.store import Store, columns_of

ROWS_PER_RECORD = 4096


class LocalInfo(tfds.core.DatasetInfo):
    """What is known of a data set that no public bucket holds."""

    def initialize_from_bucket(self) -> None:
        """Look for nothing there, and leave no folder for what would be found."""


class _Blocks(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Builds what `prepare` makes of a raw file, split by split."""

    VERSION = tfds.core.Version("1.0.0")
    FORMAT: ClassVar[RawFormat]

    def __init__(self, *, file_format: Any = "array_record", **kwargs: Any) -> None:
        wanted = tfds.core.FileFormat.ARRAY_RECORD
        if tfds.core.FileFormat.from_value(file_format) != wanted:
            raise ValueError(
                f"file_format must be array_record, not {file_format}: the others need TensorFlow, "
                "and parquet loses rows without a word"
            )
        super().__init__(file_format=wanted, **kwargs)

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Build the data set, by way of a store that lies beside it for so long."""
        root = Path(self.data_dir).parents[1]
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".store-", dir=root) as folder:
            self._store = Path(folder) / "store"
            super().download_and_prepare(*args, **kwargs)

    def _info(self) -> LocalInfo:
        schema = self.FORMAT.schema
        return LocalInfo(
            builder=self,
            description=self.__doc__,
            disable_shuffling=True,  # the order of the rows is that of the raw file
            metadata=tfds.core.MetadataDict(
                {"schema": dataclasses.asdict(schema), "hash_seed": self.FORMAT.hash_seed}
            ),
            features=tfds.features.FeaturesDict(
                {
                    name: tfds.features.Tensor(
                        shape=(None,) if width is None else (None, width),
                        dtype=dtype,
                        encoding=tfds.features.Encoding.BYTES,
                    )
                    for name, (dtype, width) in columns_of(schema).items()
                    if width != 0  # which TensorFlow Datasets writes and cannot read
                }
            ),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        store = self.FORMAT.prepare(
            _raw_file(Path(dl_manager.manual_dir), self.FORMAT.file_name), self._store
        )
        # TensorFlow Datasets refuses splits without rows.
        return {
            name: self._generate_examples(store, name)
            for name, (begin, end) in store.splits.items()
            if begin < end
        }

    def _generate_examples(self, store: Store, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, block in enumerate(store.blocks(split, ROWS_PER_RECORD)):
            yield key, {name: column for name, column in block.items() if column.size}


def _raw_file(folder: Path, name: str) -> Path:
    """Return the raw file in `folder`, plain or gzip."""
    found = [folder / file for file in (name, f"{name}.gz") if (folder / file).is_file()]
    if len(found) != 1:
        what = "both" if found else "neither"
        raise DataError(folder, f"expected {name} or {name}.gz in it, and found {what}")
    return found[0]


class CriteoDisplayBlocks(_Blocks):
    """Criteo Display Ads: 46M displays, clicked or not; chronological 80/10/10, hashed, blocks."""

    FORMAT = display.FORMAT
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put train.txt or train.txt.gz into manual_dir."


class CriteoSearchBlocks(_Blocks):
    """Criteo Sponsored Search: 16M clicks, sale or none; random 80/10/10, hashed, blocks.

    Without SalesAmountInEuro, time_delay_for_conversion and product_price, which tell the answer.
    """

    FORMAT = search.FORMAT
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put CriteoSearchData or CriteoSearchData.gz into manual_dir."
