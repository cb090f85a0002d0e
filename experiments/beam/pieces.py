"""Pieces of a store: what one worker makes of one byte range, in a folder of its own.

A task may be begun by several workers, and may die at any moment. Each attempt writes into a folder
of its own, and gives it its name when all is written; what it holds depends on the range alone. So
a piece is whole or absent, and it does not matter how often, or by whom, it was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.tasks.clicks.raw.files import ByteRange, DataError, Lines
from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.store import columns_of
from experiments.tasks.clicks.tabular.format import TableFormat

FAULTS = "faults"
"""Name of the file of what is wrong with a range."""


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


AnyFormat = RawFormat | TableFormat
"""How files are read, and how their rows are split; pickled, and sent to every worker."""


def write_piece(span: ByteRange, format: AnyFormat, folder: Path) -> Piece:
    """Write the piece of a range into `folder`, where others write theirs, and return it."""
    rows, faults, lines = 0, 0, Lines()
    own = folder / f".{span.name}.{secrets.token_hex(8)}"
    own.mkdir(mode=0o700)
    names = columns_of(format.schema)
    try:
        with contextlib.ExitStack() as stack:
            files = {n: stack.enter_context(open(own / n, "xb")) for n in (*names, FAULTS)}
            for found in _found(span, format, lines):
                if isinstance(found, DataError):
                    terms = "problem", "line", "row", "column"
                    record = {name: getattr(found, name) for name in terms}
                    files[FAULTS].write(json.dumps(record).encode() + b"\n")
                    faults += 1
                else:
                    rows += len(found["label"])
                    for name in names:
                        files[name].write(np.ascontiguousarray(found[name]).data)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        try:
            os.rename(own, folder / span.name)
        except OSError:
            if not (folder / span.name).is_dir():  # of another attempt
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return Piece(span, rows, lines.count, lines.blank, faults)


def _found(span: ByteRange, format: AnyFormat, lines: Lines) -> Iterator[dict | DataError]:
    try:
        yield from format.read_range(span, lines)
    except DataError as error:  # the file's fault, wherever it is
        yield error


def all_faults(pieces: Sequence[Piece], format: AnyFormat, folder: Path) -> Iterator[DataError]:
    """Yield all that is wrong with files, in their order; `pieces` are in the order of ranges."""
    rows_of = dict.fromkeys((piece.span.file for piece in pieces), 0)
    for piece in pieces:
        rows_of[piece.span.file] += piece.rows
    faulty = {piece.span.file for piece in pieces if piece.faults}
    last = {piece.span.file: piece.span.index for piece in pieces if piece.lines > piece.blank}
    lines = 0
    for piece in pieces:
        span, path = piece.span, Path(piece.span.path)
        lines = lines if span.index else 0
        if not span.index and span.file not in faulty:
            error = format.no_rows(path, rows_of[span.file], sum(rows_of.values()))
            if error is not None:
                yield error
        if piece.faults:
            with open(folder / span.name / FAULTS, "rb") as file:
                for terms in map(json.loads, file):
                    terms["line"] = terms["line"] and terms["line"] + lines
                    yield DataError(path, terms.pop("problem"), **terms)
        lines += piece.lines
        if piece.blank and span.index < last.get(span.file, 0):
            assert isinstance(format, RawFormat)  # the rows of tables are no lines
            for line in range(lines - piece.blank, lines):
                yield DataError(path, format.blank, line=line + 1)
