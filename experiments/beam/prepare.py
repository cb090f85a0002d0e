"""Stores of many files by a pipeline: bit for bit as a single process writes them.

A task may be begun by several workers, and may die at any moment. Each attempt at a piece writes
into another folder, and names it when all is written; its content depends on the span alone.
So a piece is whole or absent, however often, and by whomever, it was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.engine.batch_files import write_secret
from experiments.tasks.clicks.files import RANGE_BYTES, DataError, Span, paths_of, spans_of
from experiments.tasks.clicks.formats import EMPTY, Format
from experiments.tasks.clicks.store import (
    WORK,
    Store,
    StoreError,
    StoreWriter,
    columns_of,
    map_column,
    one_line_errors,
    row_bytes,
)
from experiments.tasks.splits import SPLITS, Split, chronological_split

NAMED = 10
"""Most faults that an error names."""
BLOCK_ROWS = 1 << 18
"""Rows that are assembled at a time."""
LAYOUT = "layout.json"
"""File of the splits' sizes, or of the faults."""
DONE = "done"
"""File that marks an assembled piece."""


class FaultyFiles(ValueError):
    """Files with a fault each: one line that names the first ones.

    Attributes:
        faults: First fault of each faulty file.
    """

    def __init__(self, faults: Sequence[DataError]) -> None:
        more = f"; and {len(faults) - NAMED:,} more" * (len(faults) > NAMED)
        named = "; ".join(map(str, faults[:NAMED]))
        count = f"{len(faults):,} file{'s' * (len(faults) != 1)}"
        super().__init__(f"no store was made, for faults in {count}: {named}{more}")
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
        carry_out: Function that has the work done, in any order and by any worker: a pipeline.
        range_bytes: Bytes of a task, on which the store does not depend.

    Raises:
        FaultyFiles: If files do not have the format.
        DataError: If a file cannot be read.
        StoreError: If `out` exists, or cannot be written.
        PipelineError: If the pipeline failed; the command may be given again.
    """
    paths = [path.absolute() for path in paths_of(sources)]
    out = Path(out)
    for path in paths:
        format.open(path)  # refused before any work is done
    with StoreWriter(out, format.schema, hash_seed=format.hash_seed) as writer:
        # Workers of a run that died may go on for a while: they have a folder of their own.
        folder = writer.path.absolute() / f"{WORK}{secrets.token_hex(8)}"
        with one_line_errors(out):
            folder.mkdir()
            spans = spans_of(paths, range_bytes if format.layouts else None)
            carry_out(StoreWork(format, folder, tuple(spans)))
            layout = json.loads((folder / LAYOUT).read_text())
            if layout["faults"]:
                raise FaultyFiles([_error(fault) for fault in layout["faults"]])
            for span in spans:
                if not (folder / span.name / DONE).exists():
                    raise StoreError(f"the pipeline ended and {span.name} was not written")
            shutil.rmtree(folder)
        writer.rows.update(layout["rows"])
        return writer.complete(format.source(paths))


def _error(fault: dict[str, Any]) -> DataError:
    path, problem = Path(fault.pop("path")), fault.pop("problem")
    return DataError(path, problem, **fault)


@dataclass(frozen=True)
class Piece:
    """Rows of a span."""

    span: Span
    rows: int
    """Number of rows; of those before the fault, if it has one."""
    fault: dict[str, Any] | None = None
    """First fault: path, problem, line (counted in the span), row and column."""


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

    def rows_by_split(self, split: Split) -> Iterator[dict[str, np.ndarray]]:
        """Yields the indices in the piece of each split's rows, block by block."""
        for begin in range(0, self.rows, BLOCK_ROWS):
            rows = np.arange(begin, min(begin + BLOCK_ROWS, self.rows))
            if split.order == "chronological":
                numbers = self.first_row + rows
                ranges = chronological_split(self.total, split.fractions)
                yield {
                    name: rows[(numbers >= a) & (numbers < b)] for name, (a, b) in ranges.items()
                }
            else:
                places = split.places(self.first_row + begin, len(rows))
                yield {name: rows[mask] for name, mask in places.items()}


