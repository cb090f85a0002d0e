"""Balls-and-bins drawn in another way: a shuffled order, cut into batches of binomial sizes."""

from __future__ import annotations

import numpy as np

from samplers import BallsAndBins, Shuffle
from samplers.base import MAX_SHARDS, EpochPlan, chunk_ranges
from samplers.randomness import Key, Stream, uniform_integers


def plan_after_shuffle(sampler: BallsAndBins, seed: int, epoch: int) -> EpochPlan:
    """Draws one epoch of the sampler's law as a shuffled order that is cut at random.

    The batch sizes are those of n examples in uniform bins: each is binomial given the sizes
    before it, and independent of the order (docs/explanation/laws-of-participation.md). A seed
    serves either this draw or `BallsAndBins.plan`.

    Args:
      sampler: Balls-and-bins of one group.
      seed: The sampling secret, an integer >= 0 of any size.
      epoch: Epoch, counted from 0.

    Raises:
      ValueError: If `cycle_length` is not 1.
    """
    if sampler.cycle_length != 1:
        raise ValueError(f"cycle_length must be 1 after a shuffle, got {sampler.cycle_length}")
    drawn, bins = sampler.drawn_epoch(epoch), sampler.steps_per_epoch
    sizes = np.zeros(bins, dtype=np.int64)
    for chunk, rows in enumerate(chunk_ranges(sampler.num_examples)):
        # The words of no shard's buckets: sizes and order must be independent.
        key = Key(seed, Stream.PARTICIPATION, drawn, MAX_SHARDS << 32 | chunk)
        sizes += np.bincount(uniform_integers(key, bins, len(rows)), minlength=bins)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    order = Shuffle(sampler.num_examples, sampler.batch_size).shuffled(seed, drawn)
    return EpochPlan(starts, np.concatenate(list(map(np.sort, np.split(order, starts[1:-1])))))
