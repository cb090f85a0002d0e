"""The full batch: every example takes part in every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accounting import GaussianProfile, PrivacyProfile
from samplers.base import (
    MAX_EXAMPLES,
    BatchSampler,
    EpochPlan,
    Participations,
    check_steps,
    positive_integer,
)
from samplers.row_law import KnownOrder


@dataclass(frozen=True)
class FullBatch(BatchSampler):
    """Every example takes part in every step: E = `epochs` steps, each a sum over all rows.

    It is the deterministic order with b = n, read in passes of `max_batch_size` rows, so that a
    program's shape does not grow with the data.

    Guarantees:
      * Each example takes part exactly once a step, and nothing is random: there is no
        amplification, and no seed need be kept secret.
    """

    num_examples: int
    """Size n of the training set, a public number."""
    epochs: int = 1
    """Number E of steps."""
    max_batch_size: int = 4_096
    """Rows of one pass, at most."""

    def __post_init__(self) -> None:
        for name in ("num_examples", "epochs", "max_batch_size"):
            object.__setattr__(self, name, positive_integer(name, getattr(self, name)))
        if self.num_examples > MAX_EXAMPLES:
            raise ValueError(f"num_examples must be at most 2^31 - 1, got {self.num_examples}")
        check_steps(self.epochs)

    @property
    def steps_per_epoch(self) -> int:
        """1: an epoch is one step."""
        return 1

    @property
    def expected_batch_size(self) -> float:
        """The public constant by which the noisy sum is divided: n."""
        return float(self.num_examples)

    @property
    def padded_batch_size(self) -> int:
        """Rows of one pass."""
        return min(self.num_examples, self.max_batch_size)

    @property
    def accumulates(self) -> bool:
        """Whether a step needs several passes."""
        return self.num_examples > self.max_batch_size

    @property
    def max_passes(self) -> int:
        """Passes of a step."""
        return -(-self.num_examples // self.padded_batch_size)

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the profile of one Gaussian release with noise sigma / sqrt(E): tight.

        As for `Deterministic`: an example enters E sums with a vector of norm at most 1 each.
        """
        return GaussianProfile(noise_multiplier / math.sqrt(self.epochs))

    def row_law(self) -> KnownOrder:
        """Returns the law: every example in the one step of every epoch."""
        return KnownOrder.of(self.shards, self.num_examples, self.epochs)

    def drawn_epoch(self, epoch: int) -> int:
        """Returns 0: all epochs are alike."""
        return 0

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk; `seed` and `epoch` do not matter."""
        del seed, epoch
        rows = self.chunk_range(chunk)
        return Participations(
            np.arange(rows.start, rows.stop, dtype=np.int32), np.zeros(len(rows), np.int32)
        )

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """Returns the one step of an epoch: all rows, which need not be sorted by step."""
        del seed, epoch
        n = self.num_examples
        return EpochPlan(np.array([0, n]), np.arange(n, dtype=np.int32))

    def passes(self, members: np.ndarray, seed: int, step: int, shard: int = 0) -> list[np.ndarray]:
        """Cuts all rows into passes."""
        del seed, step, shard
        size = self.padded_batch_size
        return [members[start : start + size] for start in range(0, members.size, size)]