@dataclass(frozen=True)
class StoreWork:
    """Work of a store: parse every span; when all are parsed, lay out; write every piece.

    Each task may be begun any number of times, as long as one end of each is reported.
    """

    format: Format
    folder: Path
    """Folder of the pieces, within the unfinished store."""
    ranges: tuple[Span, ...]

    def parse(self, span: Span) -> Piece:
        """Writes the columns of a span into a folder of its name."""
        rows, fault = 0, None
        own = self.folder / f".{span.name}.{secrets.token_hex(8)}"
        own.mkdir(mode=0o700)
        try:
            with contextlib.ExitStack() as stack:
                names = columns_of(self.format.schema)
                files = {n: stack.enter_context(open(own / n, "xb")) for n in names}
                try:
                    opened = self.format.open(Path(span.path), span=span)
                    for block in self.format.encoded(opened):
                        rows += len(block["label"])
                        for name, file in files.items():
                            file.write(np.ascontiguousarray(block[name]).data)
                except DataError as error:
                    terms = "problem", "line", "row", "column"
                    fault = {"path": span.path} | {name: getattr(error, name) for name in terms}
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
            try:
                os.rename(own, self.folder / span.name)
            except OSError:
                if not (self.folder / span.name).is_dir():  # of another attempt
                    raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
        return Piece(span, rows, fault)

    def lay_out(self, pieces: Iterable[Piece]) -> Iterator[Placement]:
        """Yields the places of all pieces, or nothing if some have faults.

        A row's number is the number of rows before it: rows are not counted before they are parsed.
        """
        ordered = sorted(pieces, key=lambda piece: piece.span)
        if [piece.span for piece in ordered] != sorted(self.ranges):
            raise StoreError(
                f"the runner returned {len(ordered):,} ranges of {len(self.ranges):,}, or one of "
                "them twice: no store was made of them"
            )
        faults, sizes, placements = list(_faults(ordered)), dict.fromkeys(SPLITS, 0), []
        first_row, total = 0, sum(piece.rows for piece in ordered)
        for piece in ordered if not faults else ():
            name, offsets = piece.span.name, tuple(sizes.values())
            placements.append(Placement(name, piece.rows, first_row, total, offsets))
            for rows in placements[-1].rows_by_split(self.format.split):
                sizes = {split: sizes[split] + len(rows[split]) for split in SPLITS}
            first_row += piece.rows
        for column, kind in columns_of(self.format.schema).items():
            for split, count in sizes.items():
                with open(self._file(split, column), "ab") as file:
                    file.truncate(count * row_bytes(*kind))
        layout = json.dumps({"faults": faults, "rows": sizes})
        write_secret(self.folder / LAYOUT, layout.encode())
        yield from placements

    def write(self, placement: Placement) -> None:
        """Writes the rows of a piece into the files of the store, at their places.

        The bytes are the same however often, and by whomever, they are written.

        Raises:
            StoreError: If the piece does not have its rows.
        """
        for column, (dtype, width) in columns_of(self.format.schema).items():
            path = self.folder / placement.piece / column
            rows = map_column(path, dtype, width, placement.rows)
            offsets = dict(zip(SPLITS, placement.offsets, strict=True))
            for indices in placement.rows_by_split(self.format.split):
                for split in SPLITS:
                    with open(self._file(split, column), "r+b") as file:
                        file.seek(offsets[split] * row_bytes(dtype, width))
                        file.write(np.ascontiguousarray(rows[indices[split]]).data)
                    offsets[split] += len(indices[split])
        write_secret(self.folder / placement.piece / DONE, b"")

    def _file(self, split: str, column: str) -> Path:
        return self.folder.parent / f"{split}.{column}"


def _faults(pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
    """Yields the first fault of each file; `pieces` are in the order of their spans."""
    lines, faulty = 0, -1
    for piece in pieces:
        lines = lines if piece.span.index else 0
        if piece.fault and piece.span.file != faulty:
            faulty = piece.span.file
            line = piece.fault["line"]
            yield piece.fault | {"line": line and line + lines}
        lines += piece.rows
    if pieces and faulty < 0 and not any(piece.rows for piece in pieces):
        yield {"path": pieces[0].span.path, "problem": EMPTY}
