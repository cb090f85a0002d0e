"""What a block of steps reads, made ahead of it: who takes part, and for data on the host, rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from samplers import BatchSampler, BatchSource, IndexBlock

PyTree = Any
_T = TypeVar("_T")


def most_passes(sampler: BatchSampler, block_steps: int) -> int:
    """Returns how many passes a plan of so many steps has room for, at least two.

    Of a plan's only row a compiler knows which it is, and adds up what it names in another order:
    steps that are dispatched one by one would have other bits than the same steps in blocks.
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
    """Yields steps and plan of every block from `first_step` to the sampler's last, or `stop`.

    A block ends at every multiple of `ends`, wherever the first one began.
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
    """Returns the rows of the data that a plan names, and the plan with their places among these.

    Args:
      data: Pytree of NumPy arrays, in memory or memory-mapped, with one row per example; of shards,
        with the rows that are held.
      plan: Of NumPy arrays.
      devices: Of how many the rows are: device after device has those of its places in all passes,
        which are counted within it.
    """
    passes, width = plan.indices.shape
    held = plan.indices if plan.places is None else plan.places
    parts = held.reshape(passes, devices, width // devices)
    rows = parts.swapaxes(0, 1).ravel()
    places = np.arange(rows.size // devices, dtype=np.int32).reshape(passes, -1)
    places = np.tile(places, devices)
    return jax.tree.map(lambda column: column[rows], data), plan._replace(places=places)


def widened(plan: IndexBlock, width: int, parts: int = 1) -> IndexBlock:
    """Returns a plan of so many columns: those that it had not, at the end of each part, weigh 0.

    Args:
      plan: Of NumPy arrays.
      width: Of the columns, a multiple of `parts`.
      parts: Equal runs of columns, each of which is filled up by itself.
    """

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


def cut(plan: IndexBlock, columns: slice) -> IndexBlock:
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
    """Yields `items`; a thread makes each while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="blocks") as background:
        coming = background.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = background.submit(next, items, None)
            yield item
