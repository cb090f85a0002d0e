"""A columnar store of labelled rows: memory-mapped ``.npy`` shards and a ``manifest.json``.

Columns, all with rows first: "label" uint8 [n]; "integers" float32 [n, I], already transformed,
0 where missing; "integers_missing" bool [n, I]; "categories" int32 [n, C], hashed ids, 0 where
missing (see :mod:`experiments.criteo.schema`). A shard is a range of rows, one file per column.

Whole or absent. A store is written into the sibling directory ``.NAME.partial``, each file is
flushed to the disk, the manifest comes last, and one rename gives it its name. A run that dies
leaves that directory, unlocked; the next run on the same name recognises and replaces it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from experiments.criteo.schema import Schema

Columns = dict[str, np.ndarray]
"""Column name to array, all with the same number of rows."""

Splits = Mapping[str, tuple[int, int]]
"""Split name to its range of rows, first (included) and last (excluded)."""

FORMAT = "dpsgd-columns"
VERSION = 1
MANIFEST = "manifest.json"
INTEGER_TRANSFORM = "sign(x) * log1p(abs(x)); missing = 0"
ROWS_PER_SHARD = 1 << 26
"""So large that data sets of up to 67M rows are one shard, which every split reads with no copy."""


class StoreError(ValueError):
    """A store cannot be written or read: one line that says which, why and what to do."""


def columns_of(schema: Schema) -> dict[str, tuple[np.dtype, int | None]]:
    """Return the dtype and the width (None for a vector) of each column of a store of `schema`."""
    return {
        "label": (np.dtype(np.uint8), None),
        "integers": (np.dtype("<f4"), len(schema.integers)),
        "integers_missing": (np.dtype(bool), len(schema.integers)),
        "categories": (np.dtype("<i4"), len(schema.categories)),
    }


def chronological_split(num_rows: int) -> dict[str, tuple[int, int]]:
    """Return the first 80 % of rows as "train", then 10 % "validation", then "test".

    >>> chronological_split(25)
    {'train': (0, 20), 'validation': (20, 22), 'test': (22, 25)}
    """
    first, second = num_rows * 8 // 10, num_rows * 9 // 10
    return {"train": (0, first), "validation": (first, second), "test": (second, num_rows)}


# --- Reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """A whole store, opened for reading; `Store.open(path)` makes one.

    `digest` (SHA-256 of the manifest, which holds the checksums of all shards) names the data:
    two stores with the same digest and intact shards hold the same rows.
    """

    path: Path
    schema: Schema
    num_rows: int
    splits: Splits
    hash_seed: int
    source: Mapping[str, Any]
    digest: str
    shards: tuple[Mapping[str, Any], ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Open the store in directory `path`; every file must be there, with its right size.

        Raises:
            StoreError: no store, a store of another version, or a shard missing or cut.
        """
        path = Path(path)
        try:
            text = (path / MANIFEST).read_bytes()
        except FileNotFoundError:
            what = "has no manifest.json" if path.is_dir() else "does not exist"
            raise StoreError(f"{path} is not a store: it {what}; make one with prepare") from None
        except OSError as error:
            raise StoreError(f"{path} is not a readable store: {error.strerror}") from None
        try:
            manifest = json.loads(text)
            if manifest["format"] != FORMAT:
                raise StoreError(f"{path} is not a store: its manifest has another format")
            if manifest["version"] != VERSION:
                raise StoreError(
                    f"{path} is a store of version {manifest['version']!r}, and this program "
                    f"reads version {VERSION}; prepare the data again"
                )
            schema = manifest["schema"]
            store = cls(
                path=path,
                schema=Schema(
                    name=schema["name"],
                    integers=tuple(schema["integers"]),
                    categories=tuple(schema["categories"]),
                    buckets=tuple(schema["buckets"]),
                ),
                num_rows=int(manifest["num_rows"]),
                splits={k: (int(a), int(b)) for k, (a, b) in manifest["splits"].items()},
                hash_seed=int(manifest["hash_seed"]),
                source=dict(manifest["source"]),
                digest=hashlib.sha256(text).hexdigest(),
                shards=tuple(manifest["shards"]),
            )
            if sum(shard["rows"] for shard in store.shards) != store.num_rows:
                raise ValueError("rows of the shards do not add up")
            for shard in store.shards:
                for column in columns_of(store.schema):
                    store._map(shard, column)
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} has a damaged {MANIFEST} ({error!r})") from None
        return store

    def verify(self) -> None:
        """Compare the checksum of every shard with the manifest's; reads the whole store.

        Raises:
            StoreError: names the first file that was changed since it was written.
        """
        for shard in self.shards:
            for column in columns_of(self.schema):
                data = self._map(shard, column)
                digest = hashlib.sha256()
                for begin in range(0, len(data), 1 << 16):
                    digest.update(np.ascontiguousarray(data[begin : begin + (1 << 16)]).data)
                if digest.hexdigest() != shard["files"][column]["sha256"]:
                    file = self.path / shard["files"][column]["name"]
                    raise StoreError(f"{file} is damaged: its checksum is not the manifest's")

    def load(self, split: str) -> Columns:
        """Return the columns of `split`, read-only.

        Memory-mapped, with no copy, if the split lies in one shard; else joined in memory.

        Raises:
            StoreError: there is no such split.
        """
        begin, end = self._range(split)
        parts = self._parts(begin, end) or [(self.shards[0], 0, 0)]
        columns = {}
        for column in columns_of(self.schema):
            arrays = [self._map(shard, column)[a:b] for shard, a, b in parts]
            columns[column] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            columns[column].flags.writeable = False
        return columns

    def blocks(self, split: str, rows: int = 1 << 16) -> Iterator[Columns]:
        """Yield the columns of `split` in order, at most `rows` rows at a time, memory-mapped."""
        begin, end = self._range(split)
        for shard, first, last in self._parts(begin, end):
            arrays = {column: self._map(shard, column) for column in columns_of(self.schema)}
            for a in range(first, last, rows):
                yield {column: x[a : min(a + rows, last)] for column, x in arrays.items()}

    def _range(self, split: str) -> tuple[int, int]:
        if split not in self.splits:
            raise StoreError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    def _parts(self, begin: int, end: int) -> list[tuple[Mapping[str, Any], int, int]]:
        """Return (shard, first row, last row), rows counted in the shard, of a range of rows."""
        parts = []
        offset = 0
        for shard in self.shards:
            a, b = max(begin - offset, 0), min(end - offset, shard["rows"])
            if a < b:
                parts.append((shard, a, b))
            offset += shard["rows"]
        return parts

    def _map(self, shard: Mapping[str, Any], column: str) -> np.ndarray:
        file = self.path / shard["files"][column]["name"]
        dtype, width = columns_of(self.schema)[column]
        shape = (shard["rows"],) if width is None else (shard["rows"], width)
        try:
            array = np.lib.format.open_memmap(file, mode="r")
            surplus = file.stat().st_size - array.offset - array.nbytes
        except FileNotFoundError:
            raise StoreError(f"{self.path} is incomplete: {file.name} is missing") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{file} cannot be read or has the wrong size: {error}") from None
        if surplus:
            raise StoreError(f"{file} has the wrong size: {surplus:,} bytes too many")
        if array.shape != shape or array.dtype != dtype:
            raise StoreError(
                f"{file} has shape {array.shape} and dtype {array.dtype}, "
                f"and its manifest says {shape} and {dtype}"
            )
        return np.asarray(array)


