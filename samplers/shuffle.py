"""Batches of a uniformly shuffled data set: what most training does, and the hardest to account.

Its cost is not Poisson's: docs/explanation/why-shuffling-is-not-poisson.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from accounting import GaussianProfile, PoissonProfile, PrivacyProfile, ShuffleProfile, epsilon
from accounting.profile import UpperEnd
from accounting.profiles.balls_and_bins import bins_profile
from accounting.profiles.bins_grids import Assignment
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
      * A batch has floor(b / L) to ceil(b / L) examples of each of the L shards, an epoch's last
        ones apart; how many they are is no chance.

    Attributes:
      order: redrawn: a new order in every epoch; fixed: one order for all epochs (costs more).
    """

    order: Literal["redrawn", "fixed"] = "redrawn"

    mode = "order"
    permutes_sums = True
    counts_epochs = True

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns two-sided bounds; no tight accounting of shuffling is known, nor is it Poisson's.

        Upper: a known order. Lower: pairs of neighbouring data sets. Proof:
        docs/explanation/lower-bounds-for-shuffled-batches.md.

        Source: L. Chua et al., How Private are DP-SGD Implementations? (ICML 2024), section 4; for
        several epochs Scalable DP-SGD: Shuffling vs. Poisson Subsampling (NeurIPS 2024).
        """
        return ShuffleProfile(noise_multiplier, self.steps_per_epoch, self.epochs, order=self.order)

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns two-sided bounds on all draws, with the batches that attempts release of each.

        Upper: an example that takes part in each draw as often as any may. Lower: balls-and-bins
        whose bins are no likelier than batches.
        """
        del same_rows
        whole, draws = self.draws_of(attempts)
        if not draws:
            return self.with_epochs(whole).privacy(noise_multiplier)
        if not whole and len(draws) == 1 and len(draws[0]) == 1:  # one fixed order, whole epochs
            return self.with_epochs(*draws[0]).privacy(noise_multiplier)
        most = whole + sum(map(max, draws))
        assignments = Counter(one for one in map(self._bins, draws) if max(one)[0])
        if whole:
            assignments[((1, self.steps_per_epoch),)] += whole
        below = bins_profile(noise_multiplier, assignments) if assignments else None
        return UpperEnd(GaussianProfile(noise_multiplier / math.sqrt(most)), below)

    def _bins(self, sizes: Sizes) -> Assignment:
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
        """An epoch where the order is fixed: the cost holds for any known order."""
        return self.steps_per_epoch if not self.redrawn else 1

    def caveats(self, noise_multiplier: float, delta: float) -> tuple[str, ...]:
        """Returns the epsilon that would be claimed if this run were taken for Poisson's."""
        q = self.batch_size / self.num_examples
        claimed = epsilon(PoissonProfile(noise_multiplier, q, self.num_steps), delta)
        cost = epsilon(self.privacy(noise_multiplier), delta)
        if claimed.upper >= cost.upper:
            return ()
        verdict = "does not earn that" if claimed.upper < cost.lower else "is not proved to earn it"
        return (
            f"taken for Poisson, as is common, this shuffled run would claim epsilon "
            f"{claimed.format_upper()}: shuffling {verdict}",
        )

    def row_law(self) -> RandomOrders:
        """Returns the law: uniform orders, though the upper end of the cost holds for any."""
        how = {"redrawn": self.redrawn, "any_order": True}
        return RandomOrders.of_size(self.shards, self.batch_size, self.epochs, **how)

    def bucket(self, seed: int, epoch: int, chunk: int, shard: int = 0) -> np.ndarray:
        """Draws the bucket, one for each chunk of the shard, of each example of one of them."""
        chunks = chunk_ranges(len(self.shard_range(shard)))
        key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), shard << 32 | chunk)
        return uniform_integers(key, len(chunks), len(chunks[chunk]))

    def ordered(
        self, seed: int, epoch: int, bucket: int, members: np.ndarray, shard: int = 0
    ) -> np.ndarray:
        """Puts the members of a bucket, given in ascending order, in uniformly random order."""
        key = Key(seed, Stream.ORDER, self.drawn_epoch(epoch), shard << 32 | bucket)
        return members[uniform_permutation(key, members.size)]

    def shuffled(self, seed: int, epoch: int, shard: int = 0) -> np.ndarray:
        """Draws the order of a shard: examples fall into buckets, which are ordered, end to end.

        Exactly uniform (docs/explanation/lower-bounds-for-shuffled-batches.md), in linear time.

        Source: C. R. Rao (1961) and M. Sandelius, A Simple Randomization Procedure (1962).
        """
        size = len(self.shard_range(shard))
        examples, count = np.arange(size, dtype=np.int32), len(chunk_ranges(size))
        drawn = [self.bucket(seed, epoch, chunk, shard) for chunk in range(count)]
        buckets = group(Participations(examples, np.concatenate(drawn)), count)
        return np.concatenate(
            [self.ordered(seed, epoch, g, buckets.members(g), shard) for g in range(count)]
        )

    def shard_plan(self, seed: int, epoch: int, shard: int) -> EpochPlan:
        """Draws one epoch: each step takes its part of the shard's order."""
        order = self.shuffled(seed, epoch, shard)
        starts = self.shards.batch_starts(shard, self.batch_size, self.steps_per_epoch)
        for step in range(self.steps_per_epoch):
            order[starts[step] : starts[step + 1]].sort()
        return EpochPlan(starts, order)

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk; it draws its shards, as all their rows hang together."""
        rows, shards = self.chunk_range(chunk), self.shards
        first, last = shards.of(np.array([rows.start, rows.stop - 1]))
        found = []
        for shard in range(first, last + 1):
            own = shards.examples(shard)
            some = range(max(rows.start - own.start, 0), min(rows.stop - own.start, len(own)))
            examples, steps = self.shard_plan(seed, epoch, shard).rows(some)
            examples = examples.astype(example_dtype(self.num_examples), copy=False)
            found.append((examples + own.start if own.start else examples, steps))
        return Participations(*(np.concatenate(part) for part in zip(*found, strict=True)))
