"""Plans of blocks, made ahead: participants and, for data on the host, rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock

PyTree = Any
_T = TypeVar("_T")


def most_passes(sampler: BatchSampler, block_steps: int) -> int:
    """Returns the number of passes that a plan has room for, at least two.

    With one row a compiler adds up in another order: a step alone would have other bits.
    """
    return max(2, block_steps, sampler.max_passes)


def plan_blocks(
    source: BatchSource,
    *,
    first_step: int,
    block_steps: int,
    stop: int | None = None,
    ends: int | None = None,
) -> Iterator[tuple[range, IndexBlock]]:
    """Yields the steps and plan of every block.

    Args:
      source: Source of the batches.
      first_step: First step of the first block.
      block_steps: Number of steps of a full block.
      stop: End of the last block; by default the sampler's number of steps.
      ends: Period in steps: a block ends at each multiple.
    """
    sampler = source.sampler
    # Every block has the shapes of a full one, so that the whole run is one compiled program.
    passes = most_passes(sampler, block_steps)
    step = first_step
    stop = sampler.num_steps if stop is None else stop
    while step < stop:
        end = stop if ends is None else min(stop, step - step % ends + ends)
        block = source.fill(step, min(step + block_steps, end), steps=block_steps, passes=passes)
        steps = range(step, step + int(block.num_steps))
        yield steps, block
        del block  # it may be large: not to be kept while the next one is made
        step = steps.stop


def with_rows(data: PyTree, plan: IndexBlock, devices: int = 1) -> tuple[PyTree, IndexBlock]:
    """Returns the rows that a plan names, and the plan with their places.

    Args:
      data: Columns [examples, ...].
      plan: Plan of NumPy arrays.
      devices: Number of devices. The rows are ordered by device, then pass, and places count within
        a device.
    """
    passes, width = plan.indices.shape
    indices = plan.indices if plan.places is None else plan.places
    indices_by_device = indices.reshape(passes, devices, width // devices)
    rows = indices_by_device.swapaxes(0, 1).ravel()
    places = np.arange(rows.size // devices, dtype=np.int32).reshape(passes, -1)
    places = np.tile(places, devices)
    return jax.tree.map(lambda column: column[rows], data), plan._replace(places=places)


def pad_columns(plan: IndexBlock, width: int, parts: int = 1) -> IndexBlock:
    """Returns a plan of `width` columns, each of `parts` equal parts padded by weight 0."""

    def wide(x: np.ndarray | None) -> np.ndarray | None:
        if x is None:
            return None
        x = x.reshape(*x.shape[:-1], parts, -1)
        x = np.pad(x, [*((0, 0),) * (x.ndim - 1), (0, width // parts - x.shape[-1])])
        return x.reshape(*x.shape[:-2], width)

    return plan._replace(
        indices=wide(plan.indices),
        weights=wide(plan.weights),
        places=wide(plan.places),
        shards=wide(plan.shards),
    )


def select_columns(plan: IndexBlock, columns: slice) -> IndexBlock:
    """Returns a plan of some columns of another."""
    places = None if plan.places is None else plan.places[:, columns]
    shards = None if plan.shards is None else plan.shards[columns]
    return plan._replace(
        indices=plan.indices[:, columns],
        weights=plan.weights[:, columns],
        places=places,
        shards=shards,
    )


def in_background(items: Iterator[_T]) -> Generator[_T]:
    """Yields `items`; a thread makes each while the previous one is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="blocks") as background:
        coming = background.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = background.submit(next, items, None)
            yield item
