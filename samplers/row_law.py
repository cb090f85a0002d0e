"""The law of the participation matrix by its rows, stated beside its draws.

An audit compares draws with it, at the run's own size: how often a row takes part, and how rows,
steps and epochs depend on each other. Proofs: docs/explanation/laws-of-participation.md.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from samplers.shards import Shards
from samplers.tree import TreeShape, UnitTree

L = TypeVar("L", bound="_Orders")


@dataclass(frozen=True, eq=False, kw_only=True)
class RowLaw(abc.ABC):
    """The law of X in {0,1}^(examples x steps), where x_it = 1 if example i is in batch t.

    Every law states this, too: within a step the entries of rows of different outermost units (of
    all rows, where there are no `units`) are *negatively associated*, as independent ones are.

    Attributes:
      steps_per_epoch: T.
      epochs: E.
      once: True if each example takes part in exactly one step of an epoch; else an epoch's steps
        are independent.
      redrawn: True if epochs are independent; else they are all alike.
      independent: True if rows are independent.
      certain: True if nothing is random.
      any_order: True if the privacy cost holds for any assignment of examples to steps.
      batch_sizes: Rows of each batch of an epoch, int64[T]; None where they are random.
      leaf_probability: Probability with which each example of a drawn innermost unit takes part,
        independently; None where a fixed number does.
      cycle_length: c: example i takes part in steps t = i mod c alone.
    """

    steps_per_epoch: int
    epochs: int
    once: bool
    redrawn: bool = True
    independent: bool = False
    certain: bool = False
    any_order: bool = False
    batch_sizes: np.ndarray | None = None
    leaf_probability: float | None = None
    cycle_length: int = 1

    @property
    def units(self) -> np.ndarray | None:
        """The units that each example lies in, outermost first: int32[levels, n]; None if none."""
        return None

    @property
    def most_units(self) -> tuple[int, ...]:
        """Most units of each level of `units` in a batch."""
        return ()

    @property
    def unit_rates(self) -> tuple[np.ndarray, ...]:
        """Probability with which a step draws each unit of each level of `units`."""
        return ()

    @abc.abstractmethod
    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns Pr[x_it = 1] for examples i and steps t of an epoch, which are broadcast."""

    def joint(self, first: Any, second: Any, steps: Any) -> np.ndarray:
        """Returns Pr[x_it = x_jt = 1] for different examples i and j, broadcast with steps.

        By default the product of both rates, as of independent or certain entries.
        """
        return np.asarray(self.rate(first, steps) * self.rate(second, steps))