# --- Writing -------------------------------------------------------------------------------------


class StoreWriter:
    """Writes one store, block by block; a context that leaves a whole store or nothing.

    >>> # with StoreWriter(out, schema, hash_seed=0) as writer:
    >>> #     writer.append(columns)                # any number of times
    >>> #     store = writer.finish(splits=chronological_split(writer.num_rows), source={})

    Raises:
        StoreError: `out` exists; another process is writing it; or the disk is full.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        schema: Schema,
        *,
        hash_seed: int,
        rows_per_shard: int = ROWS_PER_SHARD,
    ) -> None:
        self.out = Path(out)
        self.schema = schema
        self.hash_seed = hash_seed
        self.num_rows = 0
        self._rows_per_shard = rows_per_shard
        self._partial = self.out.parent / f".{self.out.name}.partial"
        self._shards: list[dict[str, Any]] = []
        self._files: dict[str, _ColumnFile] = {}
        self._shard_rows = 0
        self._lock: int | None = None

    def __enter__(self) -> StoreWriter:
        refuse_existing(self.out)
        with self._errors():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_directory(self._partial)
            try:
                for file in self._partial.iterdir():  # left by a run that died
                    if file.name != MANIFEST and file.suffix != ".npy":
                        raise StoreError(f"{file} is in the way; remove it")
                    file.unlink()
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.abandon()
        if self._lock is not None:  # not finished
            shutil.rmtree(self._partial, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def append(self, columns: Columns) -> None:
        """Add rows: the columns of a store, with any number of rows.

        Raises:
            ValueError: a column is absent or has another dtype or shape.
            StoreError: they cannot be written.
        """
        rows = len(columns["label"])
        for name, (dtype, width) in columns_of(self.schema).items():
            shape = (rows,) if width is None else (rows, width)
            if columns[name].shape != shape or columns[name].dtype != dtype:
                raise ValueError(
                    f"column {name} must be {dtype} {shape}, "
                    f"not {columns[name].dtype} {columns[name].shape}"
                )
        done = 0
        with self._errors():
            while done < rows:
                if not self._files:
                    self._begin_shard()
                step = min(rows - done, self._rows_per_shard - self._shard_rows)
                for name, file in self._files.items():
                    file.append(columns[name][done : done + step])
                done += step
                self._shard_rows += step
                self.num_rows += step
                if self._shard_rows == self._rows_per_shard:
                    self._end_shard()

    def finish(self, *, splits: Splits, source: Mapping[str, Any]) -> Store:
        """Give the store its name and return it; `source` (JSON) says where the rows are from."""
        with self._errors():
            if self._files or not self._shards:
                if not self._files:
                    self._begin_shard()
                self._end_shard()
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "schema": asdict(self.schema),
                "hash_seed": self.hash_seed,
                "integer_transform": INTEGER_TRANSFORM,
                "num_rows": self.num_rows,
                "splits": dict(splits),
                "source": dict(source),
                "shards": self._shards,
            }
            with open(self._partial / MANIFEST, "wb") as file:
                file.write(json.dumps(manifest, indent=1).encode() + b"\n")
                _flush_to_disk(file)
            _flush_directory(self._partial)
            os.rename(self._partial, self.out)
            self._unlock()
            _flush_directory(self.out.parent)
        return Store.open(self.out)

    def _begin_shard(self) -> None:
        for name, (dtype, width) in columns_of(self.schema).items():
            file = self._partial / f"{len(self._shards):05d}.{name}.npy"
            self._files[name] = _ColumnFile(file, dtype, width)
        self._shard_rows = 0

    def _end_shard(self) -> None:
        files = {
            name: {"name": file.path.name, "sha256": file.finish(self._shard_rows)}
            for name, file in self._files.items()
        }
        self._files = {}
        self._shards.append({"rows": self._shard_rows, "files": files})

    def _errors(self) -> AbstractContextManager[None]:
        return one_line_errors(self.out, lambda: self.num_rows)


class _ColumnFile:
    """One ``.npy`` file written row by row; its header, of fixed length, comes last."""

    def __init__(self, path: Path, dtype: np.dtype, width: int | None) -> None:
        self.path = path
        self._dtype, self._width = dtype, width
        self._digest = hashlib.sha256()
        self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115 - closed in finish
        _write(self._file, b"\0" * len(self._header(0)))  # no reader takes this for an array

    def append(self, rows: np.ndarray) -> None:
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        _write(self._file, data)
        self._digest.update(data)

    def finish(self, rows: int) -> str:
        """Write the header, flush, and return the SHA-256 of the array's bytes."""
        self._file.seek(0)
        _write(self._file, self._header(rows))
        _flush_to_disk(self._file)
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        self._file.close()

    def _header(self, rows: int) -> bytes:
        """Return the ``.npy`` header; NumPy pads it so that its length is the same for all rows."""
        buffer = io.BytesIO()
        shape = (rows,) if self._width is None else (rows, self._width)
        np.lib.format.write_array_header_1_0(
            buffer,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": shape,
            },
        )
        return buffer.getvalue()


@contextmanager
def one_line_errors(out: Path, rows: Callable[[], int]) -> Iterator[None]:
    """Turn an OSError while `out` is written into a StoreError of one line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = "the disk is full" if full else error.strerror
        raise StoreError(
            f"{out} cannot be written: {why} (after {rows():,} rows); nothing was left behind"
        ) from None


def refuse_existing(out: Path) -> None:
    """Raise a StoreError if there is anything at `out`."""
    if os.path.lexists(out):
        raise StoreError(f"{out} exists already; remove it or choose another name")


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of `data`: an unbuffered write may take less than it was given."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_directory(path: Path) -> int:
    """Lock `path` for this process and return the descriptor that holds the lock.

    The kernel drops the lock when the process ends, however it ends: a directory that can be
    locked is one that nobody is writing.
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
