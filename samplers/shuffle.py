"""Batches of a uniformly shuffled data set: common in training, and hardest to account for.

Its cost is not Poisson's: docs/explanation/why-shuffling-is-not-poisson.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

import accounting
from accounting import PrivacyProfile, epsilon, profiles
from accounting.profile import UpperEnd
from samplers.attempts import Attempt, Sizes
from samplers.epochs import EpochSampler, RedrawnOrFixed
from samplers.plans import EpochPlan, Participations, chunk_ranges, example_dtype, group
from samplers.randomness import Key, Stream, uniform_integers, uniform_permutation
from samplers.row_law import RandomOrders


@dataclass(frozen=True)
class Shuffle(RedrawnOrFixed, EpochSampler):
    """Shuffles the examples and takes batches of b. NOT covered by Poisson's guarantee.

    The certified upper bound is the cost of a known order. The last batch of an epoch is smaller if
    b does not divide n; it is padded, and its noisy sum is divided by b like any other. Each of
    several `num_shards` is shuffled separately, and they are read in turn (`Shards`).

    Guarantees:
      * Each example takes part exactly once an epoch.
      * Every order of a shard's examples is equally likely, and independent of other shards' and,
        where `order` is "redrawn", of every other epoch's.
      * A batch has floor(b / L) to ceil(b / L) examples of each of the L shards, except the last
        batches of an epoch; these numbers are not random.

    Attributes:
      order: redrawn: a new order in every epoch; fixed: one order for all epochs (costs more).
    """

    order: Literal["redrawn", "fixed"] = "redrawn"

    mode = "order"
    permutes_sums = True
    counts_epochs = True

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns two-sided bounds; no tight accounting is known.

        The cost is not Poisson's. Upper: a known order. Lower: pairs of neighbouring data sets.
        Proof: docs/explanation/lower-bounds-for-shuffled-batches.md.

        Source: L. Chua et al., How Private are DP-SGD Implementations? (ICML 2024), section 4; for
        several epochs Scalable DP-SGD: Shuffling vs. Poisson Subsampling (NeurIPS 2024).
        """
        return accounting.ShuffleProfile(
            noise_multiplier, self.steps_per_epoch, self.epochs, order=self.order
        )

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns two-sided bounds on all draws' released batches.

        Upper: an example that takes part in each draw as often as any may. Lower: balls-and-bins
        whose bins are no likelier than batches.

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
          attempts: Steps that each attempt releases.
          same_rows: Unused: each attempt draws other orders.
        """
        del same_rows
        complete, draws = self.draws_of(attempts)
        if not draws:
            return self.with_epochs(complete).privacy(noise_multiplier)
        if not complete and len(draws) == 1 and len(draws[0]) == 1:  # one order, whole epochs
            return self.with_epochs(*draws[0]).privacy(noise_multiplier)
        most = complete + sum(map(max, draws))
        assignments = Counter(bins for bins in map(self._bins, draws) if max(bins)[0])
        if complete:
            assignments[((1, self.steps_per_epoch),)] += complete
        lower = (
            profiles.balls_and_bins.bins_profile(noise_multiplier, assignments)
            if assignments
            else None
        )
        return UpperEnd(accounting.GaussianProfile(noise_multiplier / math.sqrt(most)), lower)

    def _bins(self, sizes: Sizes) -> profiles.bins_grids.Assignment:
        """Returns bins that cost no more than the batches of a draw.

        Batches that are released equally often are exchangeable after a permutation. A smaller
        last batch counts as one of the most released, and is left out.
        """
        bins = {times: int(size[0]) for times, size in sizes.items()}
        if len(bins) == 1:
            return tuple(bins.items())
        *rows, last = np.diff(self.shards.batch_starts(0, self.batch_size, self.steps_per_epoch))
        smallest = int(min(rows))
        if not smallest:  # an example may be in no released batch
            return ((0, 1),)
        bins[max(bins)] -= int(last < smallest)
        alike = -(-len(self.shard_range(0)) // smallest)
        bins[0] = alike - sum(count for times, count in bins.items() if times)
        return tuple((times, bins[times]) for times in sorted(bins) if bins[times] > 0)

    @property
    def separation(self) -> int:
        """One epoch where the order is fixed, else 1.

        The cost of a fixed order holds for any known order.
        """
        return self.steps_per_epoch if not self.redrawn else 1

    def caveats(self, noise_multiplier: float, delta: float) -> tuple[str, ...]:
        """Returns a warning with the epsilon that Poisson accounting would claim."""
        q = self.batch_size / self.num_examples
        claimed = epsilon(accounting.PoissonProfile(noise_multiplier, q, self.num_steps), delta)
        cost = epsilon(self.privacy(noise_multiplier), delta)
        if claimed.upper >= cost.upper:
            return ()
        verdict = "does not hold" if claimed.upper < cost.lower else "is not proved"
        return (
            "Poisson accounting, as is common for shuffled batches, would claim epsilon "
            f"{claimed.format_upper()}, which {verdict} for shuffling",
        )

    def row_law(self) -> RandomOrders:
        """Returns the law of uniform orders.

        The upper end of the cost holds for any order.
        """
        flags = {"redrawn": self.redrawn, "any_order": True}
        return RandomOrders.of_size(self.shards, self.batch_size, self.epochs, **flags)

    def bucket(self, seed: int, epoch: int, chunk: int, shard: int = 0) -> np.ndarray:
        """Draws a bucket for each example of a chunk: int32[examples].

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
          chunk: Chunk of the shard's examples, counted from 0.
          shard: Index of the shard, which has as many buckets as chunks.
        """
        chunks = chunk_ranges(len(self.shard_range(shard)))
        key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), shard << 32 | chunk)
        return uniform_integers(key, len(chunks), len(chunks[chunk]))

    def ordered(
        self, seed: int, epoch: int, bucket: int, members: np.ndarray, shard: int = 0
    ) -> np.ndarray:
        """Returns a bucket's members in uniformly random order.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
          bucket: Index of the bucket within the shard.
          members: Examples of the bucket, ascending.
          shard: Index of the shard.
        """
        key = Key(seed, Stream.ORDER, self.drawn_epoch(epoch), shard << 32 | bucket)
        return members[uniform_permutation(key, members.size)]

    def shuffled(self, seed: int, epoch: int, shard: int = 0) -> np.ndarray:
        """Draws the uniform order of a shard, in linear time.

        Examples fall into random buckets, which are ordered and joined. Proof:
        docs/explanation/lower-bounds-for-shuffled-batches.md.

        Source: C. R. Rao (1961) and M. Sandelius, A Simple Randomization Procedure (1962).

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
          shard: Index of the shard.

        Returns:
          Examples counted within the shard: int32[size of the shard].
        """
        size = len(self.shard_range(shard))
        examples, count = np.arange(size, dtype=np.int32), len(chunk_ranges(size))
        bucket_by_chunk = [self.bucket(seed, epoch, chunk, shard) for chunk in range(count)]
        buckets = group(Participations(examples, np.concatenate(bucket_by_chunk)), count)
        return np.concatenate(
            [self.ordered(seed, epoch, g, buckets.members(g), shard) for g in range(count)]
        )

    def shard_plan(self, seed: int, epoch: int, shard: int) -> EpochPlan:
        """Draws a shard's part of one epoch."""
        order = self.shuffled(seed, epoch, shard)
        starts = self.shards.batch_starts(shard, self.batch_size, self.steps_per_epoch)
        for step in range(self.steps_per_epoch):
            order[starts[step] : starts[step + 1]].sort()
        return EpochPlan(starts, order)

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk, after drawing its shards."""
        rows, shards = self.chunk_range(chunk), self.shards
        first, last = shards.shard_of(np.array([rows.start, rows.stop - 1]))
        entries = []
        for shard in range(first, last + 1):
            shard_rows = shards.examples(shard)
            start, size = shard_rows.start, len(shard_rows)
            chunk_rows = range(max(rows.start - start, 0), min(rows.stop - start, size))
            examples, steps = self.shard_plan(seed, epoch, shard).rows(chunk_rows)
            examples = examples.astype(example_dtype(self.num_examples), copy=False)
            entries.append((examples + start if start else examples, steps))
        return Participations(*(np.concatenate(arrays) for arrays in zip(*entries, strict=True)))
