"""Batches of consecutive examples: the baseline without amplification."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import accounting
from accounting import PrivacyProfile
from accounting.profile import UpperEnd
from samplers.attempts import Attempt, check_attempts, sizes_of
from samplers.base import BatchSampler
from samplers.epochs import EpochSampler
from samplers.plans import Participations, example_dtype
from samplers.row_law import KnownOrder


class InOrder(BatchSampler):
    """Sampler that draws the same batches, in the examples' order, in every epoch."""

    counts_epochs = True

    if TYPE_CHECKING:  # a field of the one sampler, a property of the other

        @property
        def batch_size(self) -> int:
            """Batch size b."""

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the tight Gaussian profile with noise sigma / sqrt(E).

        An example enters E sums with a vector v_e of norm at most 1 (in units of the clipping norm)
        and no other; the other sums, and the number of examples that share a batch with it, are the
        same for both neighbours. Also when each v_e is chosen in view of earlier releases, E
        Gaussian releases of sensitivity 1 cost at most what one release of the vector (1, ..., 1)
        costs, and E sums with noise sigma are as good as their mean with noise sigma / sqrt(E).
        Batch sizes do not enter, so a smaller last batch costs the same.

        Source: B. Balle and Y.-X. Wang, Improving the Gaussian Mechanism for Differential Privacy
        (2018), Theorem 8; J. Dong, A. Roth, W. Su, Gaussian Differential Privacy (2022), Cor. 3.3.
        """
        return accounting.GaussianProfile(noise_multiplier / math.sqrt(self.epochs))

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns the profile of one example's releases in all attempts.

        An example counts as often as the most released one of each attempt, unless all attempts
        have the same rows.
        """
        ranges = check_attempts(attempts, self.num_steps)
        sizes = [sizes_of(steps, self.steps_per_epoch) for steps in ranges]
        if same_rows:
            sizes = [sizes_of(itertools.chain(*ranges), self.steps_per_epoch)]
        most, least = sum(map(max, sizes)), max(sum(map(min, sizes)), *map(max, sizes), 0)
        upper = accounting.GaussianProfile(noise_multiplier / math.sqrt(most))
        if least == most:
            return upper
        return UpperEnd(upper, accounting.GaussianProfile(noise_multiplier / math.sqrt(least)))

    def row_law(self) -> KnownOrder:
        """Returns the law of consecutive batches; any known order costs as much."""
        return KnownOrder.of_size(self.shards, self.batch_size, self.epochs)

    def drawn_epoch(self, epoch: int) -> int:
        """Returns 0: all epochs are equal."""
        return 0

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk, alike for all seeds and epochs."""
        del seed, epoch
        rows = self.chunk_range(chunk)
        examples = np.arange(rows.start, rows.stop, dtype=example_dtype(self.num_examples))
        if self.num_shards == 1:
            return Participations(examples, examples // np.int32(self.batch_size))
        places = self.shards.in_turn(examples)
        return Participations(examples, (places // self.batch_size).astype(np.int32))


@dataclass(frozen=True)
class Deterministic(InOrder, EpochSampler):
    """Takes consecutive batches: example i is in step floor(i / b) of every epoch.

    Several `num_shards` are read in turn, each in order: the example that is i-th in turn
    (`Shards`) takes part in step floor(i / b). The last batch of an epoch is smaller where b does
    not divide n; it is padded, and its noisy sum is divided by b like any other.

    Guarantees:
      * Each example takes part exactly once an epoch, in the same step of each.
      * Nothing is random, so no seed need be kept secret.

    >>> sampler = Deterministic(num_examples=10, batch_size=4)
    >>> sampler.plan(seed=0, epoch=0).members(1)
    array([4, 5, 6, 7], dtype=int32)
    """

    @property
    def separation(self) -> int:
        """One epoch, as examples keep their step in all epochs."""
        return self.steps_per_epoch
