"""Whole epochs as training reads them, at the run's own size: what the audit of a sampler looks at.

They come through `BatchSource`, with read-ahead, block after block. The first seed's are the first
epochs, those before and at powers of 2, and the last ones; further seeds differ from it in one bit,
the 128th in front, and have the first epochs again.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dpsgd.audit.samplers.units import UnitChoice
from dpsgd.engine.blocks import plan_blocks
from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock
from samplers.row_law import RowLaw
from samplers.shards import Shards

ENTRIES = 500_000
"""Participations wanted before a run, over all draws: a rate that is wrong by 1 % is found out."""

THOROUGH = 4_400_000
"""The same where a sampler's code is tested: 0.3 %."""

_FEW, _MOST = 256, 3200  # draws, at most: of a small population, and of a large one
_FIRST = 9  # epochs 0 to 8 are drawn, if a run has them
_LARGE = 4_000_000  # examples: of more, a few epochs are drawn, and some chunks looked at closely
_OF_LARGE = 6  # draws
_WATCHED = 2_000_000  # examples, of so many
_BLOCK_STEPS = 64
_PART = 2**20  # entries that are counted together
_AHEAD = 4  # seeds whose epochs are read ahead: each has a thread
_BITS = 6  # of the number of a draw: so many are compared in all pairs
_SHARED = 30_000_000  # entries that pairs share, about, at most


