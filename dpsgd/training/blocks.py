"""What a block of steps reads, made ahead of it: who takes part, and for data on the host, rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from samplers import BatchSource

PyTree = Any
_T = TypeVar("_T")


class BlockPlan(NamedTuple):
    """Who takes part in a block of consecutive steps: fixed shapes, whatever the batch sizes.

    Step j of the block is the passes `starts[j] : starts[j + 1]`. Most samplers need one pass a
    step; a batch larger than one pass is summed over several before its single noisy update.
    """

    indices: Any  # int32[passes, padded_batch_size]
    weights: Any  # float32[passes, padded_batch_size]
    starts: Any  # int32[block_steps + 1]
    num_steps: Any  # int32 scalar: steps of the block that are real
    places: Any = (
        None  # int32[passes, padded_batch_size]: where rows that travel lie in their block
    )


def plan_blocks(
    source: BatchSource, *, first_step: int, block_steps: int
) -> Iterator[tuple[range, BlockPlan]]:
    """Yields steps and plan of every block from `first_step` to the sampler's last step."""
    sampler = source.sampler
    # Every block has the shapes of a full one, so that the whole run is one compiled program.
    passes_of_a_block = max(block_steps, sampler.max_passes)
    step = first_step
    while step < sampler.num_steps:
        passes: list = []
        starts = [0]
        for t in range(step, min(step + block_steps, sampler.num_steps)):
            batch = source.passes(t)
            if passes and len(passes) + len(batch) > passes_of_a_block:
                break  # an accumulated batch does not fit: it opens the next block
            passes += batch
            starts.append(len(passes))
        done = len(starts) - 1
        room = max(passes_of_a_block, len(passes))  # more than `max_passes`: see there
        indices = np.zeros((room, sampler.padded_batch_size), np.int32)
        weights = np.zeros((room, sampler.padded_batch_size), np.float32)
        for row, batch in enumerate(passes):
            indices[row], weights[row] = batch.indices, batch.weights
        starts += [len(passes)] * (block_steps - done)
        plan = BlockPlan(indices, weights, np.asarray(starts, np.int32), np.int32(done))
        yield range(step, step + done), plan
        step += done


def with_rows(data: PyTree, plan: BlockPlan) -> tuple[PyTree, BlockPlan]:
    """Returns the rows of the data that a plan names, and the plan with their places among these.

    Args:
      data: Pytree of NumPy arrays, in memory or memory-mapped, with one row per example.
      plan: Of NumPy arrays.
    """
    rows = plan.indices.ravel()
    places = np.arange(rows.size, dtype=np.int32).reshape(plan.indices.shape)
    return jax.tree.map(lambda column: column[rows], data), plan._replace(places=places)


def in_background(items: Iterator[_T]) -> Generator[_T]:
    """Yields `items`; a thread makes each while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="blocks") as background:
        coming = background.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = background.submit(next, items, None)
            yield item
