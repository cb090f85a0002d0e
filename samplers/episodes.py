"""Episodes: each step is drawn down a public tree of units, at a cost of O(batch)."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accounting.records import Count, check
from samplers.base import BatchSampler
from samplers.plans import MAX_EXAMPLES, EpochPlan, Participations, check_steps
from samplers.population import Population
from samplers.randomness import Key, Stream
from samplers.tree import TreeShape, UnitTree


@dataclass(frozen=True)
class EpisodeSampler(BatchSampler, abc.ABC):
    """A sampler whose steps are independent episodes, drawn from (seed, step) alone.

    An epoch is one step: a batch is drawn without the other steps' batches.

    Attributes:
      tree: Tree of units with the examples as leaves, or its shape for accounting alone.
      draws: Numbers n_1, n_2, ... of children drawn from each drawn unit, the outermost first.
      steps: Number of steps of the run; each draws a new episode.
    """

    tree: UnitTree | TreeShape
    draws: tuple[Count, ...]
    steps: Count = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check(self)
        check_steps(self.steps)
        if self.num_examples > MAX_EXAMPLES:
            raise ValueError(f"a tree has at most 2^31 - 1 leaves, got {self.num_examples}")

    @property
    def num_examples(self) -> int:
        """Number of examples, the leaves of the tree."""
        return self.tree.num_leaves

    @property
    def epochs(self) -> int:
        """Number of steps, which are drawn independently."""
        return self.steps

    @property
    def steps_per_epoch(self) -> int:
        """1: an episode is one step."""
        return 1

    @property
    def drawn_tree(self) -> UnitTree:
        """The tree, or ValueError where only its shape is known."""
        if isinstance(self.tree, TreeShape):
            raise ValueError(
                f"tree={self.tree!r} is a shape, for accounting alone: pass a UnitTree to draw"
            )
        return self.tree

    def protected_unit(self, population: Population) -> str:
        """Returns `unit`, after a check of the data's tree.

        Raises:
          ValueError: If the data have another tree, or none.
        """
        super().protected_unit(population)
        if population.tree != self.tree:
            raise ValueError(
                f"the sampler draws from {self.tree!r}, and the data have "
                f"{population.tree or 'no units'}: pass UnitData.of_tree(tree, columns)"
            )
        return self.unit

    def with_population(self, population: Population) -> EpisodeSampler:
        """Returns this sampler with the tree of the data."""
        self.protected_unit(population)
        return dataclasses.replace(self, tree=population.tree or self.tree)

    def terms(self) -> dict[str, Any]:
        """Returns the settings that decide the cost, with the tree's shape."""
        return {**super().terms(), "tree": self.tree.shape.terms()}

    @classmethod
    def from_terms(cls, terms: Mapping[str, Any]) -> EpisodeSampler:
        """Returns a sampler of the cost that `terms` decide."""
        tree, draws = TreeShape.from_terms(terms["tree"]), tuple(terms["draws"])
        return cls(**{**terms, "tree": tree, "draws": draws})

    def with_epochs(self, epochs: int) -> EpisodeSampler:
        """Returns this sampler with another number of episodes."""
        return dataclasses.replace(self, steps=epochs)

    @abc.abstractmethod
    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws the examples of a step: int32[size], as in `EpochPlan`.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
        """

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """Draws one episode: an epoch is one step."""
        members = self.members(seed, epoch)
        return EpochPlan(np.array([0, members.size], np.int64), members)

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk, after drawing the whole episode."""
        return self.plan(seed, epoch).rows(self.chunk_range(chunk))


def check_draws(tree: UnitTree | TreeShape, draws: Sequence[int], levels: int) -> None:
    """Checks that every unit has enough children for its draw.

    Args:
      tree: Tree of units, or its shape.
      draws: Number of children drawn of each drawn unit, the outermost first.
      levels: Number of levels that are drawn without replacement.

    Raises:
      ValueError: If `draws` has not one entry per level, or a unit has fewer children.
    """
    if len(draws) != levels:
        raise ValueError(
            f"draws needs {levels} entries, one per level of {tree!r} that is drawn without "
            f"replacement, got {len(draws)}"
        )
    for level, count in enumerate(draws):
        size, label = tree.smallest(level)
        if size < count:
            raise ValueError(
                f"{label} has {size} children, fewer than "
                f"draws[{level}] = {count}: draw fewer, or leave out or merge small units"
            )


