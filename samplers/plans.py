"""Plans: the participation matrix of one epoch, by rows of a chunk or by columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from samplers.shards import Shards

CHUNK = 65_536
"""Number of examples whose rows are drawn from one key; changing it changes every draw."""

MAX_EXAMPLES = 2**31 - 1  # of a shard: indices are int32
MAX_SHARDS = 2**15  # then products of L and n are below 2^63
MAX_STEPS = 2**31 - 1  # so is the step of a training state


class Participations(NamedTuple):
    """Nonzero entries of the participation matrix, for one chunk of examples and one epoch."""

    examples: np.ndarray
    """Examples that take part: int32[entries]; int64 if there are more than 2^31 - 1 examples."""
    steps: np.ndarray
    """Steps, counted from the epoch's first step: int32[entries]."""


class EpochPlan(NamedTuple):
    """The participation matrix of one epoch, by columns; or a shard's part of it."""

    starts: np.ndarray
    """Index of each step's first example: int64[steps_per_epoch + 1]."""
    examples: np.ndarray
    """Examples step after step: int32[entries], counted within the shard if it is of one; int64
    where there are more than 2^31 - 1. Within a step they ascend, or come block after block where
    blocks are clipped as one (`BatchSampler.clipped_shape`)."""

    def members(self, step: int) -> np.ndarray:
        """Returns a view of a step's examples: int32[size].

        >>> EpochPlan(np.array([0, 2, 3]), np.array([4, 7, 5], np.int32)).members(0)
        array([4, 7], dtype=int32)
        """
        return self.examples[self.starts[step] : self.starts[step + 1]]

    def rows(self, of: range) -> Participations:
        """Returns the entries of the examples in a range.

        >>> EpochPlan(np.array([0, 2, 3]), np.array([4, 7, 5])).rows(range(5, 8))
        Participations(examples=array([7, 5]), steps=array([0, 1], dtype=int32))
        """
        places = np.flatnonzero((self.examples >= of.start) & (self.examples < of.stop))
        steps = (np.searchsorted(self.starts, places, side="right") - 1).astype(np.int32)
        return Participations(self.examples[places], steps)


def group(entries: Participations, num_groups: int) -> EpochPlan:
    """Sorts entries by group, in linear time.

    Args:
      entries: Entries with their groups as steps, each entry once; examples ascend in each group.
      num_groups: Number of groups.
    """
    from scipy.sparse import coo_array  # not needed for a cost

    # A sparse matrix in coordinate form turned into compressed rows is a counting sort in C.
    ones = np.ones(entries.steps.size, dtype=np.int8)
    width = int(entries.examples.max(initial=0)) + 1
    matrix = coo_array((ones, (entries.steps, entries.examples)), shape=(num_groups, width))
    matrix.has_canonical_format = True  # no entry comes twice: nothing to be looked for and summed
    rows = matrix.tocsr()
    rows.sort_indices()
    examples = rows.indices.astype(entries.examples.dtype, copy=False)
    return EpochPlan(rows.indptr.astype(np.int64), examples)


def join_plans(plans: Sequence[EpochPlan], shards: Shards) -> EpochPlan:
    """Merges shards' plans: step after step, shard after shard.

    Args:
      plans: One plan per shard, with examples counted within the shard.
      shards: Shards of the examples.
    """
    if len(plans) == 1:
        return plans[0]
    starts = np.sum([plan.starts for plan in plans], axis=0)
    examples = np.empty(starts[-1], example_dtype(shards.num_examples))
    begins = starts[:-1].copy()
    for shard, plan in enumerate(plans):
        sizes = np.diff(plan.starts)
        places = np.repeat(begins - plan.starts[:-1], sizes) + np.arange(plan.examples.size)
        examples[places] = plan.examples.astype(examples.dtype) + shards.examples(shard).start
        begins += sizes
    return EpochPlan(starts, examples)


def example_dtype(num_examples: int) -> type[np.signedinteger]:
    """Returns the dtype of example indices: int32, int64 above 2^31 - 1.

    >>> example_dtype(2**31).__name__
    'int64'
    """
    return np.int32 if num_examples <= MAX_EXAMPLES else np.int64


def chunk_ranges(size: int) -> list[range]:
    """Splits `size` examples into chunks of at most `CHUNK`."""
    return [range(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def check_steps(num_steps: int) -> None:
    """Raises ValueError if a run has over 2^31 - 1 steps."""
    if num_steps > MAX_STEPS:
        raise ValueError(f"a run has at most 2^31 - 1 steps, got {num_steps}")
