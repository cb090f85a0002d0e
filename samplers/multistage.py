"""Multistage (episodic) batches: nested draws of units without replacement.

Algorithm 1 of episodic training (Tombs, Kotevska, Young, "Privacy Amplification for Episodic
Training Methods", CEUR Vol-3318, 2022): draw n_1 tasks, n_2 parts of each task, ..., and finally
n_L examples of each drawn unit. A draw costs O(batch), however many leaves the tree has.

The tree is public. Under zeroing-out adjacency an example keeps its place in the tree and loses
only its gradient: neither an example's unit nor the size of a unit is protected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import accounting
from accounting import PrivacyProfile
from samplers.episodes import EpisodeSampler, check_draws, descend
from samplers.row_law import TreeDraws


class Episode(NamedTuple):
    """Examples and units of one step, in fixed shapes without padding."""

    examples: np.ndarray
    """Examples, in uniformly random order within each unit: int32[n_1, ..., n_L]."""
    units: tuple[np.ndarray, ...]
    """Drawn units of level j = 1, ..., L-1, as numbered in the tree: int32[n_1, ..., n_j]."""


@dataclass(frozen=True)
class Multistage(EpisodeSampler):
    """Draws n_1 units, n_2 units of each, ..., and n_L examples of each last unit.

    Every batch has n_1 ... n_L examples. By default per-example gradients are clipped and examples
    are protected. An episodic loss reads all drawn examples of a unit together: with
    `clipped_level` = c, training clips one gradient per drawn unit of level c, and the loss gets
    that unit's examples with leading axes [n_{c+1}, ..., n_L]. At c = 0 the whole episode has one
    clipped gradient, so its loss may compare units. `protected_level` protects whole units of a
    level c or deeper in place of examples.

    Guarantees:
      * The n_j children drawn of a unit are a uniform subset, in uniform order, independently for
        each drawn unit and each step.
      * The tree is public, and no guarantee covers it.

    >>> from samplers import UnitTree
    >>> tree = UnitTree.from_columns({"task": [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]})
    >>> sampler = Multistage(tree, (2, 2), steps=100)
    >>> episode = sampler.episode(seed=7, step=0)
    >>> episode.examples.shape, episode.units[0].shape
    ((2, 2), (2,))

    Raises:
      ValueError: If a unit has fewer children than are drawn of it (the unit is named), or a number
        is out of range.

    Attributes:
      clipped_level: Level c of the units whose gradients are clipped: 0 is the whole episode.
        Default: the level of the examples.
      protected_level: Level of the protected units, at least c and at least 1. Default: the
        level of the examples.
    """

    clipped_level: int | None = field(default=None, kw_only=True)
    protected_level: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = self.tree.num_levels
        check_draws(self.tree, self.draws, levels)
        for name, least in (("clipped_level", 0), ("protected_level", 1)):
            level = getattr(self, name)
            if level is not None and not least <= level <= levels:
                raise ValueError(f"{name} must be in [{least}, {levels}], got {level}")
        if self._protected < self._clipped:
            raise ValueError(
                f"protected_level must be at least clipped_level = {self._clipped}, got "
                f"{self.protected_level}"
            )

    @property
    def unit(self) -> str:
        """Name of the units of the protected level, or "example".

        A unit lies under one path: where a user has rows in two shops, a tree of shops and users
        protects a user within one shop.
        """
        level, names = self._protected, self.tree.shape.names
        return "example" if level > len(names) else " within one ".join(names[:level][::-1])

    @property
    def padded_batch_size(self) -> int:
        """Rows n_1 ... n_L of every batch."""
        return math.prod(self.draws)

    @property
    def clipped_shape(self) -> tuple[int, ...]:
        """Draws below one clipped unit, level by level: (n_{c+1}, ..., n_L)."""
        return self.draws[self._clipped :]

    @property
    def expected_batch_size(self) -> float:
        """Number of clipped gradients n_1 ... n_c, the sum's divisor."""
        return float(math.prod(self.draws[: self._clipped]))

    @property
    def _clipped(self) -> int:
        return self.tree.num_levels if self.clipped_level is None else self.clipped_level

    @property
    def _protected(self) -> int:
        return self.protected_level or self.tree.num_levels

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns a sound bound: the worst leaf's profile.

        Not the published Theorem 3, which is not sound for sums. The first stages amplify little
        unless sigma is large against the number of examples drawn of a unit: the sum shows which
        units were drawn. If that matters, clip units together, or see `UnitsThenPoisson`. To
        protect a whole unit is to have it as the leaf: the later levels only decide what gradient
        is clipped.

        Source: the proof is in `accounting.profiles.multistage`.
        """
        level = self._protected
        paths = tuple(dict.fromkeys(path[:level] for path in self.tree.shape.worst_paths))
        clipped = min(self._clipped, level)
        return accounting.worst_leaf.worst_leaf(
            noise_multiplier, self.steps, self.draws[:level], paths, clipped
        )

    def caveats(self, noise_multiplier: float, delta: float) -> tuple[str, ...]:
        """Returns a warning where sums reveal the drawn units."""
        count = math.prod(self.draws[1 : min(self._clipped, self._protected)])
        if count == 1 or 2 * count <= noise_multiplier:
            return ()
        return (
            f"another {self.tree.shape.names[0]} in the place of a drawn one moves the sum by up "
            f"to {2 * count} C, against noise of {noise_multiplier:.4g} C, so that drawing "
            "amplifies little; for more, clip each unit's gradient as one (clipped_level) or use "
            "Poisson sampling within units (UnitsThenPoisson)",
        )

    def row_law(self) -> TreeDraws:
        """Returns the law of draws without replacement at every level."""
        sizes = np.array([self.padded_batch_size])
        return TreeDraws(epochs=self.steps, tree=self.tree, draws=self.draws, batch_sizes=sizes)

    def episode(self, seed: int, step: int) -> Episode:
        """Draws one step with its structure, in O(batch).

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
        """
        tree = self.drawn_tree
        positions, units = descend(tree, self.draws, seed, step)
        return Episode(tree.leaves[positions], units)

    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws the examples of a step: int32[padded_batch_size], as in `EpochPlan`.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
        """
        examples = self.episode(seed, step).examples.ravel()
        return examples if self.clipped_shape else np.sort(examples)
