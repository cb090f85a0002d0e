"""Batches drawn by many workers, bit for bit as `BatchSource` draws them.

A worker draws the participations of some chunks of examples in one epoch, which depend on nothing
else, and reads their rows in order. The pairs (step, row) go to the worker that writes the file of
the step, which sorts them, truncates the batches and writes them.

Source: L. Chua et al., Scalable DP-SGD: Shuffling vs. Poisson Subsampling (NeurIPS 2024).
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
    """Pairs (step, example) that one task drew for one file, with the examples' rows."""

    steps: np.ndarray
    """int64[pairs]."""
    examples: np.ndarray
    """int64[pairs]."""
    columns: tuple[np.ndarray, ...]
    """Rows of each leaf of the data, [pairs, ...]."""


@dataclass(frozen=True)
class BatchWork:
    """Work of drawing batches: draw every task, then write every file from its parts.

    Each task may be started any number of times, but its result is used once.

    Attributes:
      path: Folder of the batches, with the seed: no worker is sent the seed.
      draw: Batches to draw.
      columns: Function that returns the rows, called in every process that draws.
    """

    path: Path
    draw: Draw
    columns: Callable[[], PyTree | UnitData]

    def tasks(self) -> list[tuple[int, int]]:
        """Returns the tasks, each (epoch, first of `CHUNKS` chunks)."""
        sampler = self.draw.sampler
        first = self.draw.first_step // sampler.steps_per_epoch
        chunks = range(0, sampler.num_chunks, CHUNKS)
        return [(epoch, chunk) for epoch in range(first, sampler.epochs) for chunk in chunks]

    def part(self, epoch: int, chunk: int) -> Iterator[tuple[int, Part]]:
        """Draws one task and yields (file, part) pairs.

        Args:
          epoch: Epoch of the task.
          chunk: First chunk of the task.
        """
        draw, sampler = self.draw, self.draw.sampler
        chunks = range(chunk, min(chunk + CHUNKS, sampler.num_chunks))
        seed, stream = load_seed(self.path), sampler.drawn_epoch(epoch)
        entries = [sampler.participations(seed, stream, number) for number in chunks]
        examples = np.concatenate([entry.examples for entry in entries]).astype(np.int64)
        steps = np.concatenate([entry.steps for entry in entries]).astype(np.int64)
        steps += epoch * sampler.steps_per_epoch
        remaining = steps >= draw.first_step
        examples, steps = examples[remaining], steps[remaining]
        files = (steps - draw.first_step) // draw.steps_per_file
        first, last = sampler.chunk_range(chunks[0]).start, sampler.chunk_range(chunks[-1]).stop
        rows = [np.array(leaf[first:last]) for leaf in self._leaves()]  # one scan
        order = np.argsort(files, kind="stable")
        numbers, starts = np.unique(files[order], return_index=True)
        # Without pairs there is one empty piece of no file.
        for file, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=False):
            members = examples[places]
            columns = tuple(leaf[members - first] for leaf in rows)
            yield file, Part(steps[places], members, columns)

    def write(self, file: int, parts: Iterable[Part]) -> None:
        """Sorts the pairs, truncates batches and writes one file.

        Args:
          file: Number of the file.
          parts: Parts of the file, in any order.
        """
        draw, sampler = self.draw, self.draw.sampler
        none = np.empty(0, np.int64)
        nothing = Part(none, none, tuple(leaf[:0] for leaf in self._leaves()))
        steps, examples, leaves = zip(nothing, *parts, strict=True)
        order = np.lexsort((np.concatenate(examples), np.concatenate(steps)))
        sorted_steps, sorted_examples = (np.concatenate(x)[order] for x in (steps, examples))
        seed, passes, places = load_seed(self.path), [], [none]
        for step in draw.steps(file):
            begin, stop = np.searchsorted(sorted_steps, [step, step + 1])
            members = sorted_examples[begin:stop].astype(np.int32)
            passes.append(sampler.passes(members, seed, step))
            places += [order[begin + np.searchsorted(members, ids)] for ids in passes[-1]]
        rows = np.concatenate(places)
        columns = [np.concatenate(arrays)[rows] for arrays in zip(*leaves, strict=True)]
        digest = write_file(self.path, file, passes, columns)
        write_secret(self.path / f"{file_name(file)}.sha256", digest.encode())

    def _leaves(self) -> list[Any]:
        data = self.columns()
        return jax.tree.leaves(data.columns if isinstance(data, UnitData) else data)


def drawn_by(
    carry_out: Callable[[BatchWork], None], columns: Callable[[], PyTree | UnitData]
) -> Callable[[Path, Draw, int, PyTree], list[str]]:
    """Returns a function for `Run.draw` that writes batches by workers.

    Args:
      carry_out: Function that runs the work, such as `Runner.write_batches`.
      columns: Function that returns the rows; pickled and sent to every worker.
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
                raise ValueError(
                    f"the pipeline ended without writing {file_name(file)}; run the command again"
                )
            digests.append(stated.read_text())
            destroy(stated)
        return digests

    return write


def check_sampler(sampler: BatchSampler) -> None:
    """Raises ValueError unless the sampler draws examples independently."""
    if sampler.clipped_shape:
        raise ValueError(
            f"--beam draws single examples, but {type(sampler).__name__} draws whole units; leave "
            "out --beam"
        )