@dataclass(frozen=True, eq=False, kw_only=True)
class IndependentRows(RowLaw):
    """All rows are independent, and take part in each step of theirs with one probability.

    Attributes:
      probability: Probability of each entry that may be 1.
    """

    probability: float
    independent: bool = True

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns the probability in the steps of an example's group, else 0."""
        if self.cycle_length == 1:
            return np.asarray(self.probability)
        own = (np.asarray(examples) - steps) % self.cycle_length == 0
        return np.where(own, self.probability, 0.0)

    def folded(self) -> IndependentRows:
        """Returns the law of an example's steps within its group, without groups."""
        length = self.steps_per_epoch // self.cycle_length
        return dataclasses.replace(self, steps_per_epoch=length, cycle_length=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Orders(RowLaw):
    """In every epoch step t has the examples t b to (t + 1) b - 1 of some order of all shards.

    Attributes:
      batch_size: b.
      shards: Of the examples.
    """

    batch_size: int
    batch_sizes: np.ndarray
    shards: Shards
    once: bool = True

    @classmethod
    def of_size(cls: type[L], shards: Shards, batch_size: int, epochs: int, **rest: Any) -> L:
        """Returns the law of batches of this size; the last one may be smaller."""
        starts = np.arange(0, shards.num_examples, batch_size, dtype=np.int64)
        sizes = np.minimum(batch_size, shards.num_examples - starts)
        sized: dict[str, Any] = {"batch_size": batch_size, "batch_sizes": sizes, **rest}
        return cls(steps_per_epoch=starts.size, epochs=epochs, shards=shards, **sized)


@dataclass(frozen=True, eq=False, kw_only=True)
class RandomOrders(_Orders):
    """Each shard's examples come in an independent uniform order, and shards in turn."""

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns the share of the example's shard that is in the step's batch."""
        shards = self.shards.of(examples)
        return self._taken(shards, steps) / self.shards.size(shards)

    def joint(self, first: Any, second: Any, steps: Any) -> np.ndarray:
        """Returns s (s - 1) / (n (n - 1)) of s of a shard's n rows; of two shards the product."""
        shards, taken = self.shards.of(first), self._taken(self.shards.of(first), steps)
        others = np.maximum(1, self.shards.size(shards) - 1)
        within = self.rate(first, steps) * (taken - 1) / others
        across = self.rate(first, steps) * self.rate(second, steps)
        return np.where(shards == self.shards.of(second), within, across)

    def _taken(self, shards: Any, steps: Any) -> Any:
        start = np.asarray(steps, np.int64) * self.batch_size
        return self.shards.starts_in(shards, start + self.batch_size) - self.shards.starts_in(
            shards, start
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownOrder(_Orders):
    """The examples come in their own order, several shards in turn."""

    redrawn: bool = False
    certain: bool = True
    any_order: bool = True

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns 1 in an example's own step, else 0."""
        own = self.shards.in_turn(np.asarray(examples)) // self.batch_size
        return (own == steps).astype(np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeDraws(RowLaw):
    """Every step draws down a tree of units independently, without replacement.

    Attributes:
      tree: Of the examples.
      draws: Number of children drawn of each drawn unit, the outermost first; of the leaves, too,
        where there is no `leaf_probability`.
    """

    tree: UnitTree | TreeShape
    draws: tuple[int, ...]
    steps_per_epoch: int = 1
    once: bool = False

    @cached_property
    def units(self) -> np.ndarray | None:
        """The units that each example lies in, outermost first: int32[levels, n]; None if none."""
        tree = self._tree
        levels: list[np.ndarray] = []
        for level in range(tree.num_levels - 1):
            levels = [np.repeat(above, tree.sizes(level)) for above in levels]
            unit = np.arange(tree.starts[level][-1], dtype=np.int32)
            levels.append(unit)
        by_position = [np.repeat(above, tree.sizes(tree.num_levels - 1)) for above in levels]
        if not by_position:
            return None
        found = np.empty((len(levels), tree.num_leaves), np.int32)
        found[:, tree.leaves] = by_position
        return found

    @property
    def most_units(self) -> tuple[int, ...]:
        """Most units of each level of `units` in a batch."""
        return tuple(math.prod(self.draws[: level + 1]) for level in range(self._levels - 1))

    @cached_property
    def unit_rates(self) -> tuple[np.ndarray, ...]:
        """Probability with which a step draws each unit of each level of `units`."""
        found = [np.ones(1)]
        for level in range(self._levels - 1):
            size = self._sizes[level]
            found.append(np.repeat(found[-1] * self._alone(level, size), size.astype(np.int64)))
        return tuple(found[1:])

    @property
    def _tree(self) -> UnitTree:
        if isinstance(self.tree, TreeShape):
            raise ValueError("only the shape of the tree is known: of no example is known its unit")
        return self.tree

    @property
    def _levels(self) -> int:
        return self.tree.num_levels

    @cached_property
    def _sizes(self) -> list[np.ndarray]:
        return [self._tree.sizes(level).astype(np.float64) for level in range(self._levels)]

    def _children(self, examples: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns, level by level, how many children the unit above has, and which one it is."""
        units = self.units
        path = [np.zeros_like(examples), *([] if units is None else units[:, examples]), examples]
        return [size[above] for size, above in zip(self._sizes, path, strict=False)], path[1:]

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns the product, over the levels, of how many are drawn of how many."""
        sizes, _ = self._children(np.asarray(examples))
        found = np.ones(np.shape(examples))
        for level, size in enumerate(sizes):
            found = found * self._alone(level, size)
        return found

    def joint(self, first: Any, second: Any, steps: Any) -> np.ndarray:
        """Returns the product, over the levels, of how likely both are drawn of those above."""
        (sizes, one), (others, two) = (self._children(np.asarray(i)) for i in (first, second))
        found, same = np.ones(np.shape(first)), np.ones(np.shape(first), bool)
        for level in range(self._levels):
            here, there = self._alone(level, sizes[level]), self._alone(level, others[level])
            both = here * there  # of different units, or each leaf by itself
            if level < len(self.draws):
                of_one_unit = here * (self.draws[level] - 1) / np.maximum(1.0, sizes[level] - 1)
                both = np.where(same, of_one_unit, both)
            still = same & (one[level] == two[level])
            found = found * np.where(still, here, both)
            same = still
        return found

    def _alone(self, level: int, size: np.ndarray) -> np.ndarray:
        if level < len(self.draws):
            return self.draws[level] / size
        return np.full(np.shape(size), self.leaf_probability)
