"""Stores written by a pipeline, bit for bit as a single process writes them.

Workers parse ranges of the files into pieces, and the process that writes the store reads the
pieces in order. Several workers may start the same task, and each may die at any moment. Every
attempt writes into a new folder and renames it when it is complete; the content depends on the
range alone. So a piece is complete or absent, however often and by whichever worker it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks.clicks.encoding import EMPTY, Format
from experiments.tasks.clicks.store import Store, StoreError, columns_of, map_column
from experiments.tasks.clicks.writer import WORK, StoreWriter, numbered, one_line_errors
from experiments.tasks.splits import Columns, blocks_of
from experiments.tasks.streams import RANGE_BYTES, DataError, Span, paths_of, spans_of

NAMED = 10
"""Largest number of faults in an error message."""
BLOCK_ROWS = 1 << 18
"""Rows copied at a time."""
RECORD = "piece.json"
"""File of a piece's number of rows, and of its first fault."""
USERS = "users.json"
"""File of the names of a piece's users, in the order of their numbers in the piece."""


class FaultyFiles(ValueError):
    """Files with a fault each: one line that names the first ones.

    Attributes:
        faults: First fault of each faulty file.
    """

    def __init__(self, faults: Sequence[DataError]) -> None:
        suffix = f"; and {len(faults) - NAMED:,} more" * (len(faults) > NAMED)
        named = "; ".join(map(str, faults[:NAMED]))
        count = f"{len(faults):,} file{'s' * (len(faults) != 1)}"
        super().__init__(f"no store was written: {count} cannot be read: {named}{suffix}")
        self.faults = tuple(faults)


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    format: Format,
    carry_out: Callable[[StoreWork], None],
    *,
    range_bytes: int = RANGE_BYTES,
) -> Store:
    """Writes raw files, one after the other, as a store.

    All workers must see the files and `out` under the same paths.

    Args:
        sources: Paths of the files.
        out: Store to create; whole in the end, or absent.
        format: Format of the files.
        carry_out: Function that runs the work, such as `Runner.write_store`.
        range_bytes: Size of a task in bytes; the store does not depend on it.

    Raises:
        FaultyFiles: If files do not have the format.
        DataError: If a file cannot be read.
        StoreError: If `out` exists, or cannot be written.
        PipelineError: If the pipeline failed; the command may be run again.
    """
    paths = [path.absolute() for path in paths_of(sources)]
    for path in paths:
        format.open(path)  # refused before any work is done
    writer = StoreWriter(out, format.schema, hash_seed=format.hash_seed)
    # Workers of a run that died may go on for a while: they have a folder of their own.
    folder = writer.path.absolute() / f"{WORK}{secrets.token_hex(8)}"
    spans = spans_of(paths, range_bytes if format.layouts else None)
    work = StoreWork(format, folder, tuple(spans))
    return writer.write(_blocks(work, carry_out, writer.out), format.split, format.source(paths))


def _blocks(
    work: StoreWork, carry_out: Callable[[StoreWork], None], out: Path
) -> Iterator[Columns]:
    """Runs the work, and yields the rows of its pieces in order."""
    with one_line_errors(out):
        work.folder.mkdir()
        carry_out(work)
        pieces = [work.piece(span) for span in work.ranges]
    if faults := list(_faults(pieces)):
        raise FaultyFiles(faults)
    for piece in pieces:
        yield from blocks_of(work.columns(piece), BLOCK_ROWS)
        shutil.rmtree(work.folder / piece.span.name, ignore_errors=True)
    with one_line_errors(out):
        shutil.rmtree(work.folder)


@dataclass(frozen=True)
class Piece:
    """Rows of a span."""

    span: Span
    rows: int
    """Number of rows; of those before the fault, if it has one."""
    fault: dict[str, Any] | None = None
    """First fault: problem, line (counted in the span), row and column."""


@dataclass(frozen=True)
class StoreWork:
    """Work of a store: parse every span, in any order and any number of times."""

    format: Format
    folder: Path
    """Folder of the pieces, within the unfinished store."""
    ranges: tuple[Span, ...]

    def parse(self, span: Span) -> None:
        """Parses one span, and writes its columns and a record."""
        rows, fault, users = 0, None, dict[bytes, int]()
        attempt = self.folder / f".{span.name}.{secrets.token_hex(8)}"
        attempt.mkdir(mode=0o700)
        try:
            with contextlib.ExitStack() as stack:
                names = columns_of(self.format.schema)
                files = {
                    name: stack.enter_context(open(attempt / name, "xb"))
                    for name in (*names, RECORD, USERS)
                }
                try:
                    opened = self.format.open(Path(span.path), span=span)
                    for block in self.format.encoded(opened):
                        rows += len(block["label"])
                        if "user" in names:
                            block["user"] = numbered(block["user"], users)
                        for name in names:
                            files[name].write(np.ascontiguousarray(block[name]).data)
                except DataError as error:
                    terms = "problem", "line", "row", "column"
                    fault = {name: getattr(error, name) for name in terms}
                files[RECORD].write(json.dumps({"rows": rows, "fault": fault}).encode())
                files[USERS].write(json.dumps([user.decode("latin-1") for user in users]).encode())
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
            try:
                os.rename(attempt, self.folder / span.name)
            except OSError:
                if not (self.folder / span.name).is_dir():  # of another attempt
                    raise
        finally:
            shutil.rmtree(attempt, ignore_errors=True)

    def piece(self, span: Span) -> Piece:
        """Returns the piece of a span.

        Raises:
            StoreError: If the piece was not written.
        """
        try:
            record = json.loads((self.folder / span.name / RECORD).read_text())
        except FileNotFoundError:
            raise StoreError(
                f"the pipeline ended without writing {span.name}; run the command again"
            ) from None
        return Piece(span, **record)

    def columns(self, piece: Piece) -> Columns:
        """Returns the memory-mapped columns of a piece, with users' names.

        Raises:
            StoreError: If a file is missing or truncated.
        """
        folder = self.folder / piece.span.name
        columns = {
            name: map_column(folder / name, dtype, piece.rows)
            for name, dtype in columns_of(self.format.schema).items()
        }
        if "user" in columns:
            names = [name.encode("latin-1") for name in json.loads((folder / USERS).read_text())]
            columns["user"] = np.array(names, object)[columns["user"]]
        return columns


def _faults(pieces: Sequence[Piece]) -> Iterator[DataError]:
    """Yields the first fault of each file; `pieces` are in the order of their spans."""
    lines, faulty = 0, -1
    for piece in pieces:
        lines = lines if piece.span.index else 0
        if piece.fault and piece.span.file != faulty:
            faulty = piece.span.file
            line = piece.fault["line"]
            yield DataError(Path(piece.span.path), **piece.fault | {"line": line and line + lines})
        lines += piece.rows
    if faulty < 0 and not any(piece.rows for piece in pieces):
        yield DataError(Path(pieces[0].span.path), EMPTY)
