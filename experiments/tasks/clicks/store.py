"""Store of labelled rows: one raw array per split and column, and a manifest with checksums.

Columns, rows first: "label" [n], in the dtype of the schema's target; "integers" float32[n, I],
transformed, 0 where missing; "integers_missing" bool[n, I]; "categories" int32[n, C], hashed ids, 0
where missing (see `experiments.tasks.clicks.schema`); "user" int32[n], if a column names users:
their numbers, from 0 in the order of their first rows, the same in all splits. The file
``train.label`` holds the labels of the training rows, and nothing else.

`experiments.tasks.clicks.writer` writes a store: it is whole, or absent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.files import parse_json
from dpsgd.runs.records import build, checked
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.splits import SPLITS, Columns, blocks_of

FORMAT = "dpsgd-columns"
VERSION = 3
MANIFEST = "manifest.json"


class StoreError(ValueError):
    """Store that cannot be written or read: one line with path, reason and remedy."""


def columns_of(schema: Schema) -> dict[str, np.dtype]:
    """Returns the dtype of a row of each column; its shape is () for a vector."""
    return {
        "label": np.dtype(schema.target.dtype),
        "integers": np.dtype(("<f4", (len(schema.integers),))),
        "integers_missing": np.dtype((bool, (len(schema.integers),))),
        "categories": np.dtype(("<i4", (len(schema.categories),))),
        **({"user": np.dtype("<i4")} if schema.user else {}),
    }


def file_names(schema: Schema) -> list[str]:
    """Returns the names of a store's files, SPLIT.COLUMN.

    >>> from experiments.tasks.clicks.schema import DISPLAY_ADS
    >>> file_names(DISPLAY_ADS)[:2]
    ['train.label', 'train.integers']
    """
    return [f"{split}.{column}" for split in SPLITS for column in columns_of(schema)]


def empty_columns(schema: Schema, rows: int) -> Columns:
    """Returns uninitialised columns of a store."""
    return {
        name: np.empty((rows, *dtype.shape), dtype.base)
        for name, dtype in columns_of(schema).items()
    }


def map_column(path: Path, dtype: np.dtype, rows: int) -> np.ndarray:
    """Returns a column of a raw file, read-only and memory-mapped.

    Args:
        path: Raw file.
        dtype: Dtype of a row.
        rows: Number of rows.

    Raises:
        StoreError: If the file is missing or has another size.
    """
    shape, expected = (rows, *dtype.shape), rows * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            raise StoreError(f"{path} has {size:,} bytes, expected {expected:,}")
        if expected:
            return np.asarray(np.memmap(path, dtype.base, "r", shape=shape))
        with open(path, "rb"):
            return np.empty(shape, dtype.base)
    except FileNotFoundError:
        raise StoreError(f"{path.parent} is incomplete: {path.name} is missing") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Manifest:
    """Record of a store, its ``manifest.json``.

    Raises:
        ValueError: If a split or a checksum is missing.
    """

    schema: Schema
    """Columns of the rows."""
    hash_seed: int
    """Public seed of the hash of categories."""
    splits: Mapping[str, int]
    """Number of rows of "train", "validation" and "test"."""
    source: Mapping[str, Any]
    """Origin of the rows, as its writer describes it."""
    sha256: Mapping[str, str]
    """Checksum of each file."""

    def __post_init__(self) -> None:
        if set(self.splits) != set(SPLITS) or min(self.splits.values()) < 0:
            raise ValueError(f"splits: {', '.join(SPLITS)} each need a row count of at least 0")
        if missing := {*file_names(self.schema)} - {*self.sha256}:
            raise ValueError(f"sha256: {min(missing)} is missing")


@dataclass(frozen=True)
class Store(Manifest):
    """Store opened for reading by `Store.open(path)`.

    Two stores with the same digest and intact files hold the same rows.
    """

    path: Path
    digest: str
    """SHA-256 of the manifest, which holds the checksums of all files."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Opens the store in directory `path`.

        Raises:
            StoreError: If there is no store of this version, or a file is missing or truncated.
        """
        path = Path(path)
        try:
            text = (path / MANIFEST).read_bytes()
            record = checked(parse_json(text), dict[str, Any], "it")
            if (format := record.pop("format", None)) != FORMAT:
                raise ValueError(f"its format is {format!a:.20}, not {FORMAT}")
            if (version := record.pop("version", None)) != VERSION:
                raise StoreError(
                    f"{path} is a store of version {version!a:.20}, but this program reads version "
                    f"{VERSION}; prepare the data again"
                )
            manifest = build(Manifest, record, MANIFEST)
        except FileNotFoundError:
            flaw = "has no manifest.json" if path.is_dir() else "does not exist"
            raise StoreError(f"{path} is not a store: it {flaw}; run `dpsgd prepare`") from None
        except NotADirectoryError:
            raise StoreError(
                f"{path} is a file, not a store; convert it by `dpsgd prepare`"
            ) from None
        except OSError as error:
            raise StoreError(f"{path} is not a readable store: {error.strerror}") from None
        except StoreError:
            raise
        except ValueError as error:
            raise StoreError(f"{path} has a damaged {MANIFEST}: {error}") from None
        store = cls(**vars(manifest), path=path, digest=hashlib.sha256(text).hexdigest())
        for split in SPLITS:
            store._mapped(split)
        return store

    @property
    def num_rows(self) -> int:
        """Number of rows of all splits."""
        return sum(self.splits.values())

    def rows(self, split: str) -> int:
        """Returns the number of rows of `split`.

        Raises:
            StoreError: If there is no such split.
        """
        if split not in self.splits:
            raise StoreError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    def load(self, split: str) -> Columns:
        """Returns the columns of `split` but the user, read-only and memory-mapped.

        Raises:
            StoreError: If there is no such split, or a file is missing or truncated.
        """
        return {name: column for name, column in self._mapped(split).items() if name != "user"}

    def users(self, split: str) -> np.ndarray:
        """Returns the number of each row's user, int32[rows].

        Raises:
            StoreError: If the store has no user column.
        """
        if not self.schema.user:
            raise StoreError(
                f"{self.path} has no user column; prepare the table with --user COLUMN"
            )
        return self._mapped(split)["user"]

    def _mapped(self, split: str) -> Columns:
        rows = self.rows(split)
        return {
            column: map_column(self.path / f"{split}.{column}", dtype, rows)
            for column, dtype in columns_of(self.schema).items()
        }

    def blocks(self, split: str, rows: int = 1 << 16) -> Iterator[Columns]:
        """Returns the columns of a split in blocks, memory-mapped.

        Args:
            split: Name of the split.
            rows: Number of rows of a block; the last block has the remainder.
        """
        return blocks_of(self.load(split), rows)

    def verify(self) -> None:
        """Compares the checksum of every file with the manifest's.

        Raises:
            StoreError: For the first file that was changed since it was written.
        """
        for name in file_names(self.schema):
            with open(self.path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256[name]:
                    raise StoreError(
                        f"{self.path / name} was changed: its checksum differs from the "
                        "manifest's; prepare the data again"
                    )

    def schema_mismatch(self, schema: Schema, hash_seed: int) -> str | None:
        """Returns the difference from a model's columns, or None.

        Args:
            schema: Columns that the model reads.
            hash_seed: Hash seed of the model.
        """
        if self.schema.name != schema.name:
            return f"holds rows of {self.schema.name}, not of {schema.name}"
        stored, expected = ({*s.integers, *s.categories} for s in (self.schema, schema))
        if stored != expected:
            changed = sorted(stored ^ expected)
            text = f"{', '.join(changed[:5])}{', ...' * (len(changed) > 5)}"
            return f"was prepared with other columns ({text})"
        stored_fields, fields = vars(self.schema), vars(schema)
        # No feature depends on bounds or users.
        unread = "bounds", "user"
        if changed := [x for x in fields if stored_fields[x] != fields[x] and x not in unread]:
            return f"was prepared with other {', '.join(changed)}"
        if self.hash_seed != hash_seed:
            return (
                f"was prepared with hash seed {self.hash_seed}, not {hash_seed} (see --hash-seed)"
            )
        return None
