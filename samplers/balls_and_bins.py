"""Balls-and-bins: every example falls into one of the epoch's batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from accounting import BallsAndBinsProfile, PrivacyProfile
from samplers.base import Participations, example_dtype
from samplers.randomness import Key, Stream, uniform_integers
from samplers.row_law import IndependentRows
from samplers.truncation import VariableBatchSampler


@dataclass(frozen=True)
class BallsAndBins(VariableBatchSampler):
    """Every example falls into one of the epoch's T = ceil(n / b) batches, all independently.

    Guarantees (before truncation, see `overflow`; c = `cycle_length` is 1 by default):
      * Each example takes part exactly once an epoch.
      * Its step is uniform on the T / c steps of its group, which are all steps where c = 1, and
        independent of all other examples'; and of other epochs' where `assignment` is "redrawn".
      * A batch has a Binomial(n, 1 / T) number of examples where c = 1; it may be empty.

    Source: L. Chua et al., Balls-and-Bins Sampling for DP-SGD (AISTATS 2025), Algorithm 2.
    """

    assignment: Literal["redrawn", "fixed"] = "redrawn"
    """redrawn: new bins for each epoch; fixed: one assignment for all epochs (it costs more)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assignment not in ("redrawn", "fixed"):
            raise ValueError(f'assignment must be "redrawn" or "fixed", got {self.assignment!r}')

    @property
    def sampling_prob(self) -> float:
        """Probability c / T that an example takes part in a given step of its group."""
        return self.cycle_length / self.steps_per_epoch

    @property
    def independent_steps(self) -> int:
        """Number of batches drawn: T * E, or T where all epochs share one assignment."""
        return self.steps_per_epoch * (self.epochs if self.assignment == "redrawn" else 1)

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the profile of E epochs of T / c bins, and of truncation.

        Groups are public, so that an example falls into one of T / c known steps.

        Source: L. Chua et al., Balls-and-Bins Sampling for DP-SGD (AISTATS 2025), Theorem 3.1.
        """
        return self.with_truncation(
            BallsAndBinsProfile(
                noise_multiplier, self.group_steps, self.epochs, assignment=self.assignment
            ),
            self.independent_steps,
        )

    def privacy_of(self, noise_multiplier: float, segments: Sequence[range]) -> PrivacyProfile:
        """Bounds from above the cost of segments of steps together, each from a seed of its own.

        k segments of a fixed assignment that enter at most m epochs each cost at most k redrawn
        epochs with noise sigma / sqrt(m): docs/explanation/lower-bounds-for-shuffled-batches.md.
        """
        if self.assignment == "redrawn" or len(segments) == 1:
            return super().privacy_of(noise_multiplier, segments)
        redrawn = replace(
            self,
            epochs=len(segments),
            assignment="redrawn",
            max_batch_size=self.shard_batch_size,
        )
        return redrawn.privacy(noise_multiplier / math.sqrt(max(self.epochs_in(segments))))

    def row_law(self) -> IndependentRows:
        """Returns the law: rows are independent, each with one uniform step of its group."""
        return IndependentRows(
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            once=True,
            redrawn=self.assignment == "redrawn",
            probability=self.sampling_prob,
            cycle_length=self.cycle_length,
        )

    def drawn_epoch(self, epoch: int) -> int:
        """Returns `epoch`, or 0 if the assignment is fixed."""
        return epoch if self.assignment == "redrawn" else 0

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Draws the rows of one chunk: one bin for each example."""
        rows = self.chunk_range(chunk)
        key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), chunk)
        examples = np.arange(rows.start, rows.stop, dtype=example_dtype(self.num_examples))
        bins = uniform_integers(key, self.group_steps, len(rows))
        return Participations(examples, self.steps_of(examples, bins))
