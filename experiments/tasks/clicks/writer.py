"""Write a columnar store block by block.

Whole or absent. A store is written into the sibling directory ``.NAME.partial``, each file is
flushed to the disk, the manifest comes last, and one rename gives it its name. A run that dies
leaves that directory, unlocked; the next run on the same name recognises and replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpsgd.files import fsync_folder
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import (
    FORMAT,
    INTEGER_TRANSFORMS,
    MANIFEST,
    VERSION,
    Columns,
    Splits,
    Store,
    StoreError,
    columns_of,
)
from experiments.tasks.splits import Split, taken

WORK = "work-"
"""Begins the name of a folder in which many workers write what becomes the files of a store."""

ROWS_PER_SHARD = 1 << 26
"""So large that data sets of up to 67M rows are one shard, which every split reads with no copy."""


class PartialStore:
    """The directory of a store under way: a context that leaves a whole store or nothing.

    Attributes:
        out: The store to be.
        path: Where its files are written meanwhile.

    Raises:
        StoreError: `out` exists; another process is writing it; or the disk is full.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.path = self.out.parent / f".{self.out.name}.partial"
        self._lock: int | None = None

    def __enter__(self) -> Any:
        refuse_existing(self.out)
        with one_line_errors(self.out), contextlib.ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_directory(self.path)
            stack.callback(self._unlock)
            for file in self.path.iterdir():  # left by a run that died
                if file.name.startswith(WORK) and file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
                elif file.name != MANIFEST and file.suffix != ".npy":
                    raise StoreError(f"{file} is in the way; remove it")
                else:
                    file.unlink()
            stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock is not None:  # not finished
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def complete(
        self,
        schema: Schema,
        *,
        hash_seed: int,
        splits: Splits,
        source: Mapping[str, Any],
        shards: Sequence[Mapping[str, Any]],
    ) -> Store:
        """Write the manifest, give the store its name and return it.

        `shards` are {"rows": rows, "files": {column: {"name": name, "sha256": digest}}}.
        """
        num_rows = sum(shard["rows"] for shard in shards)
        if empty := [name for name, (begin, end) in splits.items() if begin == end]:
            raise StoreError(
                f"{self.out} would have no {' and no '.join(empty)} rows, of {num_rows:,} in all: "
                "give more rows, or other fractions (--split); nothing was left behind"
            )
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "schema": asdict(schema),
            "hash_seed": hash_seed,
            "integer_transform": INTEGER_TRANSFORMS[schema.transform],
            "num_rows": num_rows,
            "splits": dict(splits),
            "source": dict(source),
            "shards": list(shards),
        }
        with one_line_errors(self.out, lambda: num_rows):
            with open(self.path / MANIFEST, "wb") as file:
                file.write(json.dumps(manifest, indent=1).encode() + b"\n")
                _flush_to_disk(file)
            fsync_folder(self.path)
            os.rename(self.path, self.out)
            self._unlock()
            fsync_folder(self.out.parent)
        return Store.open(self.out)


