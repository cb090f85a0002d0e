"""Batches drawn by many workers, each from a scan of its rows: those of `BatchSource`, bit for bit.

L. Chua et al., Scalable DP-SGD: Shuffling vs. Poisson Subsampling (NeurIPS 2024), draw so. A worker
draws the participations of some chunks of examples in one epoch, which depend on nothing else, and
reads their rows from the first to the last; the pairs of step and row go to the worker that writes
the file of that step: it sorts, cuts and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dpsgd.engine.batch_files import (
    Draw,
    file_name,
    load_seed,
    save_seed,
    write_file,
    write_secret,
)
from dpsgd.files import destroy
from samplers import UnitData
from samplers.base import BatchSampler

PyTree = Any

CHUNKS = 4
"""Chunks of examples that one task draws."""


class Part(NamedTuple):
    """What one task found for one file: pairs of a step and an example, and the examples' rows."""

    steps: np.ndarray
    """int64[pairs]."""
    examples: np.ndarray
    """int64[pairs]."""
    columns: tuple[np.ndarray, ...]
    """Of each leaf of the data, [pairs, ...]."""


@dataclass(frozen=True)
class BatchWork:
    """What workers do: draw every task; when all are drawn, write every file of what is its own.

    Each may be begun any number of times, as long as one end of each is told on.

    Attributes:
      path: Folder of the batches, with the seed: no worker is sent it.
      draw: What is drawn.
      columns: Returns the rows, as a task does; called in every process that draws.
    """

    path: Path
    draw: Draw
    columns: Callable[[], PyTree | UnitData]

    def tasks(self) -> list[tuple[int, int]]:
        """Returns what there is to draw: an epoch and the first of `CHUNKS` chunks, of each."""
        sampler = self.draw.sampler
        first = self.draw.first_step // sampler.steps_per_epoch
        chunks = range(0, sampler.num_chunks, CHUNKS)
        return [(epoch, chunk) for epoch in range(first, sampler.epochs) for chunk in chunks]

    def part(self, epoch: int, chunk: int) -> Iterator[tuple[int, Part]]:
        """Draws one task, and yields what it found for each file."""
        draw, sampler = self.draw, self.draw.sampler
        chunks = range(chunk, min(chunk + CHUNKS, sampler.num_chunks))
        seed, drawn = load_seed(self.path), sampler.drawn_epoch(epoch)
        entries = [sampler.participations(seed, drawn, one) for one in chunks]
        examples = np.concatenate([entry.examples for entry in entries]).astype(np.int64)
        steps = np.concatenate([entry.steps for entry in entries]).astype(np.int64)
        steps += epoch * sampler.steps_per_epoch
        left = steps >= draw.first_step
        examples, steps = examples[left], steps[left]
        files = (steps - draw.first_step) // draw.steps_per_file
        order = np.argsort(files, kind="stable")
        begin, end = sampler.chunk_range(chunks[0]).start, sampler.chunk_range(chunks[-1]).stop
        rows = [np.array(leaf[begin:end]) for leaf in _leaves(self.columns)]  # one scan
        found, starts = np.unique(files[order], return_index=True)
        stops = [*starts[1:], order.size]
        for file, start, stop in zip(found.tolist(), starts, stops, strict=bool(found.size)):
            places = order[start:stop]
            own = examples[places]
            yield file, Part(steps[places], own, tuple(row[own - begin] for row in rows))

    def write(self, file: int, parts: Iterable[Part]) -> None:
        """Writes one file: sorts, cuts and writes the steps that are its own."""
        draw, sampler = self.draw, self.draw.sampler
        nothing = [leaf[:0] for leaf in _leaves(self.columns)]
        none = np.empty(0, np.int64)
        found = [Part(none, none, tuple(nothing)), *parts]
        steps, examples = (np.concatenate([part[i] for part in found]) for i in (0, 1))
        order = np.lexsort((examples, steps))
        steps, examples = steps[order], examples[order]
        seed, passes, rows = load_seed(self.path), [], [none]
        for step in draw.steps(file):
            begin, end = np.searchsorted(steps, [step, step + 1])
            members = examples[begin:end].astype(np.int32)
            cut = sampler.passes(members, seed, step)
            passes.append(cut)
            rows += [order[begin + np.searchsorted(members, one)] for one in cut]
        places = np.concatenate(rows)
        columns = [
            np.concatenate([part.columns[leaf] for part in found])[places]
            for leaf in range(len(nothing))
        ]
        digest = write_file(self.path, file, passes, columns)
        write_secret(self.path / f"{file_name(file)}.sha256", digest.encode())


def drawn_by(
    carry_out: Callable[[BatchWork], None], columns: Callable[[], PyTree | UnitData]
) -> Callable[[Path, Draw, int, PyTree], list[str]]:
    """Returns what writes the files of a draw by many workers, for `dpsgd.runs.run.Run.draw`.

    Args:
      carry_out: Has the work done, in any order and by anybody: a pipeline.
      columns: Returns the rows that are drawn from; pickled, and sent to every worker.
    """

    def write(path: Path, draw: Draw, seed: int, data: PyTree) -> list[str]:
        check_sampler(draw.sampler)
        path = path.absolute()
        save_seed(path, seed)
        carry_out(BatchWork(path, draw, columns))
        digests = []
        for file in range(draw.num_files):
            stated = path / f"{file_name(file)}.sha256"
            if not stated.exists():
                raise ValueError(f"the pipeline ended and {file_name(file)} was not written")
            digests.append(stated.read_text())
            destroy(stated)
        return digests

    return write


def check_sampler(sampler: BatchSampler) -> None:
    """Raises ValueError unless the sampler's examples can be drawn apart from each other."""
    if sampler.clipped_shape:
        raise ValueError(
            f"{type(sampler).__name__} draws whole units, whose rows hang together: draw its "
            "batches without --beam"
        )


def _leaves(columns: Callable[[], PyTree | UnitData]) -> list[Any]:
    """Returns the columns of the rows."""
    data = columns()
    return jax.tree.leaves(data.columns if isinstance(data, UnitData) else data)
