"""Plans of blocks, made ahead of them: who takes part, and for data on the host, rows."""

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
    """Returns how many passes a plan of so many steps has room for, at least two.

    With one row, a compiler adds up in another order: a step by itself would have other bits.
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
    """Returns the rows that a plan of NumPy arrays names, and the plan with their places in these.

    Device after device has the rows of its places in all passes, and places are counted within it.
    """
    passes, width = plan.indices.shape
    held = plan.indices if plan.places is None else plan.places
    parts = held.reshape(passes, devices, width // devices)
    rows = parts.swapaxes(0, 1).ravel()
    places = np.arange(rows.size // devices, dtype=np.int32).reshape(passes, -1)
    places = np.tile(places, devices)
    return jax.tree.map(lambda column: column[rows], data), plan._replace(places=places)


def widened(plan: IndexBlock, width: int, parts: int = 1) -> IndexBlock:
    """Returns a plan of `width` columns: each equal part is filled up by weight 0 at its end."""

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
