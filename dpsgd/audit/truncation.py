"""Checks passes of batches that exceed a sampler's cap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samplers import BatchSampler
from samplers.base import stated_law


def some_members(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Samples examples, always with the first and the last.

    Args:
      rng: Generator that chooses the examples.
      n: Number of examples.
      size: Number of examples to return, at most n.

    Returns:
      Indices of examples, ascending: int32[size].
    """
    chosen = rng.permutation(n)[:size] if n <= 8 * size else np.unique(rng.integers(0, n, 2 * size))
    chosen = np.setdiff1d(rng.permutation(chosen)[:size], [0, n - 1])[: max(0, size - 2)]
    return np.union1d(chosen, [0, n - 1][: size - chosen.size]).astype(np.int32)


def cuts(sampler: BatchSampler) -> bool:
    """Returns True if batches may exceed a shard's cap."""
    law = stated_law(sampler)
    fixed = law is None or law.batch_sizes is not None
    return sampler.shard_batch_size < len(sampler.shard_range(0)) and not fixed


def cut_faults(sampler: BatchSampler, seed: int) -> Iterator[str]:
    """Yields faults of truncated batches.

    Args:
      sampler: Sampler whose batches may exceed the cap.
      seed: Seed of the tested batches.
    """
    if not cuts(sampler):
        return
    n, cap = len(sampler.shard_range(0)), sampler.shard_batch_size
    rng = np.random.default_rng(seed % 2**128)
    for size in sorted({cap + 1, *(min(k, n) for k in (2 * cap, 2 * cap + 1, 4 * cap))}):
        members = some_members(rng, n, size)
        for shard in {0, sampler.num_shards - 1}:
            passes = sampler.passes(members, seed, 0, shard)
            rows = np.concatenate(passes)
            expected_size = size if sampler.accumulates else cap
            batch = f"batch of {size:,} rows with cap {cap:,}:"
            if max(map(len, passes)) > cap:
                yield f"{batch} a pass exceeds the cap"
            if np.unique(rows).size < rows.size:
                yield f"{batch} an example is taken twice"
            if rows.size != expected_size or not np.isin(rows, members).all():
                yield f"{batch} {rows.size:,} rows are taken, not {expected_size:,}"
            if not sampler.accumulates and len(passes) > 1:
                yield f"{batch} {len(passes)} passes are taken, not one"
