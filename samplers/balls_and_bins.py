"""Balls-and-bins: every example falls into one of the epoch's batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

import accounting
from accounting import PrivacyProfile, profiles
from accounting.profile import UpperEnd
from samplers.attempts import Attempt, least_released, most_released, of_group, releases
from samplers.epochs import RedrawnOrFixed
from samplers.plans import Participations, example_dtype
from samplers.randomness import Key, Stream, uniform_integers
from samplers.row_law import IndependentRows
from samplers.truncation import VariableBatchSampler


@dataclass(frozen=True)
class BallsAndBins(RedrawnOrFixed, VariableBatchSampler):
    """Assigns each example independently to one of an epoch's T = ceil(n / b) batches.

    Guarantees (before truncation, see `overflow`; c = `cycle_length` is 1 by default):
      * Each example takes part exactly once an epoch.
      * Its step is uniform on the T / c steps of its group, which are all steps where c = 1, and
        independent of all other examples'; and of other epochs' where `assignment` is "redrawn".
      * A batch has a Binomial(n, 1 / T) number of examples where c = 1; it may be empty.

    Source: L. Chua et al., Balls-and-Bins Sampling for DP-SGD (AISTATS 2025), Algorithm 3.

    >>> sampler = BallsAndBins(num_examples=50_000, batch_size=500)
    >>> sampler.num_steps, sampler.sampling_prob
    (100, 0.01)

    Attributes:
      assignment: redrawn: new bins in every epoch; fixed: one assignment for all epochs (costs
        more).
    """

    assignment: Literal["redrawn", "fixed"] = "redrawn"

    mode = "assignment"

    @property
    def sampling_prob(self) -> float:
        """Probability c / T of an example in its group's steps."""
        return self.cycle_length / self.steps_per_epoch

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns the profile of all draws' released bins.

        Exact unless groups differ: then between the groups of the most and of the fewest bins.

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
          attempts: Steps that each attempt releases.
          same_rows: Whether an example keeps its group in all attempts.
        """
        complete, draws = self.draws_of(attempts, self.cycle_length)
        if same_rows and draws:
            group = int(np.argmax(sum(map(releases, draws))))
            least = [of_group(sizes, group) for sizes in draws]
        else:
            least = [least_released(sizes) for sizes in draws]
        most = [most_released(sizes) for sizes in draws]
        upper = self._profile_of(noise_multiplier, complete, most)
        if least == most:
            return upper
        if not complete and not any(max(bins)[0] for bins in least):
            sizes = max(draws, key=lambda sizes: int(releases(sizes).max()))
            least = [of_group(sizes, int(np.argmax(releases(sizes))))]
        return UpperEnd(upper, self._profile_of(noise_multiplier, complete, least))

    def _profile_of(
        self,
        noise_multiplier: float,
        complete: int,
        draws: Sequence[profiles.bins_grids.Assignment],
    ) -> PrivacyProfile:
        assignments = Counter(bins for bins in draws if max(bins)[0])
        if complete:
            assignments[((1, self.group_steps),)] += complete
        return self.with_cuts(profiles.balls_and_bins.bins_profile(noise_multiplier, assignments))

    def _untruncated(self, noise_multiplier: float) -> accounting.BallsAndBinsProfile:
        """Returns the profile of E epochs of T / c bins.

        Groups are public, so that an example falls into one of T / c known steps.

        Source: L. Chua et al., Balls-and-Bins Sampling for DP-SGD (AISTATS 2025), Theorem 3.1.
        """
        return accounting.BallsAndBinsProfile(
            noise_multiplier, self.group_steps, self.epochs, assignment=self.assignment
        )

    def row_law(self) -> IndependentRows:
        """Returns the law of one uniform step per row and epoch."""
        return IndependentRows(
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            once=True,
            redrawn=self.redrawn,
            probability=self.sampling_prob,
            cycle_length=self.cycle_length,
        )

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Draws the rows of one chunk: a bin for each example."""
        rows = self.chunk_range(chunk)
        key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), chunk)
        examples = np.arange(rows.start, rows.stop, dtype=example_dtype(self.num_examples))
        bins = uniform_integers(key, self.group_steps, len(rows))
        return Participations(examples, self.steps_of(examples, bins))
