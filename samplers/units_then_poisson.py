"""Batches of examples that decide each by itself, within units drawn without replacement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from accounting import (
    PrivacyProfile,
    TruncatedProfile,
    UnitsThenPoissonProfile,
    check_guarantee_delta,
    default_delta,
)
from accounting.profile import check_probability
from accounting.profiles.truncation import log_overflow_probability
from samplers.base import MAX_EXAMPLES, positive_integer
from samplers.episodes import EpisodeSampler, check_draws, descend
from samplers.randomness import Key, Stream, bernoulli_successes, exponential_rate
from samplers.row_law import TreeDraws
from samplers.truncation import cut, default_max_batch_size


@dataclass(frozen=True)
class UnitsThenPoisson(EpisodeSampler):
    """Draws units at random, then each of their examples by itself: keeps amplification.

    n_1 units are drawn, n_2 of each, ..., n_{L-1}, without replacement; every example of a drawn
    unit of level L - 1 takes part with probability `sampling_prob`. The cost treats the drawn units
    as known. A batch of more than `max_batch_size` examples is cut to so many, uniformly at random;
    the cost includes it (see `VariableBatchSampler`).

    Guarantees (before truncation):
      * Given the drawn units, examples take part independently, each with `sampling_prob`.
      * The tree is public, and no guarantee covers it.

    Raises:
      ValueError: If a unit has fewer children than are drawn of it (the unit is named), or a number
        is out of range.
    """

    sampling_prob: float
    """Probability q with which an example of a drawn unit takes part."""
    max_batch_size: int | None = field(default=None, kw_only=True)
    """Rows of a padded batch; by default so many that truncation costs at most 1e-5 of delta."""
    target_delta: float | None = field(default=None, kw_only=True)
    """The delta for which the default maximum is chosen; by default that of `default_delta`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draws = check_draws(self.tree, self.draws, self.tree.num_levels - 1)
        object.__setattr__(self, "draws", draws)
        check_probability("sampling_prob", self.sampling_prob)
        if self.target_delta is not None:
            check_guarantee_delta(self.target_delta, "target_delta")
        if self.max_batch_size is not None:
            cap = positive_integer("max_batch_size", self.max_batch_size, MAX_EXAMPLES)
            object.__setattr__(self, "max_batch_size", cap)

    @cached_property
    def padded_batch_size(self) -> int:
        """Rows of a padded batch: `max_batch_size`, or what is chosen in its place."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        delta = self.target_delta or default_delta(self.num_units)
        return max(
            1, default_max_batch_size(self.most_examples, self.sampling_prob, self.steps, delta)
        )

    def terms(self) -> dict[str, Any]:
        """Returns what the cost depends on, the cap that is in use among it."""
        return {**super().terms(), "max_batch_size": self.padded_batch_size}

    def with_epochs(self, epochs: int) -> UnitsThenPoisson:
        """Returns this sampler with another number of episodes; the cap stays as it is."""
        return replace(self, steps=epochs, max_batch_size=self.padded_batch_size)

    @property
    def expected_batch_size(self) -> float:
        """Mean size of a batch, by which the noisy sum is divided."""
        return self.sampling_prob * math.prod(self.draws) * self.tree.shape.mean_leaves

    @property
    def most_examples(self) -> int:
        """Upper bound on the number of examples in the drawn units together."""
        return min(self.num_examples, math.prod(self.draws) * self.tree.shape.most_leaves)

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the leaf level's profile, the drawn units treated as known, and truncation's.

        The leaf whose unit is drawn most often costs most. A batch has at most
        Binomial(`most_examples`, `sampling_prob`) examples, in law.
        """
        shape = self.tree.shape
        likeliest, unit_size = shape.likeliest(self.draws)
        if len(self.draws) == 1:  # all units are drawn equally often
            unit_size = shape.most_leaves
        profile = UnitsThenPoissonProfile(
            noise_multiplier, self.steps, likeliest, self.sampling_prob, siblings=unit_size - 1
        )
        cap = self.padded_batch_size
        if cap >= self.most_examples:
            return profile
        log_psi = log_overflow_probability(self.most_examples, self.sampling_prob, cap)
        return TruncatedProfile(profile, self.steps, log_psi)

    def row_law(self) -> TreeDraws:
        """Returns the law: units without replacement, their examples each by itself."""
        return TreeDraws(
            epochs=self.steps,
            tree=self.tree,
            draws=self.draws,
            leaf_probability=self.sampling_prob,
        )

    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws who takes part in a step, ascending: int32[size]."""
        tree = self.drawn_tree
        nodes, _ = descend(tree, self.draws, seed, step)
        starts, units = tree.starts[-1], np.sort(nodes, axis=None)
        ends = np.cumsum(starts[units + 1] - starts[units])
        rate = exponential_rate(1 - Fraction(self.sampling_prob))
        key = Key(seed, Stream.PARTICIPATION, step, tree.num_levels << 48)
        trials = bernoulli_successes(key, rate, int(ends[-1]))
        which = np.searchsorted(ends, trials, side="right")
        positions = trials - ends[which] + starts[units[which] + 1]
        return np.sort(tree.leaves[positions])

    def passes(self, members: np.ndarray, seed: int, step: int, shard: int = 0) -> list[np.ndarray]:
        """Cuts a step's examples to `padded_batch_size` uniformly at random."""
        del shard
        cap = self.padded_batch_size
        if members.size <= cap:
            return [members]
        return [cut(members, cap, seed, step)]
