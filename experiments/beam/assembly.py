"""From pieces to the files of a store: the very files that one process would have written."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.beam.pieces import Piece, Source, piece_file
from experiments.tasks.clicks.raw.ranges import ByteRange
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Splits, StoreError, columns_of
from experiments.tasks.clicks.writer import ROWS_PER_SHARD, ColumnFile, Order, shard_file
from experiments.tasks.splits import chronological_split, random_masks

BLOCK_ROWS = 1 << 18


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one part of the store, which lie in one piece.

    Attributes:
        piece: Its name.
        rows: All rows of the piece.
        first_row: Number of its first row in the data set.
        begin, end: Which rows of the part they are, counted in the piece.
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


@dataclass(frozen=True)
class StoreLayout:
    """Where the rows of all pieces go."""

    num_rows: int
    splits: Splits
    shards: tuple[ShardLayout, ...]


@dataclass(frozen=True)
class Selector:
    """Which rows of the data set a part of the store holds, by their numbers."""

    order: Order
    fractions: tuple[float, float, float]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts, in the order in which they lie in the store."""
        return ("train", "validation", "test") if self.order == "random" else ("",)

    def counts(self, first_row: int, rows: int) -> dict[str, int]:
        """Return how many of `rows` rows from number `first_row` on lie in each part."""
        counts = dict.fromkeys(self.parts, 0)
        if self.order == "chronological":
            return {"": rows}
        for begin, end in _blocks(rows):
            for part, mask in self._masks(first_row + begin, end - begin).items():
                counts[part] += int(np.count_nonzero(mask))
        return counts

    def places(self, part: str, first_row: int, rows: int) -> Iterator[np.ndarray | slice]:
        """Yield which of the rows lie in `part`, ascending, block by block, counted from 0."""
        for begin, end in _blocks(rows):
            if self.order == "chronological":
                yield slice(begin, end)
            else:
                mask = self._masks(first_row + begin, end - begin)[part]
                yield np.flatnonzero(mask) + begin

    def _masks(self, first_row: int, rows: int) -> dict[str, np.ndarray]:
        numbers = np.arange(first_row, first_row + rows, dtype=np.uint64)
        return random_masks(numbers, self.fractions)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK_ROWS, rows)) for begin in range(0, rows, BLOCK_ROWS))


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
    pieces: Sequence[Piece], source: Source, *, rows_per_shard: int = ROWS_PER_SHARD
) -> StoreLayout:
    """Return where the rows of pieces without fault, in order, lie in the store.

    A row's number is that of the rows before it: rows are not counted before they are parsed.
    """
    selector = Selector(source.order, source.fractions)
    segments: dict[str, list[Segment]] = {part: [] for part in selector.parts}
    first_row = 0
    for piece in pieces:
        for part, count in selector.counts(first_row, piece.rows).items():
            if count:
                whole = Segment(piece.span.name, piece.rows, first_row, 0, count)
                segments[part].append(whole)
        first_row += piece.rows
    shards = [
        shard for part in selector.parts for shard in _shards(part, segments[part], rows_per_shard)
    ]
    sizes = [sum(s.end - s.begin for s in segments[part]) for part in selector.parts]
    ends = list(itertools.accumulate(sizes))
    splits: Splits = dict(zip(selector.parts, zip([0, *ends], ends, strict=False), strict=True))
    if source.order == "chronological":
        splits = chronological_split(first_row, source.fractions)
    return StoreLayout(first_row, splits, tuple(shards))


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


def write_column(
    shard: ShardLayout, column: str, schema: Schema, selector: Selector, folder: Path
) -> None:
    """Write one column of a shard into `folder`, and then its SHA-256 beside it.

    Whole or absent, and the same however often it is written, as a piece is.

    Raises:
        StoreError: a piece has not the rows that it had.
    """
    dtype, width = columns_of(schema)[column]
    name = shard_file(shard.part, shard.number, column)
    own = folder / f".{name}.{secrets.token_hex(8)}"
    file = ColumnFile(own, dtype, width)
    try:
        for segment in shard.segments:
            rows = _rows_of(folder / piece_file(segment.piece, column), dtype, width, segment.rows)
            done = 0
            for places in selector.places(shard.part, segment.first_row, segment.rows):
                found = rows[places]
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
    size = rows * dtype.itemsize * (1 if width is None else width)
    if path.stat().st_size != size:
        raise StoreError(f"{path} has not the {rows:,} rows that were parsed: it is damaged")
    if not size:  # a schema without such features
        return np.empty((rows, width or 0), dtype)
    return np.memmap(path, dtype, "r", shape=(rows,) if width is None else (rows, width))


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or absent, also where several write it at once."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    own.write_text(text)
    os.replace(own, path)