class StoreWriter(PartialStore):
    """Writes one store, block by block; a context that leaves a whole store or nothing.

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
        super().__init__(out)
        self.schema, self.hash_seed = schema, hash_seed
        self._rows_per_shard = rows_per_shard
        self._parts: dict[str, _Part] = {}

    @property
    def num_rows(self) -> int:
        """Rows appended so far."""
        return sum(part.rows for part in self._parts.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The rows of each part: parts follow one another as they were first named."""
        return {name: part.rows for name, part in self._parts.items()}

    def __exit__(self, *exc_info: object) -> None:
        for part in self._parts.values():
            for file in part.files.values():
                file.abandon()
        super().__exit__(*exc_info)

    def append(self, columns: Columns, part: str = "") -> None:
        """Add rows: the columns of a store, with any number of rows.

        The rows of one `part` lie together, in the order in which they came, whatever came between
        them; so rows that come mixed can be kept apart, in constant memory.

        Raises:
            ValueError: a column is absent or has another dtype or shape.
            StoreError: they cannot be written.
        """
        rows = len(columns["label"])
        for name, (dtype, width) in columns_of(self.schema).items():
            shape, found = _shape(rows, width), columns[name]
            if found.shape != shape or found.dtype != dtype:
                raise ValueError(
                    f"column {name} must be {dtype} {shape}, not {found.dtype} {found.shape}"
                )
        with one_line_errors(self.out, lambda: self.num_rows):
            own, done = self._parts.setdefault(part, _Part()), 0
            while done < rows:
                self._begin_shard(part)
                step = min(rows - done, self._rows_per_shard - own.shard_rows)
                for name, file in own.files.items():
                    file.append(columns[name][done : done + step])
                done, own.rows = done + step, own.rows + step
                own.shard_rows += step
                if own.shard_rows == self._rows_per_shard:
                    own.end_shard()

    def finish(self, *, splits: Splits, source: Mapping[str, Any]) -> Store:
        """Give the store its name and return it; `source` (JSON) says where the rows are from."""
        with one_line_errors(self.out, lambda: self.num_rows):
            if self.num_rows == 0:
                self._begin_shard("")
            for part in self._parts.values():
                part.end_shard()
        return self.complete(
            self.schema,
            hash_seed=self.hash_seed,
            splits=splits,
            source=source,
            shards=[shard for part in self._parts.values() for shard in part.shards],
        )

    def _begin_shard(self, name: str) -> None:
        """Open the files of a shard of the part `name`, if none are open."""
        part = self._parts.setdefault(name, _Part())
        if not part.files:
            for column, (dtype, width) in columns_of(self.schema).items():
                file = self.path / shard_file(name, len(part.shards), column)
                part.files[column] = ColumnFile(file, dtype, width)


def write_blocks(
    out: str | os.PathLike[str],
    schema: Schema,
    blocks: Iterable[Columns],
    split: Split,
    *,
    source: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    hash_seed: int = 0,
    rows_per_shard: int = ROWS_PER_SHARD,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Write blocks of consecutive rows as a new store, which is whole in the end, or absent.

    Memory is that of one block. `source` says where the rows are from, at once or when all are
    written. `progress` is called with the number of rows done, after every block.

    Raises:
        StoreError: `out` exists, or cannot be written.
    """
    with StoreWriter(out, schema, hash_seed=hash_seed, rows_per_shard=rows_per_shard) as writer:
        for block in blocks:
            for part, rows in split.places(writer.num_rows, len(block["label"])).items():
                writer.append(taken(block, rows), part)
            if progress is not None:
                progress(writer.num_rows)
        said = source() if callable(source) else source
        return writer.finish(splits=split.ranges(writer.sizes), source=said)


@dataclass
class _Part:
    """Rows that lie together: a series of shards, of which the last may be open."""

    rows: int = 0
    shard_rows: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, ColumnFile] = field(default_factory=dict)

    def end_shard(self) -> None:
        """End the open shard, if there is one."""
        if self.files:
            files = {
                name: {"name": file.path.name, "sha256": file.finish(self.shard_rows)}
                for name, file in self.files.items()
            }
            self.shards.append({"rows": self.shard_rows, "files": files})
            self.files, self.shard_rows = {}, 0


def shard_file(part: str, number: int, column: str) -> str:
    """Return the name of a file: which rows it holds depends on their order alone.

    >>> shard_file("", 0, "label"), shard_file("test", 3, "label")
    ('00000.label.npy', 'test.00003.label.npy')
    """
    return f"{part}{'.' * bool(part)}{number:05d}.{column}.npy"


class ColumnFile:
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
        buffer, descr = io.BytesIO(), np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": _shape(rows, self._width)}
        np.lib.format.write_array_header_1_0(buffer, header)
        return buffer.getvalue()


def _shape(rows: int, width: int | None) -> tuple[int, ...]:
    return (rows,) if width is None else (rows, width)


@contextmanager
def one_line_errors(out: Path, rows: Callable[[], int] = lambda: 0) -> Iterator[None]:
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


def _lock_directory(path: Path) -> int:
    """Lock `path` for this process and return the descriptor that holds the lock.

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
