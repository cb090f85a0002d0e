"""Laws of the participation matrix, which audits test a sampler's draws against.

A law states how often a row takes part, and how rows, steps and epochs depend on each other.
Proofs: docs/explanation/laws-of-participation.md.
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

    In every law, the entries of one step are *negatively associated* across outermost units (across
    all rows, where there are no `units`), as independent entries are. Rows of one shard and equal
    rates (with `units`: children of one unit) are exchangeable: given how many of them take part in
    a step, every subset of this size is equally likely.

    Attributes:
      steps_per_epoch: Number T of steps of one epoch.
      epochs: Number E of epochs.
      once: True if each example takes part in exactly one step of an epoch; else an epoch's steps
        are independent.
      redrawn: True if epochs are independent; else all epochs are equal.
      independent: True if rows are independent.
      certain: True if nothing is random.
      any_order: True if the privacy cost holds for any assignment of examples to steps.
      batch_sizes: Rows of each batch of an epoch, int64[T]; None if they are random.
      leaf_probability: Probability with which each example of a drawn innermost unit takes part,
        independently; None if a fixed number of them does.
      cycle_length: Period c of cyclic sampling: example i takes part in steps t = i mod c alone.
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
        """Units of each example, outermost first: int32[levels, n], or None."""
        return None

    @property
    def most_units(self) -> tuple[int, ...]:
        """Largest number of units in a batch, level by level."""
        return ()

    @property
    def unit_rates(self) -> tuple[np.ndarray, ...]:
        """Probability of each unit in a step, level by level."""
        return ()

    @abc.abstractmethod
    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns Pr[x_it = 1], by broadcasting.

        Args:
          examples: Examples i: integers of any shape.
          steps: Steps t of an epoch: integers of any shape that broadcasts with `examples`.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class IndependentRows(RowLaw):
    """Independent rows with one participation probability.

    Attributes:
      probability: Probability of an entry in a step of the example's group.
    """

    probability: float
    independent: bool = True

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns `probability` in steps of the example's group, else 0."""
        if self.cycle_length == 1:
            return np.asarray(self.probability)
        in_group = (np.asarray(examples) - steps) % self.cycle_length == 0
        return np.where(in_group, self.probability, 0.0)

    def folded(self) -> IndependentRows:
        """Returns the law of one group's steps, without cycles."""
        length = self.steps_per_epoch // self.cycle_length
        return dataclasses.replace(self, steps_per_epoch=length, cycle_length=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Orders(RowLaw):
    """In every epoch step t has the examples t b to (t + 1) b - 1 of an order of all shards.

    Attributes:
      batch_size: Batch size b.
      shards: Shards of the examples.
    """

    batch_size: int
    batch_sizes: np.ndarray
    shards: Shards
    once: bool = True

    @classmethod
    def of_size(cls: type[L], shards: Shards, batch_size: int, epochs: int, **rest: Any) -> L:
        """Returns the law of batches of one size, but for an epoch's last."""
        starts = np.arange(0, shards.num_examples, batch_size, dtype=np.int64)
        sizes = np.minimum(batch_size, shards.num_examples - starts)
        sized: dict[str, Any] = {"batch_size": batch_size, "batch_sizes": sizes, **rest}
        return cls(steps_per_epoch=starts.size, epochs=epochs, shards=shards, **sized)


@dataclass(frozen=True, eq=False, kw_only=True)
class RandomOrders(_Orders):
    """Each shard's examples come in an independent uniform order, and shards in turn."""

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns the batch's share of the example's shard."""
        shards = self.shards.shard_of(examples)
        return self._taken(shards, steps) / self.shards.size(shards)

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
        """Returns 1 in the example's step, else 0."""
        example_steps = self.shards.in_turn(np.asarray(examples)) // self.batch_size
        return (example_steps == steps).astype(np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeDraws(RowLaw):
    """Every step draws down a tree of units independently, without replacement.

    Attributes:
      tree: Tree of units, with the examples as leaves.
      draws: Number of children drawn of each drawn unit, the outermost first; the last entry
        counts leaves if `leaf_probability` is None.
    """

    tree: UnitTree | TreeShape
    draws: tuple[int, ...]
    steps_per_epoch: int = 1
    once: bool = False

    @cached_property
    def units(self) -> np.ndarray | None:
        """Units of each example, outermost first: int32[levels, n], or None."""
        tree = self._tree
        levels: list[np.ndarray] = []
        for level in range(tree.num_levels - 1):
            levels = [np.repeat(above, tree.sizes(level)) for above in levels]
            unit = np.arange(tree.starts[level][-1], dtype=np.int32)
            levels.append(unit)
        by_position = [np.repeat(above, tree.sizes(tree.num_levels - 1)) for above in levels]
        if not by_position:
            return None
        units = np.empty((len(levels), tree.num_leaves), np.int32)
        units[:, tree.leaves] = by_position
        return units

    @property
    def most_units(self) -> tuple[int, ...]:
        """Largest number of units in a batch, level by level."""
        return tuple(math.prod(self.draws[: level + 1]) for level in range(self._levels - 1))

    @cached_property
    def unit_rates(self) -> tuple[np.ndarray, ...]:
        """Probability of each unit in a step, level by level."""
        rates = [np.ones(1)]
        for level in range(self._levels - 1):
            size = self._sizes[level]
            rates.append(np.repeat(rates[-1] * self._alone(level, size), size.astype(np.int64)))
        return tuple(rates[1:])

    @property
    def _tree(self) -> UnitTree:
        if isinstance(self.tree, TreeShape):
            raise ValueError(
                f"tree={self.tree!r} is a shape, which has no units of examples: pass a UnitTree"
            )
        return self.tree

    @property
    def _levels(self) -> int:
        return self.tree.num_levels

    @cached_property
    def _sizes(self) -> list[np.ndarray]:
        return [self._tree.sizes(level).astype(np.float64) for level in range(self._levels)]

    def rate(self, examples: Any, steps: Any) -> np.ndarray:
        """Returns the product of the levels' drawn shares."""
        examples, units = np.asarray(examples), self.units
        parents = [np.zeros_like(examples), *([] if units is None else units[:, examples])]
        probability = np.ones(np.shape(examples))
        for level, (size, parent) in enumerate(zip(self._sizes, parents, strict=True)):
            probability = probability * self._alone(level, size[parent])
        return probability

    def _alone(self, level: int, size: np.ndarray) -> np.ndarray:
        if level < len(self.draws):
            return self.draws[level] / size
        return np.full(np.shape(size), self.leaf_probability)