def descend(
    tree: UnitTree, draws: Sequence[int], seed: int, step: int
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Draws children without replacement, level by level.

    Args:
      tree: Tree of units.
      draws: Numbers n_1, ..., n_k of children drawn of each drawn unit.
      seed: The sampling secret, an integer >= 0 of any size.
      step: Step, counted over the whole run.

    Returns:
      The nodes of level k, int64[n_1, ..., n_k]; and the units of each level j = 1, ..., k - 1,
      int32[n_1, ..., n_j].
    """
    node = np.zeros((), np.int64)
    above: list[np.ndarray] = []
    for level, count in enumerate(draws):
        starts, parents = tree.starts[level], node.ravel()
        sizes = starts[parents + 1] - starts[parents]
        children = starts[parents][:, None] + _ordered_draws(seed, step, level, sizes, count)
        if level:
            above.append(node.astype(np.int32))
        node = children.reshape(*node.shape, count)
    return node, tuple(above)


def _ordered_draws(seed: int, step: int, level: int, sizes: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` of {0, ..., size - 1} without replacement, in uniform order, for each size."""
    ordered = np.empty((sizes.size, count), np.int64)
    for kind, draw in enumerate((_sorted_keys, _first_distinct)):
        pending = np.flatnonzero((sizes > 2 * count) == bool(kind))
        attempt = 0
        while pending.size:
            index = (level << 48) | (kind << 40) | attempt
            key = Key(seed, Stream.PARTICIPATION, step, index)
            rows, valid = draw(key, sizes[pending], count)
            ordered[pending[valid]] = rows[valid]
            pending = pending[~valid]
            attempt += 1
    return ordered


def _sorted_keys(key: Key, sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders random keys: for sizes <= 2 `count`. Returns rows and which of them are valid."""
    width = int(sizes.max())
    keys = key.words64(sizes.size * width).reshape(sizes.size, width).copy()
    outside = np.arange(width) >= sizes[:, None]
    keys[outside] = np.iinfo(np.uint64).max
    order = np.argsort(keys, axis=1)
    ordered = np.take_along_axis(keys, order, axis=1)
    # Equal keys matter among a row's own alone; the largest one is the sign of those outside.
    inside = np.arange(width) < sizes[:, None]
    equal = (ordered[:, 1:] == ordered[:, :-1]) & inside[:, 1:]
    largest = (ordered == np.iinfo(np.uint64).max) & inside
    return order[:, :count], ~(equal.any(axis=1) | largest.any(axis=1))


def _first_distinct(key: Key, sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads integers until `count` differ: for sizes > 2 `count`. Returns rows and validity."""
    # On average at most 2 ln 2 count integers are read, of words that are fit as said below.
    mean = 1.4 * count / (1.0 - int(sizes.max()) / 2**32)
    width = math.ceil(mean + 8.0 * math.sqrt(mean)) + 8
    words = key.words32(sizes.size * width).reshape(sizes.size, width).astype(np.uint64)
    products = words * sizes[:, None].astype(np.uint64)
    # Lemire (2019), Algorithm 5: words under the remainder are passed over.
    unfit = (np.uint64(1 << 32) % sizes.astype(np.uint64))[:, None]
    fit = (products & np.uint64(0xFFFFFFFF)) >= unfit
    values = products >> np.uint64(32)
    # Sort (value, place) pairs: the first of each run of equal values is a first occurrence.
    place = np.arange(width, dtype=np.uint64)
    values = np.where(fit, values, np.uint64((1 << 32) - 1))  # no size reaches this value
    pairs = np.sort((values << np.uint64(32)) | place, axis=1)
    value = pairs >> np.uint64(32)
    fresh = np.ones(pairs.shape, bool)
    fresh[:, 1:] = value[:, 1:] != value[:, :-1]
    fresh &= value != np.uint64((1 << 32) - 1)
    good = fresh.sum(axis=1) >= count
    # Back in order of place, what is no first occurrence last.
    later = np.where(fresh, pairs & np.uint64(0xFFFFFFFF), np.uint64(width))
    order = np.argsort(later, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(value, order, axis=1).astype(np.int64), good
