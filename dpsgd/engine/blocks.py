"""Plans of blocks, made ahead: participants and, for data on the host, rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from dpsgd.engine.sources import take_rows
from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock

PyTree = Any
_T = TypeVar("_T")


def most_passes(sampler: BatchSampler, block_steps: int) -> int:
    """Returns a plan's room, a number of passes >= 2.

    With one row a compiler adds up in another order: a step alone would have other bits.

    Args:
      sampler: Sampler of the run.
      block_steps: Number of steps of a full block.

    >>> from samplers import Deterministic
    >>> most_passes(Deterministic(100, batch_size=10), 1)
    2
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

    The ledger and callers see where blocks end, and the sizes of batches are as secret as their
    examples: the ends do not depend on the batches. A block that needs more passes than
    `most_passes` has a longer plan.

    Args:
      source: Source of the batches.
      first_step: First step of the first block.
      block_steps: Largest number of steps of a block, fewer if they could need more passes than the
        plan has room for.
      stop: End of the last block; by default the sampler's number of steps.
      ends: Period in steps: a block ends at each multiple.

    >>> from samplers import Deterministic
    >>> source = BatchSource(Deterministic(100, batch_size=10), 0)
    >>> [steps for steps, _ in plan_blocks(source, first_step=4, block_steps=4)]
    [range(4, 8), range(8, 10)]
    """
    sampler = source.sampler
    # Every block has the shapes of a full one, so that the whole run is one compiled program.
    passes = most_passes(sampler, block_steps)
    steps_at_once = max(1, min(block_steps, passes // sampler.max_passes))
    step = first_step
    stop = sampler.num_steps if stop is None else stop
    while step < stop:
        limit = stop if ends is None else min(stop, step - step % ends + ends)
        steps = range(step, min(step + steps_at_once, limit))
        block = source.fill(steps.start, steps.stop, steps=block_steps, passes=passes)
        yield steps, block
        del block  # it may be large: not to be kept while the next one is made
        step = steps.stop


def with_rows(data: PyTree, plan: IndexBlock, devices: int = 1) -> tuple[PyTree, IndexBlock]:
    """Returns a plan's rows, and the plan with their places.

    Args:
      data: Columns [examples, ...], of arrays or of a row source.
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
    return take_rows(data, rows), plan._replace(places=places)


def pad_columns(plan: IndexBlock, width: int, parts: int = 1) -> IndexBlock:
    """Returns a plan padded to `width` columns of weight 0.

    Args:
      plan: Plan of NumPy arrays.
      width: Number of columns of the result.
      parts: Number of equal parts of the columns, each padded at its end.
    """

    def wide(x: np.ndarray) -> np.ndarray:
        """Returns columns with zeros at the end of each part."""
        if x.shape[-1] == width:
            return x
        x = x.reshape(*x.shape[:-1], parts, -1)
        x = np.pad(x, [*((0, 0),) * (x.ndim - 1), (0, width // parts - x.shape[-1])])
        return x.reshape(*x.shape[:-2], width)

    return _map_columns(wide, plan)


def select_columns(plan: IndexBlock, columns: slice) -> IndexBlock:
    """Returns a plan of some columns of another.

    Args:
      plan: Plan of NumPy arrays.
      columns: Range of columns to take.
    """
    return _map_columns(lambda x: x[..., columns], plan)


def _map_columns(function: Callable[[np.ndarray], np.ndarray], plan: IndexBlock) -> IndexBlock:
    """Returns a plan with a function applied to each array with a last axis of columns."""
    names = "indices", "weights", "places", "shards"
    return plan._replace(**jax.tree.map(function, {name: getattr(plan, name) for name in names}))


def in_background(items: Iterator[_T]) -> Generator[_T]:
    """Yields `items`, each made while the previous is in use.

    A thread makes them; None ends the iteration.

    >>> list(in_background(iter("abc")))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, thread_name_prefix="blocks") as background:
        coming = background.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = background.submit(next, items, None)
            yield item
