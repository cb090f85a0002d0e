"""Pieces of a store: the rows that one worker reads from one span of a file.

A task may be begun by several workers, and may die at any moment. Each attempt writes into a folder
of its own, and names it when all is written; its content depends on the span alone. So a piece is
whole or absent, however often, and by whomever, it was written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks.clicks.files import DataError, Span
from experiments.tasks.clicks.formats import EMPTY, Format
from experiments.tasks.clicks.store import columns_of


@dataclass(frozen=True)
class Piece:
    """Outcome of a span."""

    span: Span
    rows: int
    """Number of rows; of those before the fault, if it has one."""
    fault: dict[str, Any] | None = None
    """Arguments of the first fault's `DataError`, its line counted in the span."""


def write_piece(span: Span, format: Format, folder: Path) -> Piece:
    """Writes the piece of a span into a folder of its own under `folder`."""
    rows, path, fault = 0, Path(span.path), None
    own = folder / f".{span.name}.{secrets.token_hex(8)}"
    own.mkdir(mode=0o700)
    try:
        with contextlib.ExitStack() as stack:
            names = columns_of(format.schema)
            files = {n: stack.enter_context(open(own / n, "xb")) for n in names}
            try:
                for block in format.encoded(format.open(path, span=span)):
                    rows += len(block["label"])
                    for name, file in files.items():
                        file.write(np.ascontiguousarray(block[name]).data)
            except DataError as error:
                terms = "problem", "line", "row", "column"
                fault = {name: getattr(error, name) for name in terms}
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
    return Piece(span, rows, fault)


def faults_of(pieces: Sequence[Piece]) -> Iterator[DataError]:
    """Yields the first fault of each file; `pieces` are in the order of their spans."""
    lines, faulty = 0, -1
    for piece in pieces:
        span = piece.span
        lines = lines if span.index else 0
        if piece.fault and span.file != faulty:
            faulty = span.file
            terms = dict(piece.fault)
            terms["line"] = terms["line"] and terms["line"] + lines
            yield DataError(Path(span.path), terms.pop("problem"), **terms)
        lines += piece.rows
    if pieces and faulty < 0 and not any(piece.rows for piece in pieces):
        yield DataError(Path(pieces[0].span.path), EMPTY)
