"""From pieces to the files of a store: the very files that one process would have written."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.beam.pieces import AnyFormat, Piece
from experiments.tasks.clicks.raw.files import ByteRange
from experiments.tasks.clicks.store import Splits, StoreError, columns_of
from experiments.tasks.clicks.writer import ROWS_PER_SHARD, ColumnFile, shard_file
from experiments.tasks.splits import Split

BLOCK_ROWS = 1 << 18


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one part of the store, which lie in one piece of `rows` rows.

    The piece begins with row `first_row` of the data set. The rows are those from `begin` to `end`
    of the part, counted in the piece.
    """

    piece: str
    rows: int
    first_row: int
    begin: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """One shard of a store: shard `number` of `part`, and where its rows come from."""

    part: str
    number: int
    rows: int
    segments: tuple[Segment, ...]


def _places(split: Split, first_row: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield which of some rows from `first_row` on lie in which part, counted from 0."""
    for begin in range(0, rows, BLOCK_ROWS):
        numbers = np.arange(begin, min(begin + BLOCK_ROWS, rows))
        places = split.places(first_row + begin, len(numbers))
        yield {part: numbers[own] for part, own in places.items()}


def in_order(pieces: Sequence[Piece], ranges: Sequence[ByteRange]) -> list[Piece]:
    """Return the pieces in the order of their ranges: one of each, or a StoreError."""
    found = sorted(pieces, key=lambda piece: piece.span)
    if [piece.span for piece in found] != sorted(ranges):
        raise StoreError(
            f"the runner returned {len(found):,} ranges of {len(ranges):,}, or one of them twice: "
            "no store was made of them"
        )
    return found


def lay_out(
    pieces: Sequence[Piece], split: Split, rows_per_shard: int = ROWS_PER_SHARD
) -> tuple[Splits, list[ShardLayout]]:
    """Return the splits and the shards of the rows of pieces without fault, in order.

    A row's number is that of the rows before it: rows are not counted before they are parsed.
    """
    segments: dict[str, list[Segment]] = {part: [] for part in split.parts}
    first_row = 0
    for piece in pieces:
        counts = dict.fromkeys(segments, 0)
        for places in _places(split, first_row, piece.rows):
            counts = {part: counts[part] + len(own) for part, own in places.items()}
        for part, count in counts.items():
            if count:
                whole = Segment(piece.span.name, piece.rows, first_row, 0, count)
                segments[part].append(whole)
        first_row += piece.rows
    shards = [x for part, own in segments.items() for x in _shards(part, own, rows_per_shard)]
    sizes = {part: sum(x.end - x.begin for x in own) for part, own in segments.items()}
    return split.ranges(sizes), shards


def _shards(part: str, segments: Sequence[Segment], most: int) -> Iterator[ShardLayout]:
    """Cut the rows of a part into shards of `most` rows, of which the last may have fewer."""
    number, rows, held = 0, 0, []
    for segment in segments:
        begin = segment.begin
        while begin < segment.end:
            end = min(segment.end, begin + most - rows)
            held.append(Segment(segment.piece, segment.rows, segment.first_row, begin, end))
            rows, begin = rows + end - begin, end
            if rows == most:
                yield ShardLayout(part, number, rows, tuple(held))
                number, rows, held = number + 1, 0, []
    if held:
        yield ShardLayout(part, number, rows, tuple(held))


def write_column(shard: ShardLayout, column: str, format: AnyFormat, folder: Path) -> None:
    """Write one column of a shard into `folder`, and then its SHA-256 beside it.

    Whole or absent, and the same however often it is written, as a piece is.

    Raises:
        StoreError: a piece has not the rows that it had.
    """
    dtype, width = columns_of(format.schema)[column]
    name = shard_file(shard.part, shard.number, column)
    own = folder / f".{name}.{secrets.token_hex(8)}"
    file = ColumnFile(own, dtype, width)
    try:
        for segment in shard.segments:
            rows = _rows_of(folder / segment.piece / column, dtype, width, segment.rows)
            done = 0
            for places in _places(format.split, segment.first_row, segment.rows):
                found = rows[places[shard.part]]
                file.append(found[max(segment.begin - done, 0) : max(segment.end - done, 0)])
                done += len(found)
                if done >= segment.end:
                    break
        digest = file.finish(shard.rows)
        os.replace(own, folder / name)
    finally:
        file.abandon()
        own.unlink(missing_ok=True)
    write_text(folder / f"{name}.sha256", digest)


def _rows_of(path: Path, dtype: np.dtype, width: int | None, rows: int) -> np.ndarray:
    shape = (rows,) if width is None else (rows, width)
    if path.stat().st_size != dtype.itemsize * math.prod(shape):
        raise StoreError(f"{path} has not the {rows:,} rows that were parsed: it is damaged")
    # A file without bytes, as of a schema without such features, cannot be mapped.
    return np.memmap(path, dtype, "r", shape=shape) if math.prod(shape) else np.empty(shape, dtype)


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or absent, also where several write it at once."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    own.write_text(text)
    os.replace(own, path)
