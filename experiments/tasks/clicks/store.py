"""Store of labelled rows: one raw array per split and column, and a manifest with checksums.

Columns, rows first: "label" [n], in the dtype of the schema's target; "integers" float32[n, I],
transformed, 0 where missing; "integers_missing" bool[n, I]; "categories" int32[n, C], hashed ids, 0
where missing (see `experiments.tasks.clicks.schema`); "user" int32[n], if a column names users:
their numbers, from 0 in the order of their first rows, the same in all splits. The file
``train.label`` holds the labels of the training rows, and nothing else.

A store is written into the sibling folder ``.NAME.partial`` and renamed when all its files are on
the disk: it is whole, or absent. A process that dies leaves that folder, unlocked; the next one
that writes the same store replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpsgd.files import fsync_folder, parse_json
from dpsgd.runs.records import build, checked, to_json
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.splits import (
    SPLITS,
    Columns,
    Split,
    chronological_split,
    random_masks,
    taken,
)

FORMAT = "dpsgd-columns"
VERSION = 3
MANIFEST = "manifest.json"
WORK = "work-"
"""Prefix of folders in an unfinished store."""


class StoreError(ValueError):
    """Store that cannot be written or read: one line with path, reason and remedy."""


def columns_of(schema: Schema) -> dict[str, tuple[np.dtype, int | None]]:
    """Returns each column's dtype and width; None for a vector."""
    return {
        "label": (np.dtype(schema.target.dtype), None),
        "integers": (np.dtype("<f4"), len(schema.integers)),
        "integers_missing": (np.dtype(bool), len(schema.integers)),
        "categories": (np.dtype("<i4"), len(schema.categories)),
        **({"user": (np.dtype("<i4"), None)} if schema.user else {}),
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
        name: np.empty(_shape(rows, width), dtype)
        for name, (dtype, width) in columns_of(schema).items()
    }


def map_column(path: Path, dtype: np.dtype, width: int | None, rows: int) -> np.ndarray:
    """Returns a column of a raw file, read-only and memory-mapped.

    Raises:
        StoreError: If the file is missing or has another size.
    """
    shape = _shape(rows, width)
    expected = rows * row_bytes(dtype, width)
    try:
        size = path.stat().st_size
        if size != expected:
            raise StoreError(f"{path} has {size:,} bytes, expected {expected:,}")
        if expected:
            return np.asarray(np.memmap(path, dtype, "r", shape=shape))
        with open(path, "rb"):
            return np.empty(shape, dtype)
    except FileNotFoundError:
        raise StoreError(f"{path.parent} is incomplete: {path.name} is missing") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None


def row_bytes(dtype: np.dtype, width: int | None) -> int:
    """Returns the size of one row of a column, in bytes.

    Args:
        dtype: Dtype of the column.
        width: Values of a row; None for a vector.
    """
    return dtype.itemsize * math.prod(_shape(1, width))


def _shape(rows: int, width: int | None) -> tuple[int, ...]:
    return (rows,) if width is None else (rows, width)


# --- Reading -------------------------------------------------------------------------------------


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
            column: map_column(self.path / f"{split}.{column}", dtype, width, rows)
            for column, (dtype, width) in columns_of(self.schema).items()
        }

    def blocks(self, split: str, rows: int = 1 << 16) -> Iterator[Columns]:
        """Yields the columns of a split in blocks, memory-mapped.

        Args:
            split: Name of the split.
            rows: Number of rows of a block; the last block has the remainder.
        """
        columns = self.load(split)
        for begin in range(0, self.rows(split), rows):
            yield taken(columns, slice(begin, begin + rows))

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


# --- Writing -------------------------------------------------------------------------------------


