"""A store of many raw files, by a pipeline: bit for bit the one that a single process makes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpsgd.files import SECRET, write_atomically
from experiments.beam.assembly import ShardLayout, in_order, lay_out, write_column, write_text
from experiments.beam.pieces import AnyFormat, Piece, all_faults, write_piece
from experiments.tasks.clicks.raw.files import RANGE_BYTES, ByteRange, DataError, paths_of
from experiments.tasks.clicks.store import Store, StoreError, columns_of
from experiments.tasks.clicks.writer import (
    ROWS_PER_SHARD,
    WORK,
    PartialStore,
    one_line_errors,
    shard_file,
)

NAMED = 10
"""Faults that an error names; where there are more, a file names all."""

LAYOUT = "layout.json"


class FaultyLines(ValueError):
    """Files with lines that are no rows: one line that names them, or the first and a file of all.

    Attributes:
        faults: The first of them.
        count: How many there are.
    """

    def __init__(self, faults: Sequence[DataError], count: int, listing: Path) -> None:
        more = f"; and {count - len(faults):,} more, all named in {listing}"
        super().__init__(
            f"no store was made, for {count:,} fault{'s' * (count != 1)}: "
            + "; ".join(map(str, faults))
            + (more if count > len(faults) else "")
        )
        self.faults, self.count = tuple(faults), count


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    format: AnyFormat,
    carry_out: Callable[[StoreWork], None],
    *,
    range_bytes: int = RANGE_BYTES,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> Store:
    """Turn raw files, one after the other, into a store, and return the store.

    All workers must see the files and `out` under the same paths. `carry_out` has the work done, in
    any order and by anybody: a pipeline. A task is `range_bytes` of a file, on which the store does
    not depend.

    Raises:
        FaultyLines: some are not in the format.
        DataError: a file cannot be read.
        StoreError: `out` exists, or cannot be written.
        PipelineError: the pipeline failed; the command may be given again.
    """
    paths = [path.absolute() for path in paths_of(sources)]
    out = Path(out)
    listing = out.with_name(f"{out.name}.faults_not_private.txt")
    with PartialStore(out) as partial, one_line_errors(out):
        listing.unlink(missing_ok=True)
        # Workers of a run that died may go on for a while: they have a folder of their own.
        folder = partial.path.absolute() / f"{WORK}{secrets.token_hex(8)}"
        folder.mkdir()
        ranges = format.ranges(paths, range_bytes)
        carry_out(StoreWork(format, folder, tuple(ranges), rows_per_shard))
        layout = json.loads((folder / LAYOUT).read_text())
        if layout["faulty"]:
            raise _faulty(all_faults(_pieces(layout), format, folder), listing)
        shards = list(_finished_shards(layout["shards"], format, folder, partial.path))
        shutil.rmtree(folder)
        return partial.complete(
            format.schema,
            hash_seed=format.hash_seed,
            splits={name: tuple(ends) for name, ends in layout["splits"].items()},
            source=format.source(paths),
            shards=shards,
        )


@dataclasses.dataclass(frozen=True)
class StoreWork:
    """What workers do: parse every range; when all are parsed, lay out; write what that yields.

    All is written into `folder`. Each may be begun any number of times, as long as one end of each
    is told on.
    """

    format: AnyFormat
    folder: Path
    ranges: tuple[ByteRange, ...]
    rows_per_shard: int

    def parse(self, span: ByteRange) -> Piece:
        """Write the piece of a range."""
        return write_piece(span, self.format, self.folder)

    def lay_out(self, pieces: Iterable[Piece]) -> Iterator[tuple[ShardLayout, str]]:
        """Yield what is to be written: each column of each shard, or nothing where faults are."""
        found = in_order(list(pieces), self.ranges)
        faulty = any(True for _ in all_faults(found, self.format, self.folder))
        record: dict[str, Any] = {"faulty": faulty}
        if faulty:
            record["pieces"] = [dataclasses.asdict(piece) for piece in found]
        else:
            splits, layout = lay_out(found, self.format.split, self.rows_per_shard)
            shards = [[shard.part, shard.number, shard.rows] for shard in layout]
            record |= {"splits": splits, "shards": shards}
            columns = columns_of(self.format.schema)
            yield from ((shard, column) for shard in layout for column in columns)
        write_text(self.folder / LAYOUT, json.dumps(record))

    def write(self, shard: ShardLayout, column: str) -> None:
        """Write one column of one shard."""
        write_column(shard, column, self.format, self.folder)


def _pieces(layout: dict[str, Any]) -> list[Piece]:
    return [Piece(**{**record, "span": ByteRange(**record["span"])}) for record in layout["pieces"]]


def _finished_shards(
    shards: Sequence[Any], format: AnyFormat, folder: Path, store: Path
) -> Iterator[dict[str, Any]]:
    """Yield shards, each (part, number, rows), as a manifest has them, and move their files."""
    for part, number, rows in shards:
        files = {}
        for column in columns_of(format.schema):
            name = shard_file(part, number, column)
            try:
                digest = (folder / f"{name}.sha256").read_text()
                os.rename(folder / name, store / name)
            except FileNotFoundError:
                raise StoreError(f"the pipeline ended and {name} was not written") from None
            files[column] = {"name": name, "sha256": digest}
        yield {"rows": rows, "files": files}


def _faulty(faults: Iterator[DataError], listing: Path) -> FaultyLines:
    """Return the error that names all faults, of which `listing` holds those that it does not."""
    first = list(itertools.islice(faults, NAMED))
    count = len(first)
    if (another := next(faults, None)) is not None:

        def write(file) -> None:
            nonlocal count
            count = 0
            for fault in itertools.chain(first, [another], faults):
                count += 1
                file.write(f"{fault}\n".encode())

        write_atomically(listing, write, mode=SECRET)
    return FaultyLines(first, count, listing)
