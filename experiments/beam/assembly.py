"""Assembly of a store from its pieces: the very files that one process would have written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.beam.pieces import Piece
from experiments.tasks.clicks.files import Span
from experiments.tasks.clicks.formats import Format
from experiments.tasks.clicks.store import StoreError, columns_of, map_column, row_bytes
from experiments.tasks.splits import SPLITS, Split, chronological_split

BLOCK_ROWS = 1 << 18
DONE = "done"
"""Name of the file that marks an assembled piece."""


@dataclass(frozen=True)
class Placement:
    """Place of a piece's rows in the files of a store."""

    piece: str
    """Name of the piece."""
    rows: int
    first_row: int
    """Index of its first row in the data set."""
    total: int
    """Number of rows of the data set."""
    offsets: tuple[int, ...]
    """Number of rows of each split before it."""


def in_order(pieces: Sequence[Piece], spans: Sequence[Span]) -> list[Piece]:
    """Returns the pieces in the order of their spans: one of each, or a StoreError."""
    ordered = sorted(pieces, key=lambda piece: piece.span)
    if [piece.span for piece in ordered] != sorted(spans):
        raise StoreError(
            f"the runner returned {len(ordered):,} ranges of {len(spans):,}, or one of them twice: "
            "no store was made of them"
        )
    return ordered


def place(pieces: Sequence[Piece], split: Split) -> tuple[dict[str, int], list[Placement]]:
    """Returns the number of rows of each split, and the places of pieces without faults.

    A row's number is the number of rows before it: rows are not counted before they are parsed.
    """
    total, first_row, sizes = sum(piece.rows for piece in pieces), 0, dict.fromkeys(SPLITS, 0)
    placements = []
    for piece in pieces:
        offsets = tuple(sizes.values())
        placement = Placement(piece.span.name, piece.rows, first_row, total, offsets)
        placements.append(placement)
        for rows in _rows_by_split(placement, split):
            sizes = {name: sizes[name] + len(rows[name]) for name in SPLITS}
        first_row += piece.rows
    return sizes, placements


def _rows_by_split(placement: Placement, split: Split) -> Iterator[dict[str, np.ndarray]]:
    """Yields the indices in a piece of each split's rows, block by block."""
    for begin in range(0, placement.rows, BLOCK_ROWS):
        rows = np.arange(begin, min(begin + BLOCK_ROWS, placement.rows))
        if split.order == "chronological":
            numbers = placement.first_row + rows
            ranges = chronological_split(placement.total, split.fractions)
            yield {name: rows[(numbers >= a) & (numbers < b)] for name, (a, b) in ranges.items()}
        else:
            places = split.places(placement.first_row + begin, len(rows))
            yield {name: rows[mask] for name, mask in places.items()}


def write_rows(placement: Placement, format: Format, folder: Path, store: Path) -> None:
    """Writes the rows of a piece into the files of a store, at their places, and marks it done.

    The bytes are the same however often, and by whomever, they are written.

    Raises:
        StoreError: If the piece does not have its rows.
    """
    for column, (dtype, width) in columns_of(format.schema).items():
        path = folder / placement.piece / column
        rows = map_column(path, dtype, width, placement.rows)
        offsets = dict(zip(SPLITS, placement.offsets, strict=True))
        for indices in _rows_by_split(placement, format.split):
            for name in SPLITS:
                with open(store / f"{name}.{column}", "r+b") as file:
                    file.seek(offsets[name] * row_bytes(dtype, width))
                    file.write(np.ascontiguousarray(rows[indices[name]]).data)
                offsets[name] += len(indices[name])
    write_text(folder / placement.piece / DONE, "")


def write_text(path: Path, text: str) -> None:
    """Writes a small file, whole or absent, also if several workers write it at once."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    own.write_text(text)
    os.replace(own, path)
