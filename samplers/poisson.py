"""Poisson subsampling: every example takes part in every step independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

import accounting
from accounting import PrivacyProfile
from accounting.profile import ComposesWithGaussian, UpperEnd
from samplers.attempts import Attempt, check_attempts, releases, sizes_of
from samplers.plans import Participations, example_dtype
from samplers.randomness import Key, Stream, bernoulli_successes, exponential_rate
from samplers.row_law import IndependentRows
from samplers.truncation import VariableBatchSampler


@dataclass(frozen=True)
class Poisson(VariableBatchSampler):
    """Includes each example in each step independently, with probability q = b / n.

    Guarantees (before truncation, see `overflow`; c = `cycle_length` is 1 by default):
      * The entries of the participation matrix are independent and equal to 1 with probability c q
        in the steps of an example's group, which are all steps where c = 1, and 0 in others.
      * A batch has a Binomial(n, q) number of examples where c = 1; it may be empty.

    >>> sampler = Poisson(num_examples=50_000, batch_size=500, epochs=2)
    >>> sampler.num_steps, sampler.sampling_prob
    (200, 0.01)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycle_length * self.batch_size > self.num_examples:
            raise ValueError(
                f"cycle_length * batch_size must be at most num_examples = {self.num_examples}, "
                f"got {self.cycle_length} * {self.batch_size}: reduce either"
            )

    @property
    def sampling_prob(self) -> float:
        """Probability c b / n of an example in its group's steps."""
        return self.cycle_length * self.batch_size / self.num_examples

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns the profile of one group's steps in all attempts.

        The largest group of each attempt counts where an example may change its group.

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
          attempts: Steps that each attempt releases.
          same_rows: Whether an example keeps its group in all attempts.
        """
        ranges = check_attempts(attempts, self.num_steps)
        group_steps = [
            releases(sizes_of(steps, self.steps_per_epoch, self.cycle_length)) for steps in ranges
        ]
        if same_rows:
            return self._profile_of(noise_multiplier, int(np.sum(group_steps, axis=0).max()))
        most, least = sum(int(n.max()) for n in group_steps), sum(int(n.min()) for n in group_steps)
        upper = self._profile_of(noise_multiplier, most)
        least = max(least, *(int(n.max()) for n in group_steps))
        if least == most:
            return upper
        return UpperEnd(upper, self._profile_of(noise_multiplier, least))

    def as_entered(self, attempts: Sequence[Attempt]) -> list[list[range]]:
        """Returns the attempts; with groups, extended to whole epochs."""
        if self.cycle_length > 1:  # a choice of ends may give one group more steps
            return super().as_entered(attempts)
        return check_attempts(attempts, self.num_steps)

    def _profile_of(self, noise_multiplier: float, steps: int) -> PrivacyProfile:
        return self.with_cuts(self._untruncated(noise_multiplier, steps))

    def _untruncated(
        self, noise_multiplier: float, steps: int | None = None
    ) -> ComposesWithGaussian:
        """Returns the profile of Poisson-subsampled Gaussian releases, by default of all steps.

        Where c > 1, groups are public, and those are T E / c steps at probability c q.

        Source: Y. Zhu, J. Dong, Y.-X. Wang, Optimal Accounting of Differential Privacy via
        Characteristic Function (2022), for the pair; `accounting.profiles.poisson` for its
        composition.
        """
        steps = self.num_steps // self.cycle_length if steps is None else steps
        return accounting.PoissonProfile(noise_multiplier, self.sampling_prob, steps)

    def row_law(self) -> IndependentRows:
        """Returns the law of independent entries within groups."""
        return IndependentRows(
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            once=False,
            probability=self.sampling_prob,
            cycle_length=self.cycle_length,
        )

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Draws the rows of one chunk by independent trials."""
        rows = self.chunk_range(chunk)
        rate = exponential_rate(
            1 - Fraction(self.cycle_length * self.batch_size, self.num_examples)
        )
        trials = bernoulli_successes(
            Key(seed, Stream.PARTICIPATION, epoch, chunk), rate, len(rows) * self.group_steps
        )
        steps = trials // len(rows)  # with a remainder by hand: many times faster than divmod
        examples = rows.start + trials - steps * len(rows)
        examples = examples.astype(example_dtype(self.num_examples))
        return Participations(examples, self.steps_of(examples, steps.astype(np.int32)))
