"""Writer of stores: a store is complete, or absent.

It is written into the sibling folder ``.NAME.partial``, which is renamed when all files are on the
disk. A process that dies leaves that folder, unlocked; the next one that writes the same store
replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from dpsgd.files import fsync_folder, lock
from dpsgd.runs.records import to_json
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import (
    FORMAT,
    MANIFEST,
    VERSION,
    Manifest,
    Store,
    StoreError,
    columns_of,
    file_names,
    map_column,
)
from experiments.tasks.hashes import hashed
from experiments.tasks.splits import (
    SPLITS,
    Columns,
    Split,
    blocks_of,
    chronological_split,
    random_masks,
    taken,
)

WORK = "work-"
"""Prefix of folders in an unfinished store."""


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
                    names = hashed(pa.array(block["user"], pa.binary()))
                    places = dict(random_masks(names, split.fractions))
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
        for name, dtype in columns_of(self.schema).items():
            expected, values = (dtype.base, (rows, *dtype.shape)), columns[name]
            if (values.dtype, values.shape) != expected:
                raise ValueError(
                    f"column {name} must be {expected[0]} {expected[1]}, got {values.dtype} "
                    f"{values.shape}"
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
            name: map_column(self.path / f"train.{name}", dtype, self.rows["train"])
            for name, dtype in columns
        }
        for split in SPLITS[1:]:
            for block in blocks_of(taken(rows, slice(*ranges[split])), 1 << 16):
                self.append(block, split)
        self.rows["train"] = ranges["train"][1]
        for name, dtype in columns:
            os.truncate(self.path / f"train.{name}", self.rows["train"] * dtype.itemsize)

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
        lock(descriptor, path)
        # It may have been finished, and renamed, between the opening and the locking.
        if not (path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))):
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(f"another process is writing {path}; wait for it to end") from None
    return descriptor