class Draw(NamedTuple):
    """The participations of one epoch under one seed, without those that are not watched."""

    seed: int
    """Number of the seed, from 0."""
    epoch: int
    examples: np.ndarray
    """Who takes part, ascending: int32[entries], places among the watched examples."""
    steps: np.ndarray
    """When, counted from the epoch's first step; ascending for each example: int32[entries]."""
    parts: np.ndarray
    """Rows of each step, of all examples of each shard: int64[shards, T]."""
    by_chunk: np.ndarray
    """Participations of each chunk of all examples: int64[chunks]."""
    strays: int
    """How many examples do not take part once, and how often beyond it; counted where they must."""

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each step, of all examples: int64[T]."""
        return self.parts.sum(axis=0)


class Draws:
    """Epochs of a run, and of runs with other seeds.

    Args:
      sampler: Who draws.
      law: With which they will be compared; None if none is known.
      seed: Not the run's.
      entries: Participations wanted, over all draws; by default `ENTRIES`.

    Attributes:
      entries: Participations wanted.
      all: Every draw, seed by seed.
      independent: Those that are independent by law.
      fault: What is wrong with the batches themselves; "" if nothing is.
      steps: T.
      rows: Number of watched examples: all, or some chunks of a large population.
      chunk_rows: Watched examples of each watched chunk.
      choice: Of examples by the units that they lie in.
      once, large, width: Whether examples take part once an epoch; whether some chunks alone are
        watched; and examples of a chunk.
      held: Of each draw the innermost units, and how many examples of each take part.
      cut: Whether batches were cut: the draws are then what was drawn before.
    """

    def __init__(
        self, sampler: BatchSampler, law: RowLaw | None, seed: int, entries: int | None = None
    ) -> None:
        self.sampler, self.steps = sampler, sampler.steps_per_epoch
        self.entries = entries or ENTRIES
        self.once = law is not None and law.once
        self.width = len(sampler.chunk_range(0))
        count = sampler.num_chunks
        units = law is not None and law.units is not None
        self.large = sampler.num_examples > _LARGE and not units
        watched = np.arange(count)
        if self.large:
            spread = np.linspace(0, count - 1, max(16, _WATCHED // self.width - 16)).astype(int)
            watched = np.unique([*watched[:8], *spread, *watched[-8:], *self._shard_borders()])
        self._slot = np.full(count, -1)
        self._slot[watched] = np.arange(watched.size)
        self._watched = watched
        self.chunk_rows = np.array([len(sampler.chunk_range(int(c))) for c in watched])
        self.rows = int(self.chunk_rows.sum())
        self.choice = UnitChoice(law.units if law else None, self.rows, seed)
        redrawn = law is None or law.redrawn
        certain = law is not None and law.certain
        self.fault, self.cut = "", False
        self.all: list[Draw] = []
        self.seeds: list[int] = []
        how = {"certain": certain, "large": self.large}
        wanted = _wanted(sampler, redrawn, self.entries, **how)
        for number, epochs in enumerate(wanted):
            self.seeds.append(_other(seed, number))
            self.all += self._read(number, epochs)
        fixed = law is not None and law.batch_sizes is not None
        cap = sampler.shard_batch_size
        if not (fixed or sampler.accumulates or cap >= sampler.num_examples):
            self.cut = any((draw.parts >= cap).any() for draw in self.all)
        self.read = self.all
        if self.cut:
            self.all = [self._planned(draw.seed, draw.epoch) for draw in self.read]
        # Which innermost units the draws have examples of, and of how many.
        self.held = [self.choice.units(draw.examples) for draw in self.all] if units else []
        self.independent = [d for d in self.all if redrawn or d.epoch == 0]

    def folded(self, cycle_length: int) -> Draws:
        """Returns these draws with the steps of an example counted among those of its group."""

        def fold(draw: Draw) -> Draw:
            parts = draw.parts.reshape(len(draw.parts), -1, cycle_length).sum(axis=2)
            return draw._replace(steps=draw.steps // np.int32(cycle_length), parts=parts)

        folded = copy.copy(self)
        folded.steps = self.steps // cycle_length
        folded.all, folded.independent = (
            [fold(draw) for draw in of] for of in (self.all, self.independent)
        )
        return folded

    @cached_property
    def merged(self) -> tuple[list[Draw], np.ndarray, np.ndarray]:
        """Some independent draws, at most 64; their keys, ascending; and the draw of each key."""
        entries = np.mean([draw.examples.size for draw in self.independent]) + 1
        shared = entries**2 / max(1, self.rows * self.steps)  # by two draws, about
        most = int(np.clip((2 * _SHARED / (shared + 1)) ** 0.5, 6, 1 << _BITS))
        some = [draw for draw in self.independent if draw.seed == 0][: most * 5 // 8]
        some += [draw for draw in self.independent if draw.seed][: most - len(some)]
        codes = [self.keys(draw) << _BITS | number for number, draw in enumerate(some)]
        merged = np.sort(np.concatenate(codes), kind="stable")
        return some, merged >> _BITS, merged & ((1 << _BITS) - 1)

    def of_examples(self, some: list[Draw] | None = None, stop: int | None = None) -> np.ndarray:
        """Returns how often each watched example takes part: int64[rows].

        Args:
          some: Draws that are counted; by default the independent ones.
          stop: Step before which it does; by default any.
        """
        count = np.zeros(self.rows, np.int64)
        for draw in self.independent if some is None else some:
            examples = draw.examples if stop is None else draw.examples[draw.steps < stop]
            count += np.bincount(examples, minlength=self.rows)
        return count

    def keys(self, draw: Draw) -> np.ndarray:
        """Returns the entries (i, t) of a draw as ascending numbers i T + t: int64[entries]."""
        return draw.examples.astype(np.int64) * self.steps + draw.steps

    def has(self, draw: Draw, examples: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns which of these entries a draw has."""
        keys, wanted = self.keys(draw), examples.astype(np.int64) * self.steps + steps
        if not keys.size:
            return np.zeros(wanted.shape, bool)
        return keys[np.minimum(np.searchsorted(keys, wanted), keys.size - 1)] == wanted

    def numbers(self, places: Any) -> Any:
        """Returns which examples of all stand at these places among the watched ones."""
        chunks, within = np.divmod(places, self.width)
        return self._watched[chunks] * self.width + within

    def chunks(self, places: np.ndarray) -> np.ndarray:
        """Returns the chunks, counted among the watched ones, of these places."""
        return places // self.width

    def borders(self) -> np.ndarray:
        """Returns the places of each chunk's first and last example."""
        ends = np.cumsum(self.chunk_rows)
        return np.unique([ends - self.chunk_rows, ends - 1])

    def compared(self) -> Iterator[tuple[Draw, Draw]]:
        """Yields what was read of an epoch, and its rows by `participations` of a few chunks.

        All of the one that lies in the chunks of the other: in the first and the last, of a large
        population in the last, and where shards meet.
        """
        sampler, last = self.sampler, self.sampler.num_chunks - 1
        few = [draw for draw in self.read if draw.seed == 0]
        few = [few[0], few[-1]] if self.large else [*few[:_FIRST], *few[_FIRST:][-_FIRST:]]
        chunks = sorted({last if self.large else 0, last, *self._shard_borders()})
        for draw in few:
            rows = [sampler.participations(self.seeds[0], draw.epoch, chunk) for chunk in chunks]
            examples, steps = (np.concatenate(part) for part in zip(*rows, strict=True))
            some = np.isin(self._watched[self.chunks(draw.examples)], chunks)
            read = draw._replace(examples=draw.examples[some], steps=draw.steps[some])
            yield read, self._draw(0, draw.epoch, [(examples, steps)])

    def _shard_borders(self) -> set[int]:
        """Returns the chunks at either side of where shards meet."""
        begins = [
            self.sampler.shard_range(shard).start for shard in range(1, self.sampler.num_shards)
        ]
        return {(begin - k) // self.width for begin in begins for k in (0, 1)}

    def _read(self, number: int, epochs: list[range]) -> Iterator[Draw]:
        source = BatchSource(self.sampler, self.seeds[number], read_ahead=number < _AHEAD)
        for some in epochs:
            pieces = self._pieces(source, some, shards=number == 0)
            for epoch, parts in itertools.groupby(pieces, lambda piece: piece[0]):
                yield self._draw(number, epoch, (part[1:] for part in parts))

    def _pieces(
        self, source: BatchSource, epochs: range, *, shards: bool
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields epoch, examples and steps of blocks that reach over epochs as training's do.

        Of the run's first block shards are compared.
        """
        length = self.steps
        where = {"first_step": epochs.start * length, "stop": epochs.stop * length}
        for steps, block in plan_blocks(source, **where, block_steps=_BLOCK_STEPS):
            if shards and steps.start == 0:
                self._compare_shards(block)
            examples, at = self._entries(block, steps.start)
            del block  # of many millions of rows, what lingers is felt
            for epoch in range(steps.start // length, -(-steps.stop // length)):
                mine = slice(*np.searchsorted(at, [epoch * length, (epoch + 1) * length]))
                yield epoch, examples[mine], at[mine] - epoch * length

    def _entries(self, block, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what counts of a block: examples, and steps of the run."""
        weights, starts = block.weights, block.starts
        real = weights > 0
        if not np.array_equal(weights, real):
            self.fault = self.fault or "weights are not 0 or 1"
        if real[starts[-1] :].any():
            self.fault = self.fault or "a pass of no step has rows that count"
        row_steps = np.arange(first, first + starts.size - 1, dtype=np.int32)
        row_steps = np.repeat(row_steps, np.diff(starts))
        real = real[: starts[-1]]
        at = np.repeat(row_steps, np.count_nonzero(real, axis=1))
        examples = block.indices[: starts[-1]][real]
        if block.shards is not None:  # all are held, so that places are numbers of examples
            within, examples = examples, block.places[: starts[-1]][real]
            begins = np.array(
                [self.sampler.shard_range(k).start for k in range(self.sampler.num_shards)]
            )
            if not np.array_equal(
                within, examples - np.broadcast_to(begins[block.shards], real.shape)[real]
            ):
                self.fault = self.fault or "places and numbers in a shard are of different examples"
        return examples, at

    def _compare_shards(self, block: IndexBlock) -> None:
        """Compares the first block with what those read who hold one shard each."""
        sampler, cap = self.sampler, self.sampler.shard_batch_size
        for shard in range(sampler.num_shards if sampler.num_shards > 1 else 0):
            source = BatchSource(sampler, self.seeds[0], shards=range(shard, shard + 1))
            own = source.fill(0, int(block.num_steps), passes=len(block.indices))
            columns = slice(shard * cap, (shard + 1) * cap)
            here = [part[:, columns] for part in (block.indices, block.weights)]
            placed = (own.places + source.rows.start) * (own.weights > 0)
            if not (
                np.array_equal(own.indices, here[0])
                and np.array_equal(own.weights, here[1])
                and np.array_equal(placed, block.places[:, columns])
                and np.array_equal(own.shards, block.shards[columns])
            ):
                fault = f"a process that holds shard {shard} alone reads other batches"
                self.fault = self.fault or fault

    def _planned(self, number: int, epoch: int) -> Draw:
        starts, examples = self.sampler.plan(self.seeds[number], epoch)
        steps = np.repeat(np.arange(self.steps), np.diff(starts))
        return self._draw(number, epoch, [(examples, steps)])

    def _draw(
        self, number: int, epoch: int, entries: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Draw:
        """Returns an epoch of so many parts: of a large population little of each is kept."""
        sampler, n = self.sampler, self.sampler.num_examples
        shards = Shards(n, sampler.num_shards)
        parts = np.zeros(sampler.num_shards * self.steps, np.int64)
        by_chunk = np.zeros(sampler.num_chunks, np.int64)
        present = np.zeros(n if self.once else 0, bool)
        count, keys = 0, [np.empty(0, np.int64)]
        for examples, steps in entries:
            if examples.size and not (examples.min() >= 0 and examples.max() < n):
                self.fault = self.fault or f"epoch {epoch} has examples that there are not"
                continue
            count += examples.size
            if self.once:
                present[examples] = True
            several = sampler.num_shards > 1
            cells = shards.of(examples) * self.steps + steps if several else steps
            parts += _counts(cells, parts.size)
            chunks = examples // self.width
            by_chunk += _counts(chunks, by_chunk.size)
            if self.large:
                slots = self._slot[chunks]
                some = slots >= 0
                examples = slots[some] * self.width + examples[some] % self.width
                steps = steps[some]
            keys.append(examples.astype(np.int64) * self.steps + steps)
        strays = present.size + count - 2 * int(np.count_nonzero(present)) if self.once else 0
        # They come in runs that ascend, one a step: what a merge sort is fastest with.
        ordered = np.sort(np.concatenate(keys), kind="stable")
        if (ordered[1:] == ordered[:-1]).any():
            self.fault = self.fault or f"a batch of epoch {epoch} has an example twice"
        places = ordered // self.steps
        when = (ordered - places * self.steps).astype(np.int32)
        by_shard = parts.reshape(sampler.num_shards, -1)
        return Draw(number, epoch, places.astype(np.int32), when, by_shard, by_chunk, strays)


def _counts(numbers: np.ndarray, length: int) -> np.ndarray:
    """Returns how often each number below `length` comes, without a copy of all in 64 bits."""
    found = np.zeros(length, np.int64)
    for start in range(0, numbers.size, _PART):
        found += np.bincount(numbers[start : start + _PART], minlength=length)
    return found


def _wanted(
    sampler: BatchSampler, redrawn: bool, entries: int, *, certain: bool, large: bool
) -> list[list[range]]:
    """Returns the epochs to read under each seed, as ranges."""
    of_epoch = (
        sampler.expected_batch_size * math.prod(sampler.clipped_shape) * sampler.steps_per_epoch
    )
    most = min(_MOST, max(_FEW, sampler.num_examples // 16))
    draws = _OF_LARGE if large else min(most, max(_FIRST + 1, math.ceil(entries / of_epoch)))
    if certain:  # each entry of each draw is known
        draws = 2
    first = 3 if large or not redrawn else max(_FIRST, draws // 4)
    first = min(first, sampler.epochs)
    chosen = {*range(first), sampler.epochs - 1}
    if not large:
        powers = [2**k for k in range(1, 31) if 2**k < sampler.epochs]
        chosen |= {max(0, sampler.epochs - 2), *powers, *(power - 1 for power in powers)}
    wanted = [_ranges(sorted(chosen))]
    left = draws - (len(chosen) if redrawn else 1)
    while left > 0 or len(wanted) < 2:
        count = max(1, min(left, first if redrawn else 1))
        wanted.append([range(count)])
        left -= count
    return wanted


def _ranges(numbers: list[int]) -> list[range]:
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    some = [[number for _, number in run] for _, run in runs]
    return [range(run[0], run[-1] + 1) for run in some]


def _other(seed: int, number: int) -> int:
    """Returns a seed that differs in one bit: the 128th, then others below, then longer ones."""
    if number == 0:
        return seed
    return seed ^ (1 << (127 + 37 * (number - 1)) % 128 if number <= 128 else number << 128)
