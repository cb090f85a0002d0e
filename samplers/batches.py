"""The columns of a sampler's participation matrix, as index batches of fixed shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from samplers.base import BatchSampler
from samplers.plans import EpochPlan, example_dtype
from samplers.randomness import check_seed


class IndexBatch(NamedTuple):
    """Row indices and weights of one pass of the fixed-shape program."""

    indices: np.ndarray
    """Examples; 0 where padded: int32[padded_batch_size]."""
    weights: np.ndarray
    """1 for an example, 0 for padding: float32[padded_batch_size]."""


class IndexBlock(NamedTuple):
    """The examples of consecutive steps, in fixed shapes.

    Step j of the block is the passes `starts[j] : starts[j + 1]`. Most samplers need one pass a
    step; a batch larger than one pass is summed over several before its single noisy update. Of a
    sampler of several shards, columns are the shards that are held, `shard_batch_size` each.
    """

    indices: Any
    """Examples, counted within their shard; 0 where padded: int32[passes, columns], with
    columns = padded_batch_size if all shards are held."""
    weights: Any
    """1 for an example, 0 for padding: float32[passes, columns]."""
    starts: Any
    """Index of each step's first pass: int32[steps + 1]."""
    num_steps: Any
    """Steps of the block that are real: int32 scalar."""
    places: Any = None
    """Places of the examples among the rows of all held shards, or among the rows that travel with
    the block; 0 where padded: int32[passes, columns], int64 above 2^31 - 1 rows. None where
    `indices` are those places."""
    shards: Any = None
    """The shard of each column, where the sampler has several: int32[columns]."""


