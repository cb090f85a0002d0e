"""Pieces of a store: what one worker makes of one byte range, in files of its own.

A task may be begun by several workers, and may die at any moment. Each attempt writes under names
that are its own, and gives its files their names when all are whole; what they hold depends on the
range alone. So a piece is whole or absent, and it does not matter how often, or by whom, it was
written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from dpsgd.files import SECRET
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.raw.format import RawFormat, RawReader
from experiments.tasks.clicks.raw.ranges import ByteRange, byte_ranges, whole_files
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns, columns_of
from experiments.tasks.clicks.tabular.format import EMPTY, TableFormat
from experiments.tasks.clicks.writer import Order

FAULTS = "faults"
"""Ends the name of the file of what is wrong with a range."""


@dataclass(frozen=True)
class Piece:
    """What a range came to.

    Attributes:
        span: The range.
        rows: Its rows; those before the first fault, if it has one.
        lines: Its lines, where it is one of lines.
        blank: The blank lines that it ends in: they are faults if a row follows in the file.
        faults: How much is wrong with it.
    """

    span: ByteRange
    rows: int
    lines: int
    blank: int
    faults: int


class Source(ABC):
    """Files that are read by ranges; pickled, and sent to every worker."""

    format: RawFormat | TableFormat
    hash_seed: int
    """Public seed of the hash of categorical values."""
    order: Order
    """How rows are split."""
    fractions: tuple[float, float, float]
    """Of the rows that train, validate and test."""

    @property
    def schema(self) -> Schema:
        """The columns that rows become."""
        return self.format.schema

    @abstractmethod
    def ranges(self, paths: Sequence[Path], range_bytes: int) -> list[ByteRange]:
        """Return the tasks into which files are cut."""

    @abstractmethod
    def read(self, span: ByteRange, piece: PieceWriter) -> None:
        """Read a range into a piece, with the faults of its rows."""

    @abstractmethod
    def empty(self, path: Path, rows: int, all_rows: int) -> DataError | None:
        """Return what is wrong with a file of so many rows, of so many in all files."""


class PieceWriter:
    """Writes the files of one piece; a context that leaves all of them or none."""

    def __init__(self, folder: Path, span: ByteRange, schema: Schema) -> None:
        self.rows = self.lines = self.blank = self.faults = 0
        self._folder, self._name, self._span = folder, span.name, span
        self._attempt = secrets.token_hex(8)
        self._columns = columns_of(schema)
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> PieceWriter:
        try:
            for name in self._columns:
                self._open(name)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self._abandon()
            return
        for file in self._files.values():
            with file:
                file.flush()
                os.fsync(file.fileno())
        for name in self._files:
            os.replace(self._own(name), self._folder / piece_file(self._name, name))

    def append(self, columns: Columns) -> None:
        """Add rows."""
        self.rows += len(columns["label"])
        for name in self._columns:
            self._files[name].write(np.ascontiguousarray(columns[name]).data)

    def fault(self, error: DataError) -> None:
        """Add what is wrong; lines are counted in the range."""
        if FAULTS not in self._files:
            self._open(FAULTS)
        record = {name: getattr(error, name) for name in ("problem", "line", "row", "column")}
        self._files[FAULTS].write(json.dumps(record).encode() + b"\n")
        self.faults += 1

    def result(self) -> Piece:
        """Return what the range came to."""
        return Piece(self._span, self.rows, self.lines, self.blank, self.faults)

    def _own(self, name: str) -> Path:
        return self._folder / f".{piece_file(self._name, name)}.{self._attempt}"

    def _open(self, name: str) -> None:
        descriptor = os.open(self._own(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET)
        self._files[name] = os.fdopen(descriptor, "wb")

    def _abandon(self) -> None:
        for name, file in self._files.items():
            file.close()
            with contextlib.suppress(FileNotFoundError):
                self._own(name).unlink()


def piece_file(piece: str, column: str) -> str:
    """Return the name of a file of a piece."""
    return f"{piece}.{column}"


def write_piece(span: ByteRange, source: Source, folder: Path) -> Piece:
    """Write the piece of a range into `folder`, where others write theirs, and return it."""
    with PieceWriter(folder, span, source.schema) as piece:
        try:
            source.read(span, piece)
        except DataError as error:  # the file's fault, wherever it is
            piece.fault(error)
    return piece.result()


def faults_of(piece: Piece, folder: Path, lines_before: int) -> Iterator[DataError]:
    """Yield what is wrong with a range, its lines counted from the beginning of the file."""
    if not piece.faults:
        return
    with open(folder / piece_file(piece.span.name, FAULTS), "rb") as file:
        for text in file:
            record = json.loads(text)
            line = record["line"] and record["line"] + lines_before
            problem = record["problem"]
            path = Path(piece.span.path)
            yield DataError(path, problem, line=line, row=record["row"], column=record["column"])


@dataclass(frozen=True)
class RawSource(Source):
    """Raw files of tab-separated lines, cut wherever a line may begin."""

    format: RawFormat
    hash_seed: int
    fractions: tuple[float, float, float]

    @property
    def order(self) -> Order:  # type: ignore[override]
        """As this data set is split."""
        return self.format.split

    def ranges(self, paths: Sequence[Path], range_bytes: int) -> list[ByteRange]:
        """Return byte ranges."""
        return byte_ranges(paths, range_bytes)

    def read(self, span: ByteRange, piece: PieceWriter) -> None:
        """Parse the lines of a range block by block, and name every one that is no row."""
        reader = RawReader(self.format, span, self.hash_seed)
        try:
            for found in reader:
                if isinstance(found, DataError):
                    piece.fault(found)
                else:
                    piece.append(found)
        finally:
            piece.lines, piece.blank = reader.lines, reader.blank

    def empty(self, path: Path, rows: int, all_rows: int) -> DataError | None:
        """Each file has rows."""
        return None if rows else DataError(path, self.format.empty)


@dataclass(frozen=True)
class TableSource(Source):
    """Tables in files, each of which is read as a whole: a line end may stand within a field."""

    format: TableFormat
    hash_seed: int
    order: Order
    fractions: tuple[float, float, float]

    def ranges(self, paths: Sequence[Path], range_bytes: int) -> list[ByteRange]:
        """Return one range a file."""
        return whole_files(paths)

    def read(self, span: ByteRange, piece: PieceWriter) -> None:
        """Encode the rows of a file, up to the first fault."""
        for block in self.format.blocks(self.format.open(Path(span.path)), self.hash_seed):
            piece.append(block)

    def empty(self, path: Path, rows: int, all_rows: int) -> DataError | None:
        """Some file has rows."""
        return None if all_rows else DataError(path, EMPTY)


def all_faults(pieces: Sequence[Piece], source: Source, folder: Path) -> Iterator[DataError]:
    """Yield all that is wrong with files, in their order; `pieces` are in the order of ranges."""
    rows_of = dict.fromkeys((piece.span.file for piece in pieces), 0)
    faulty = {piece.span.file for piece in pieces if piece.faults}
    last_rows = {piece.span.file: piece.span.index for piece in pieces if _has_rows(piece)}
    for piece in pieces:
        rows_of[piece.span.file] += piece.rows
    lines = 0
    for piece in pieces:
        span, path = piece.span, Path(piece.span.path)
        lines = lines if span.index else 0
        if not span.index and span.file not in faulty:
            error = source.empty(path, rows_of[span.file], sum(rows_of.values()))
            if error is not None:
                yield error
        yield from faults_of(piece, folder, lines)
        lines += piece.lines
        if piece.blank and span.index < last_rows.get(span.file, 0):
            assert isinstance(source, RawSource)  # the rows of tables are no lines
            for line in range(lines - piece.blank, lines):
                yield DataError(path, source.format.blank, line=line + 1)


def _has_rows(piece: Piece) -> bool:
    """Whether there is any line that is not blank."""
    return piece.lines > piece.blank
