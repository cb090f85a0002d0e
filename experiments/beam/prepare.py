"""Preparation of a store from many files by a pipeline: bit for bit that of a single process."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.beam.assembly import DONE, Placement, in_order, place, write_rows, write_text
from experiments.beam.pieces import Piece, faults_of, write_piece
from experiments.tasks.clicks.files import RANGE_BYTES, DataError, Span, paths_of, spans_of
from experiments.tasks.clicks.formats import Format
from experiments.tasks.clicks.store import (
    WORK,
    Store,
    StoreError,
    StoreWriter,
    columns_of,
    one_line_errors,
    row_bytes,
)

NAMED = 10
"""Most faults that an error names."""

LAYOUT = "layout.json"


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
            if layout["pieces"]:
                raise FaultyFiles([*faults_of([_piece(record) for record in layout["pieces"]])])
            for span in spans:
                if not (folder / span.name / DONE).exists():
                    raise StoreError(f"the pipeline ended and {span.name} was not written")
            shutil.rmtree(folder)
        writer.rows.update(layout["rows"])
        return writer.complete(format.source(paths))


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
        """Writes the piece of a span."""
        return write_piece(span, self.format, self.folder)

    def lay_out(self, pieces: Iterable[Piece]) -> Iterator[Placement]:
        """Yields the places of all pieces, or nothing if some have faults."""
        ordered = in_order(list(pieces), self.ranges)
        if any(True for _ in faults_of(ordered)):
            record = {"pieces": [dataclasses.asdict(piece) for piece in ordered]}
            write_text(self.folder / LAYOUT, json.dumps(record))
            return
        rows, placements = place(ordered, self.format.split)
        for column, kind in columns_of(self.format.schema).items():
            for split, count in rows.items():
                with open(self.folder.parent / f"{split}.{column}", "ab") as file:
                    file.truncate(count * row_bytes(*kind))
        write_text(self.folder / LAYOUT, json.dumps({"pieces": [], "rows": rows}))
        yield from placements

    def write(self, placement: Placement) -> None:
        """Writes the rows of a piece into the files of the store."""
        write_rows(placement, self.format, self.folder, self.folder.parent)


def _piece(record: dict) -> Piece:
    return Piece(**{**record, "span": Span(**record["span"])})