class BatchSource:
    """Random access to the batches of one run.

    A batch is a pure function of (sampler, seed, step): to resume is to know one integer. The plan
    of the epoch that was read last is kept (4 bytes an example), so batches are best read epoch by
    epoch. To be read by one thread at a time.

    Args:
      sampler: The sampler that draws.
      seed: The sampling secret: an integer >= 0 of any size, in real runs of 128 bits or more from
        the operating system; or a function of the drawn epoch that returns its secret.
      shards: Consecutive shards that are held: no others are drawn, nor are their rows needed. By
        default all.
      read_ahead: Whether a thread draws the plan of each next epoch while one is read, and keeps
        it.

    Attributes:
      sampler: The sampler that draws.
      shards: Which shards are held.
      rows: The examples that they hold; `places` are counted from the first.

    Raises:
      ValueError: `seed` is negative or no integer, or there are not these shards.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        seed: int | Callable[[int], int],
        *,
        shards: range | None = None,
        read_ahead: bool = False,
    ) -> None:
        self.sampler = sampler
        self.shards = range(sampler.num_shards) if shards is None else shards
        if not (
            self.shards.step == 1
            and 0 <= self.shards.start < self.shards.stop <= sampler.num_shards
        ):
            raise ValueError(
                f"shards must be consecutive shards of the sampler's {sampler.num_shards}, got "
                f"{shards}"
            )
        first, last = (sampler.shard_range(shard) for shard in (self.shards[0], self.shards[-1]))
        self.rows = range(first.start, last.stop)
        self._seed: Callable[[int], int] = seed if callable(seed) else _constant(check_seed(seed))
        self._background = ThreadPoolExecutor(1, "next epoch") if read_ahead else None
        self._plan: tuple[int, list[EpochPlan]] | None = None
        self._next: tuple[int, Future[list[EpochPlan]]] | None = None

    def __repr__(self) -> str:
        return f"BatchSource({self.sampler!r}, seed=<secret>)"

    def _draw(self, epoch: int) -> list[EpochPlan]:
        """Returns the plans of the shards that are held."""
        sampler = self.sampler
        if sampler.num_shards == 1:
            return [sampler.plan(self._seed(epoch), epoch)]
        return [sampler.shard_plan(self._seed(epoch), epoch, shard) for shard in self.shards]

    def _plan_of(self, epoch: int) -> list[EpochPlan]:
        sampler = self.sampler
        draw_epoch = sampler.drawn_epoch(epoch)
        if self._plan is None or self._plan[0] != draw_epoch:
            self._plan = None  # the old plan's memory is free while the new one is drawn
            if self._next is not None and self._next[0] == draw_epoch:
                self._plan = draw_epoch, self._next[1].result()
            else:
                self._plan = draw_epoch, self._draw(draw_epoch)
            self._next = None
            if self._background is not None and epoch + 1 < sampler.epochs:
                following = sampler.drawn_epoch(epoch + 1)
                if following != draw_epoch:
                    self._next = following, self._background.submit(self._draw, following)
        return self._plan[1]

    def passes(self, step: int) -> list[IndexBatch]:
        """Returns the passes of a step, several where `accumulates` is true.

        Indices are counted among the rows of the held shards; with all shards held, they are the
        examples.

        Raises:
          ValueError: `step` is not in [0, num_steps).
        """
        block = self.fill(step, step + 1)
        indices = block.indices if block.places is None else block.places
        return [IndexBatch(*row) for row in zip(indices, block.weights, strict=True)]

    def batch(self, step: int) -> IndexBatch:
        """Returns the batch of a step that has one pass.

        Raises:
          ValueError: `step` is not in [0, num_steps), or the batch needs several passes.
        """
        passes = self.passes(step)
        if len(passes) > 1:
            raise ValueError(
                f"the batch of step {step} needs {len(passes)} passes of "
                f"{self.sampler.padded_batch_size} examples: read them with passes()"
            )
        return passes[0]

    def passes_by_shard(self, step: int) -> list[tuple[np.ndarray, ...]]:
        """Returns a step's passes, each a tuple of shards' examples.

        >>> from samplers import Deterministic
        >>> source = BatchSource(Deterministic(10, 4, num_shards=2), seed=0)
        >>> [[part.tolist() for part in parts] for parts in source.passes_by_shard(0)]
        [[[0, 1], [0, 1]]]
        """
        sampler, length = self.sampler, self.sampler.steps_per_epoch
        plans, seed = self._plan_of(step // length), self._seed(sampler.drawn_epoch(step // length))
        shard_passes = [
            sampler.passes(plan.members(step % length), seed, step, shard)
            for shard, plan in zip(self.shards, plans, strict=True)
        ]
        return list(zip(*shard_passes, strict=True))

    def fill(self, start: int, stop: int, *, steps: int = 0, passes: int = 0) -> IndexBlock:
        """Returns the padded passes of the steps [start, stop), in order.

        Args:
          start: First step.
          stop: Step after the last one.
          steps: Least number of steps of the block; those added at its end have no pass.
          passes: Least number of rows of the plan, one per pass; those added at its end are empty.

        Raises:
          ValueError: a step is not in [0, num_steps).
        """
        members: list[tuple[np.ndarray, ...]] = []  # of each pass, shard after shard
        starts = [0]
        sampler = self.sampler
        for step in range(start, stop):
            if not 0 <= step < sampler.num_steps:
                raise ValueError(f"step must be in [0, {sampler.num_steps}), got {step}")
            members += self.passes_by_shard(step)
            starts.append(len(members))
        num_steps, cap = len(starts) - 1, sampler.shard_batch_size
        shape = max(len(members), passes), len(self.shards) * cap
        indices, weights = zeros(shape, np.int32), zeros(shape, np.float32)
        places = zeros(shape, example_dtype(len(self.rows))) if sampler.num_shards > 1 else None
        begins = [sampler.shard_range(shard).start - self.rows.start for shard in self.shards]
        for row, shard_members in enumerate(members):
            for k, examples in enumerate(shard_members):
                if examples.size > cap:
                    raise ValueError(
                        f"a pass of the steps {start} to {start + num_steps - 1} has "
                        f"{examples.size} rows of shard {self.shards[k]}: the sampler's passes() "
                        f"must return at most shard_batch_size = {cap} rows"
                    )
                columns = slice(k * cap, k * cap + examples.size)
                indices[row, columns] = examples
                weights[row, columns] = 1.0
                if places is not None:
                    places[row, columns] = examples + places.dtype.type(begins[k])
        starts += [len(members)] * (steps - num_steps)
        shards = None
        if places is not None:
            shards = np.repeat(np.array(self.shards, np.int32), cap)
        return IndexBlock(
            indices, weights, np.asarray(starts, np.int32), np.int32(num_steps), places, shards
        )


def _constant(seed: int) -> Callable[[int], int]:
    return lambda epoch: seed


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns zeros that JAX on a CPU reads without a copy.

    Aligned to 64 bytes; they take no memory until they are written.
    """
    size, aligned = math.prod(shape) * np.dtype(dtype).itemsize, 64
    raw = np.zeros(size + aligned, np.uint8)
    first = -raw.ctypes.data % aligned
    return raw[first : first + size].view(dtype).reshape(shape)


def batch(sampler: BatchSampler, seed: int, step: int) -> IndexBatch:
    """Returns the batch of one step, a pure function.

    Each call draws an epoch; read several steps with `BatchSource`.

    >>> from samplers import Deterministic
    >>> batch(Deterministic(num_examples=5, batch_size=3), seed=0, step=1)
    IndexBatch(indices=array([3, 4, 0], dtype=int32), weights=array([1., 1., 0.], dtype=float32))

    Args:
      sampler: The sampler that draws.
      seed: The sampling secret, an integer >= 0 of any size.
      step: Step, counted over the whole run.

    Raises:
      ValueError: `step` is not in [0, num_steps), or the batch needs several passes.
    """
    return BatchSource(sampler, seed).batch(step)
