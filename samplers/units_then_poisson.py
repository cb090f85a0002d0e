"""Poisson batches of the examples of units that are drawn without replacement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

import numpy as np

import accounting
from accounting.records import Count, Gt, Le
from samplers.episodes import EpisodeSampler, check_draws, descend
from samplers.randomness import Key, Stream, bernoulli_successes, exponential_rate
from samplers.row_law import TreeDraws
from samplers.truncation import CappedBatchSampler


@dataclass(frozen=True)
class UnitsThenPoisson(CappedBatchSampler, EpisodeSampler):
    """Draws units at random, then includes each of their examples independently.

    n_1 units are drawn, then n_2 of each, ..., n_{L-1}, without replacement; every example of a
    drawn unit of level L - 1 takes part with probability `sampling_prob`. The cost treats the drawn
    units as known. A batch above `max_batch_size` is truncated to a uniform subset, and the cost
    includes the truncation (see `VariableBatchSampler`).

    Guarantees (before truncation):
      * Given the drawn units, examples take part independently, with `sampling_prob`.
      * The tree is public, and no guarantee covers it.

    Raises:
      ValueError: If a unit has fewer children than are drawn of it (the unit is named), or a number
        is out of range.

    Attributes:
      sampling_prob: Probability q with which an example of a drawn unit takes part.
      max_batch_size: Rows of a padded batch. Default: the fewest at which truncation costs at most
        1 % of delta.
      target_delta: Delta for which the default max_batch_size is chosen. Default: `default_delta`.
    """

    sampling_prob: Annotated[float, Gt(0), Le(1)]
    max_batch_size: Count | None = field(default=None, kw_only=True)
    target_delta: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draws(self.tree, self.draws, self.tree.num_levels - 1)
        self._check_cap()

    @property
    def expected_batch_size(self) -> float:
        """Mean size of a batch, the noisy sum's divisor."""
        return self.sampling_prob * math.prod(self.draws) * self.tree.shape.mean_leaves

    @property
    def largest_group(self) -> int:
        """Upper bound on the number of drawn units' examples.

        A batch's size is stochastically at most Binomial(`largest_group`, `sampling_prob`).
        """
        return min(self.num_examples, math.prod(self.draws) * self.tree.shape.most_leaves)

    def _untruncated(self, noise_multiplier: float) -> accounting.UnitsThenPoissonProfile:
        """Returns the leaf level's profile, the drawn units treated as known.

        The leaf whose unit is drawn most often costs most.
        """
        shape = self.tree.shape
        likeliest, unit_size = shape.likeliest(self.draws)
        if len(self.draws) == 1:  # all units are drawn equally often
            unit_size = shape.most_leaves
        return accounting.UnitsThenPoissonProfile(
            noise_multiplier, self.steps, likeliest, self.sampling_prob, siblings=unit_size - 1
        )

    def row_law(self) -> TreeDraws:
        """Returns the law of units without replacement, then independent examples."""
        return TreeDraws(
            epochs=self.steps,
            tree=self.tree,
            draws=self.draws,
            leaf_probability=self.sampling_prob,
        )

    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws the examples of a step, ascending: int32[size].

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
        """
        tree = self.drawn_tree
        nodes, _ = descend(tree, self.draws, seed, step)
        starts, units = tree.starts[-1], np.sort(nodes, axis=None)
        unit_stops = np.cumsum(starts[units + 1] - starts[units])
        rate = exponential_rate(1 - Fraction(self.sampling_prob))
        key = Key(seed, Stream.PARTICIPATION, step, tree.num_levels << 48)
        trials = bernoulli_successes(key, rate, int(unit_stops[-1]))
        drawn_unit = np.searchsorted(unit_stops, trials, side="right")
        positions = trials - unit_stops[drawn_unit] + starts[units[drawn_unit] + 1]
        return np.sort(tree.leaves[positions])