class StoreWriter:
    """Writes a store in constant memory: a context that leaves a complete store or nothing.

    Args:
        out: Path of the store to create.
        schema: Columns of the rows.
        hash_seed: Public seed of the hash of categories.

    Attributes:
        path: Folder of the unfinished store.
        rows: Number of rows of each split.

    Raises:
        StoreError: If `out` exists, another process is writing it, or the disk is full.
    """

    def __init__(self, out: str | os.PathLike[str], schema: Schema, *, hash_seed: int) -> None:
        self.out, self.schema, self.hash_seed = Path(out), schema, hash_seed
        self.path = self.out.parent / f".{self.out.name}.partial"
        self.rows = dict.fromkeys(SPLITS, 0)
        self._files: dict[str, IO[bytes]] = {}
        self._lock: int | None = None

    def __enter__(self) -> StoreWriter:
        refuse_existing(self.out)
        with one_line_errors(self.out), contextlib.ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_directory(self.path)
            stack.callback(self._unlock)
            for file in self.path.iterdir():  # left by a run that died
                if file.name.startswith(WORK) and file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
                elif file.name in {MANIFEST, *file_names(self.schema)}:
                    file.unlink()
                else:
                    raise StoreError(f"{file} does not belong to a store; remove it")
            stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files.values():
            file.close()
        if self._lock is not None:  # not finished
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    @property
    def num_rows(self) -> int:
        """Number of rows of all splits."""
        return sum(self.rows.values())

    def write(
        self,
        blocks: Iterable[Columns],
        split: Split,
        source: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Writes blocks of rows and returns the store.

        Args:
            blocks: Columns of consecutive rows; users by their names, bytes.
            split: Split of the rows.
            source: Origin of the rows, or a function that returns it when all rows are written.
            progress: Function of the number of rows done, called after every block.

        Raises:
            StoreError: If the store exists, or cannot be written.
        """
        users: dict[bytes, int] = {}
        with self:
            for block in blocks:
                places = split.places(self.num_rows, len(block["label"]))
                if self.schema.user:  # a user's name alone decides for all of the user's rows
                    from experiments.tasks.clicks.kinds import hashes_of  # only here Arrow

                    places = dict(random_masks(hashes_of(block["user"]), split.fractions))
                    block = {**block, "user": numbered(block["user"], users)}
                for name, rows in places.items():
                    self.append(taken(block, rows), name)
                if progress is not None:
                    progress(self.num_rows)
            if split.order == "chronological":
                self.divide(chronological_split(self.num_rows, split.fractions))
            return self.complete(source() if callable(source) else source)

    def append(self, columns: Columns, split: str) -> None:
        """Adds rows to a split, in order.

        Raises:
            ValueError: If a column is absent or has another dtype or shape.
            StoreError: If they cannot be written.
        """
        rows = len(columns["label"])
        for name, (dtype, width) in columns_of(self.schema).items():
            shape, values = _shape(rows, width), columns[name]
            if values.shape != shape or values.dtype != dtype:
                raise ValueError(
                    f"column {name} must be {dtype} {shape}, got {values.dtype} {values.shape}"
                )
        with one_line_errors(self.out, lambda: self.num_rows):
            for column in columns_of(self.schema):
                name = f"{split}.{column}"
                if name not in self._files:
                    self._files[name] = open(self.path / name, "xb", buffering=0)  # noqa: SIM115
                data = np.ascontiguousarray(columns[column]).reshape(-1).view(np.uint8).data
                while len(data):  # an unbuffered write may take less than it was given
                    data = data[self._files[name].write(data) :]
        self.rows[split] += rows

    def divide(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Moves the last training rows to the other splits.

        Args:
            ranges: Consecutive ranges of the rows, "train" first.
        """
        columns = columns_of(self.schema).items()
        rows = {
            name: map_column(self.path / f"train.{name}", *kind, self.rows["train"])
            for name, kind in columns
        }
        for split in SPLITS[1:]:
            begin, stop = ranges[split]
            for first in range(begin, stop, 1 << 16):
                self.append(taken(rows, slice(first, min(first + (1 << 16), stop))), split)
        self.rows["train"] = ranges["train"][1]
        for name, (dtype, width) in columns:
            size = self.rows["train"] * row_bytes(dtype, width)
            os.truncate(self.path / f"train.{name}", size)

    def complete(self, source: Mapping[str, Any]) -> Store:
        """Writes the manifest, renames the folder and opens the store.

        Raises:
            StoreError: If a split has no rows, or the disk is full.
        """
        if empty := [name for name, count in self.rows.items() if not count]:
            raise StoreError(
                f"{self.out} would have no {' and no '.join(empty)} rows of {self.num_rows:,}; "
                "give more rows, or other fractions (--split); nothing was written"
            )
        digests = {}
        with one_line_errors(self.out, lambda: self.num_rows):
            for name in file_names(self.schema):
                with open(self.path / name, "rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
                    os.fsync(file.fileno())
            manifest = Manifest(self.schema, self.hash_seed, self.rows, source, digests)
            record = {"format": FORMAT, "version": VERSION, **to_json(manifest)}
            with open(self.path / MANIFEST, "wb") as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            fsync_folder(self.path)
            os.rename(self.path, self.out)
            self._unlock()
            fsync_folder(self.out.parent)
        return Store.open(self.out)


def numbered(users: np.ndarray, numbers: dict[bytes, int]) -> np.ndarray:
    """Returns the number of each row's user, int32[rows].

    Args:
        users: Name of each row's user: [rows].
        numbers: Number of each user so far, to which new users are added; some 200 bytes each.

    >>> numbered(np.array([b"ann", b"bob", b"ann"], object), {b"bob": 0})
    array([1, 0, 1], dtype=int32)
    """
    ids = (numbers.setdefault(user, len(numbers)) for user in users)
    return np.fromiter(ids, np.int32, len(users))


@contextlib.contextmanager
def one_line_errors(out: Path, rows: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Converts an OSError into a StoreError of one line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = "the disk is full" if full else error.strerror
        raise StoreError(
            f"{out} cannot be written: {why} (after {rows():,} rows); nothing was kept"
        ) from None


def refuse_existing(out: Path) -> None:
    """Raises StoreError if anything exists at `out`."""
    if os.path.lexists(out):
        raise StoreError(f"{out} exists already; remove it or choose another name")


def _lock_directory(path: Path) -> int:
    """Locks `path` for this process and returns the descriptor that holds the lock.

    The kernel drops the lock when the process ends, however it ends: a directory that can be
    locked is one that no process is writing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been finished, and renamed, between the opening and the locking.
        if not (path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))):
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(f"another process is writing {path}; wait for it to end") from None
    return descriptor
