"""Checks draws of complete epochs exactly, at the run's size.

Sound draws pass under every seed: the checks count no random numbers. They test each example's
participations in an epoch, their steps, the batch sizes, and that no two draws are equal.
`dpsgd.audit.laws` tests frequencies, and `dpsgd.audit.truncation` has the checks of caps.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dpsgd.audit.report import LAW, CheckResult
from dpsgd.audit.truncation import cut_faults
from dpsgd.engine.blocks import plan_blocks
from samplers import BatchSampler, BatchSource
from samplers.base import stated_law
from samplers.batches import IndexBlock
from samplers.plans import EpochPlan
from samplers.row_law import RowLaw
from samplers.shards import Shards

DRAWS = "batches are drawn as their cost assumes"

_EPOCHS = 9  # first epochs that are read
_SMALL = 2**18  # examples, above which three first epochs are read
_LARGE = 2**22  # examples, above which some chunks of one first epoch are compared
_CHUNKS = 16  # compared chunks of a large sampler
_BLOCK_STEPS = 64
_SAMPLED = 9  # most rows from which a chunk's rates are estimated
_MOVABLE = 64  # sum of min(p, 1 - p) over rates p, above which two draws differ
_SEPARATED = 1_000_000  # approximate number of participations whose steps are compared


class Epoch(NamedTuple):
    """Participations of one epoch under one seed.

    Attributes:
      seed: Number of the seed, from 0.
      number: Number of the epoch.
      examples: Example of each entry in the compared chunks, ascending: int64[entries].
      steps: Step of each entry in the epoch, ascending for each example: int64[entries].
      sizes: Number of rows for each shard and step, from all chunks: int64[shards, T].
      strays: Number of absent examples, plus participations beyond an example's first.
    """

    seed: int
    number: int
    examples: np.ndarray
    steps: np.ndarray
    sizes: np.ndarray
    strays: int

    def keys(self) -> np.ndarray:
        """Returns ascending entry keys, example * T + step: int64[entries]."""
        return self.examples * self.sizes.shape[1] + self.steps


def draw_checks(
    sampler: BatchSampler, claimed: BatchSampler, *, seed: int, bands: int = 1
) -> list[CheckResult]:
    """Checks a sampler's draws against the claimed cost's exact assumptions.

    Args:
      sampler: Sampler of the run, at its own size.
      claimed: Sampler whose cost is claimed.
      seed: Seed of the draws, never the run's.
      bands: Number of bands of the noise.
    """
    law = stated_law(claimed)
    try:
        draws = Draws(sampler, seed)
        fault = next(draws.faults(), "") or (
            next(_law_faults(draws, law, claimed, bands), "") if law else ""
        )
    except (ValueError, IndexError) as error:
        fault = str(error)
    detail = fault or f"{len(draws.read)} epochs, as training reads them"
    checks = [CheckResult(DRAWS, not fault, detail)]
    if law is None:
        why = f"not audited: {type(claimed).__name__} states no law of its draws (row_law)"
        checks.append(CheckResult.skipped(LAW, why))
    return checks


class Draws:
    """Epochs drawn under two seeds.

    Attributes:
      sampler: Sampler of the run.
      seeds: Seeds of the draws.
      read: Epochs as training reads them.
      drawn: Epochs before batches are truncated to the cap.
    """

    def __init__(self, sampler: BatchSampler, seed: int):
        self.sampler, self._fault = sampler, ""
        self._shards = Shards(sampler.num_examples, sampler.num_shards)
        borders = {(sampler.shard_range(k).start - j) for k in range(1, sampler.num_shards)
                   for j in (0, 1)}  # fmt: skip
        width, last = len(sampler.chunk_range(0)), sampler.num_chunks - 1
        self._borders = sorted({0, last, *(border // width for border in borders)})
        chosen = np.arange(last + 1)
        if sampler.num_examples > _LARGE:
            chosen = np.linspace(0, last, min(_CHUNKS, last + 1)).astype(int)
        self._watched = np.isin(np.arange(last + 1), [*chosen, *self._borders])
        self._width = width
        self.seeds = [seed, seed ^ 1 << 127]
        first = _EPOCHS if sampler.num_examples <= _SMALL else 3
        first_epochs = range(min(first if sampler.num_examples <= _LARGE else 1, sampler.epochs))
        last_epochs = sorted({max(0, sampler.epochs - 2), sampler.epochs - 1} - {*first_epochs})
        runs = [first_epochs]
        if last_epochs:
            runs.append(range(last_epochs[0], last_epochs[-1] + 1))
        self.read = [epoch for epochs in runs for epoch in self._read(0, epochs)]
        self.read += self._read(1, range(1))
        if not last_epochs and sampler.epochs > 1:  # else a source has begun at a late epoch
            [resumed], read = self._read(0, first_epochs[-1:]), self.read[len(first_epochs) - 1]
            if not np.array_equal(resumed.keys(), read.keys()):
                self._wrong(f"a run that resumes at epoch {first_epochs[-1]} reads other batches")
        cap = sampler.shard_batch_size
        self.cut = not sampler.accumulates and cap < sampler.num_examples
        self.cut = self.cut and any((epoch.sizes >= cap).any() for epoch in self.read)
        self.drawn = [self._planned(e.seed, e.number) for e in self.read] if self.cut else self.read

    def _read(self, number: int, epochs: range) -> Iterator[Epoch]:
        source = BatchSource(self.sampler, self.seeds[number], read_ahead=number == 0)
        pieces = self._pieces(source, epochs, shards=number == 0)
        for epoch, epoch_pieces in itertools.groupby(pieces, lambda piece: piece[0]):
            yield self._epoch(number, epoch, (entry[1:] for entry in epoch_pieces))

    def _pieces(
        self, source: BatchSource, epochs: range, *, shards: bool
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields epoch, examples and steps of blocks, split where epochs end."""
        length = self.sampler.steps_per_epoch
        bounds = {"first_step": epochs.start * length, "stop": epochs.stop * length}
        for steps, block in plan_blocks(source, **bounds, block_steps=_BLOCK_STEPS):
            if shards and steps.start == 0:
                self._compare_shards(block)
            examples, at_steps = self._entries(block, steps.start)
            del block
            for epoch in range(steps.start // length, -(-steps.stop // length)):
                in_epoch = slice(*np.searchsorted(at_steps, [epoch * length, (epoch + 1) * length]))
                yield epoch, examples[in_epoch], at_steps[in_epoch] - epoch * length

    def _entries(self, block: IndexBlock, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples with positive weight in a block, and their steps."""
        weights, starts = block.weights, block.starts
        real = weights > 0
        if not np.array_equal(weights, real):
            self._wrong("weights are not 0 or 1")
        if real[starts[-1] :].any():
            self._wrong("a pass after the last step has rows with positive weight")
        real = real[: starts[-1]]
        steps = np.arange(first, first + starts.size - 1, dtype=np.int64)
        entry_steps = np.repeat(np.repeat(steps, np.diff(starts)), np.count_nonzero(real, axis=1))
        examples = block.indices[: starts[-1]][real]
        if block.shards is not None:  # all are held, so that places are numbers of examples
            within, examples = examples, block.places[: starts[-1]][real]
            begins = [self.sampler.shard_range(k).start for k in range(self.sampler.num_shards)]
            offset = np.broadcast_to(np.array(begins)[block.shards], real.shape)[real]
            if not np.array_equal(within, examples - offset):
                self._wrong("row numbers and row numbers within a shard disagree")
        return examples, entry_steps

    def _compare_shards(self, block: IndexBlock) -> None:
        """Compares the first block with the reads of one-shard processes."""
        sampler, cap = self.sampler, self.sampler.shard_batch_size
        for shard in range(sampler.num_shards if sampler.num_shards > 1 else 0):
            source = BatchSource(sampler, self.seeds[0], shards=range(shard, shard + 1))
            shard_block = source.fill(0, int(block.num_steps), passes=len(block.indices))
            columns = slice(shard * cap, (shard + 1) * cap)
            placed = (shard_block.places + source.rows.start) * (shard_block.weights > 0)
            if not (
                np.array_equal(shard_block.indices, block.indices[:, columns])
                and np.array_equal(shard_block.weights, block.weights[:, columns])
                and np.array_equal(placed, block.places[:, columns])
                and np.array_equal(shard_block.shards, block.shards[columns])
            ):
                self._wrong(f"a process with shard {shard} alone reads other batches")

    def _planned(self, number: int, epoch: int) -> Epoch:
        starts, examples = self.sampler.plan(self.seeds[number], epoch)
        steps = np.repeat(np.arange(self.sampler.steps_per_epoch), np.diff(starts))
        return self._epoch(number, epoch, [(examples, steps)])

    def _epoch(
        self, number: int, epoch: int, entries: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Epoch:
        sampler, n, length = self.sampler, self.sampler.num_examples, self.sampler.steps_per_epoch
        sizes = np.zeros(sampler.num_shards * length, np.int64)
        present, count, keys = np.zeros(n, bool), 0, [np.empty(0, np.int64)]
        for examples, steps in entries:
            if examples.size and not (examples.min() >= 0 and examples.max() < n):
                self._wrong(f"epoch {epoch} has examples outside the data")
                continue
            count += examples.size
            present[examples] = True
            cells = steps
            if sampler.num_shards > 1:
                cells = self._shards.shard_of(examples) * length + steps
            sizes += np.bincount(cells, minlength=sizes.size)
            is_watched = self._watched[examples // self._width]
            keys.append(examples[is_watched].astype(np.int64) * length + steps[is_watched])
        ordered = np.sort(np.concatenate(keys), kind="stable")  # runs that ascend
        if (ordered[1:] == ordered[:-1]).any():
            self._wrong(f"a batch of epoch {epoch} has an example twice")
        strays = n + count - 2 * int(np.count_nonzero(present))
        shape = sampler.num_shards, length
        return Epoch(number, epoch, *np.divmod(ordered, length), sizes.reshape(shape), strays)

    def _wrong(self, fault: str) -> None:
        self._fault = self._fault or fault

    def faults(self) -> Iterator[str]:
        """Yields faults of the batches that every law excludes."""
        if self._fault:
            yield self._fault
        cap = self.sampler.shard_batch_size
        epochs = [epoch for epoch in self.read if epoch.seed == 0]
        for epoch in epochs[:3] + epochs[3:][-3:]:
            if self._differs(epoch):
                yield f"batches of epoch {epoch.number} differ from `participations`"
        for read, planned in zip(self.read, self.drawn, strict=True):
            if self.cut and not np.array_equal(read.sizes, np.minimum(planned.sizes, cap)):
                yield f"batches of epoch {read.number} are not truncated to {cap:,} rows"
        yield from cut_faults(self.sampler, self.seeds[0])
        yield from _secret_faults(self.sampler, self.seeds[0])

    def _differs(self, epoch: Epoch) -> bool:
        """Returns True if some chunks differ from `participations`, entry by entry."""
        sampler, length = self.sampler, self.sampler.steps_per_epoch
        rows = [
            sampler.participations(self.seeds[0], epoch.number, chunk) for chunk in self._borders
        ]
        expected = np.concatenate([x.astype(np.int64) * length + steps for x, steps in rows])
        keys, width = epoch.keys(), self._width * length
        edges = [np.searchsorted(keys, [k * width, (k + 1) * width]) for k in self._borders]
        actual = np.concatenate([keys[slice(*edge)] for edge in edges])
        if np.array_equal(np.sort(expected), actual):
            return False
        missing = np.setdiff1d(expected, actual)
        if self.cut:  # a truncated batch lacks rows
            examples, steps = np.divmod(missing, length)
            full = epoch.sizes[self._shards.shard_of(examples), steps] >= sampler.shard_batch_size
            missing = missing[~full]
        return bool(missing.size or np.setdiff1d(actual, expected).size)

    def repeated(self, law: RowLaw) -> str:
        """Describes draws that are wrongly equal or different; else empty."""
        if law.units is not None:
            return ""
        fixed = None if law.redrawn else self.drawn[0].keys()
        watched = [self.sampler.chunk_range(int(chunk)) for chunk in np.flatnonzero(self._watched)]
        movable = [rows for rows in watched if _movable(law, rows) >= _MOVABLE]
        names_by_digest: dict[bytes, str] = {}
        for epoch in self.drawn:
            if fixed is not None and epoch.seed == 0 and not np.array_equal(fixed, epoch.keys()):
                return f"epoch {epoch.number} differs from epoch 0, but equal epochs are claimed"
            if fixed is not None and epoch.seed == 0 and epoch.number:
                continue
            keys, length = epoch.keys(), self.sampler.steps_per_epoch
            for rows in movable:
                bounds = np.searchsorted(keys, [rows.start * length, rows.stop * length])
                relative = keys[slice(*bounds)] - rows.start * length
                digest = hashlib.blake2b(relative.tobytes(), digest_size=16).digest()
                examples = f"examples {rows.start:,} to {rows.stop - 1:,}"
                name = f"epoch {epoch.number} of seed {epoch.seed}, {examples}"
                if digest in names_by_digest:
                    return f"{names_by_digest[digest]} and {name} are the same draw"
                names_by_digest[digest] = name
        return ""


def _movable(law: RowLaw, rows: range) -> float:
    """Estimates the sum of min(p, 1 - p) over the rates p of rows, from the median of a few."""
    size = min(_SAMPLED, len(rows))
    examples = rows.start + (2 * np.arange(size) + 1) * len(rows) // (2 * size)
    rates = law.rate(examples[:, None], np.arange(law.steps_per_epoch))
    rates = np.broadcast_to(rates, (size, law.steps_per_epoch))
    return float(np.median(np.minimum(rates, 1 - rates).sum(axis=1))) * len(rows)


def _law_faults(
    draws: Draws, law: RowLaw, claimed: BatchSampler, bands: int
) -> Iterator[str]:  # fmt: skip
    """Yields faults of the draws under the claimed law."""
    sampler, priced = draws.sampler, law.steps_per_epoch * law.epochs
    if law.units is not None and law.units.shape[1] != sampler.num_examples:
        n = law.units.shape[1]
        yield f"units of {n:,} examples are claimed, but {sampler.num_examples:,} are drawn"
    if not law.once and sampler.num_steps > priced:
        yield f"the run has {sampler.num_steps:,} steps, but the cost covers {priced:,}"
    if law.once:
        most = max(int(np.bincount(e.examples, minlength=1).max()) for e in draws.drawn)
        if most * sampler.epochs > law.epochs:
            times = f"{most * sampler.epochs:,} times, but the cost covers {law.epochs:,}"
            yield f"an example takes part {times}"
    nearest = min(claimed.separation, _separation(draws, law)) if bands > 1 else bands
    if nearest < bands:
        yield f"steps of an example are {nearest} apart, too near for noise of {bands} bands"
    if law.any_order and claimed is not sampler:
        return
    if sampler.steps_per_epoch != law.steps_per_epoch:
        yield (
            f"an epoch has {sampler.steps_per_epoch:,} steps, and {law.steps_per_epoch:,} are "
            "claimed"
        )
        return
    for epoch in draws.drawn:
        yield from _epoch_faults(epoch, law)
    if repeated := draws.repeated(law):
        yield repeated


def _epoch_faults(epoch: Epoch, law: RowLaw) -> Iterator[str]:
    name = f"in epoch {epoch.number}"
    if law.once and epoch.strays:
        yield f"every example takes part once an epoch, and {epoch.strays:,} do not {name}"
    if law.batch_sizes is not None and not np.array_equal(epoch.sizes.sum(0), law.batch_sizes):
        yield f"batches have other sizes than claimed {name}"
    if law.certain and np.any(law.rate(epoch.examples, epoch.steps) != 1):
        yield f"examples are in other steps than in the claimed order {name}"
    if law.cycle_length > 1 and np.any((epoch.examples - epoch.steps) % law.cycle_length):
        yield f"examples take part in steps of other groups {name}"
    if law.units is not None:
        for level, most in enumerate(law.most_units):
            if np.unique(law.units[level, epoch.examples]).size > most:
                yield f"a batch holds more than {most} units of level {level + 1} {name}"


def _separation(draws: Draws, law: RowLaw) -> int:
    """Returns the smallest distance between two steps of one example.

    Steps under both seeds count together; if the law prices any order, each seed counts alone.
    """
    length, num_steps = draws.sampler.steps_per_epoch, draws.sampler.num_steps
    entries = np.cumsum([epoch.examples.size for epoch in draws.drawn])
    epochs = draws.drawn[: max(2, int(np.searchsorted(entries, _SEPARATED)))]
    if len({epoch.seed for epoch in epochs}) == 1:
        epochs = [*epochs, draws.drawn[-1]]
    nearest = num_steps
    for together in [[0], [1]] if law.any_order else [[0, 1]]:
        keys = [
            epoch.examples * num_steps + epoch.steps + epoch.number * length
            for epoch in epochs
            if epoch.seed in together
        ]
        examples, steps = np.divmod(np.unique(np.concatenate(keys)), num_steps)
        apart = np.diff(steps)[np.diff(examples) == 0]
        nearest = min(nearest, int(apart.min(initial=num_steps)))
    return nearest


def _secret_faults(sampler: BatchSampler, seed: int) -> Iterator[str]:
    """Yields epochs whose batches depend on another epoch's seed."""
    used_seeds: set[int] = set()

    def plan(seed: int, epoch: int, *shard: int) -> EpochPlan:
        """Records the seed of an epoch's plan."""
        used_seeds.add(seed)
        return EpochPlan(np.zeros(sampler.steps_per_epoch + 1, np.int64), np.zeros(0, np.int32))

    def passes(members: np.ndarray, seed: int, *step_and_shard: int) -> list[np.ndarray]:
        """Records the seed of a batch's passes."""
        used_seeds.add(seed)
        return [members]

    recorder = copy.copy(sampler)  # of empty batches
    for name, method in {"plan": plan, "shard_plan": plan, "passes": passes}.items():
        object.__setattr__(recorder, name, method)
    for epoch in sorted({0, min(1, sampler.epochs - 1), sampler.epochs - 1}):
        used_seeds.clear()
        source = BatchSource(recorder, lambda drawn: seed + drawn)
        source.passes_by_shard(epoch * sampler.steps_per_epoch)
        if used_seeds != {seed + sampler.drawn_epoch(epoch)}:
            yield f"epoch {epoch} is drawn or truncated with the seed of another epoch"
