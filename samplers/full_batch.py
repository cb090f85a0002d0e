"""The full batch: every example takes part in every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accounting.records import Count, check
from samplers.deterministic import InOrder
from samplers.plans import MAX_EXAMPLES, EpochPlan, check_steps


@dataclass(frozen=True)
class FullBatch(InOrder):
    """Includes every example in every step: E = `epochs` steps, each a sum over all rows.

    Equals the deterministic order with b = n. Rows are read in passes of `max_batch_size`, so that
    the shape of the program does not grow with the data.

    >>> sampler = FullBatch(num_examples=10_000, epochs=5)
    >>> sampler.num_steps, sampler.max_passes, sampler.padded_batch_size
    (5, 3, 4096)

    Guarantees:
      * Each example takes part exactly once a step, and nothing is random: there is no
        amplification, and no seed need be kept secret.

    Attributes:
      num_examples: Size n of the training set, a public number.
      epochs: Number E of steps.
      max_batch_size: Rows of one pass, at most.
    """

    num_examples: Count
    epochs: Count = 1
    max_batch_size: Count = 4_096

    def __post_init__(self) -> None:
        check(self)
        if self.num_examples > MAX_EXAMPLES:
            raise ValueError(f"num_examples must be at most 2^31 - 1, got {self.num_examples}")
        check_steps(self.epochs)

    @property
    def batch_size(self) -> int:
        """All examples."""
        return self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """1: an epoch is one step."""
        return 1

    @property
    def expected_batch_size(self) -> float:
        """The public divisor of the noisy sum: n."""
        return float(self.num_examples)

    @property
    def padded_batch_size(self) -> int:
        """Rows of one pass."""
        return min(self.num_examples, self.max_batch_size)

    @property
    def accumulates(self) -> bool:
        """True if a step needs several passes."""
        return self.num_examples > self.max_batch_size

    @property
    def max_passes(self) -> int:
        """Passes of a step."""
        return -(-self.num_examples // self.padded_batch_size)

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """Returns the one step of an epoch: all rows."""
        del seed, epoch
        n = self.num_examples
        return EpochPlan(np.array([0, n]), np.arange(n, dtype=np.int32))
