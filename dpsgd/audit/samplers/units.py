"""Examples drawn at random from the units that they lie in, for tests of draws of units."""

from __future__ import annotations

import numpy as np


class UnitChoice:
    """Examples drawn at random from the units that they lie in.

    Args:
      units: The units that each example lies in, int32[levels, n], numbered in one order; None if
        there are none: then all examples are of different ones.
      rows: Number n of examples.
      seed: Of the choice.

    Attributes:
      all: The examples.
      sizes: Examples of each innermost unit.
      rank: Of each example among those of its innermost unit, in ascending order.
    """

    def __init__(self, units: np.ndarray | None, rows: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed % 2**128)
        self.all = np.arange(rows)
        self._units = units
        if units is None:
            self._order = self._starts = self.all
            return
        self._order = np.argsort(units[-1], kind="stable")
        self._starts = np.flatnonzero(np.diff(units[0][self._order], prepend=-1))
        self._lengths = np.diff(self._starts, append=rows)
        self.sizes = np.bincount(units[-1])
        self.rank = np.empty(rows, np.int64)
        starts = np.cumsum(self.sizes) - self.sizes
        self.rank[self._order] = self.all - starts[units[-1][self._order]]
        self._first = self._order[starts]

    def of(self, level: int, examples: np.ndarray) -> np.ndarray:
        """Returns the units of `level` that these examples lie in."""
        assert self._units is not None
        return self._units[level, examples]

    def units(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the innermost units of these examples, and how many each holds of them."""
        return np.unique(self.of(-1, examples), return_counts=True)

    def above(self, level: int, units: np.ndarray) -> np.ndarray:
        """Returns the units of `level` in which these innermost ones lie."""
        assert self._units is not None
        return self._units[level, self._first[units]]

    def shuffled(self, examples: np.ndarray) -> np.ndarray:
        """Returns these examples in random order."""
        return self._rng.permutation(examples)

    def apart(self) -> np.ndarray:
        """Returns examples of different outermost units: one of each, chosen anew."""
        if self._starts is self.all:
            return self.all
        chosen = self._rng.random(self._lengths.size) * self._lengths
        return self._order[self._starts + chosen.astype(np.int64)]

    def together(self, *, next_one: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns a pair of examples of each outermost unit: neighbours there, or any two."""
        several = self._lengths > 1
        starts, sizes = self._starts[several], self._lengths[several]
        first = (self._rng.random(sizes.size) * (sizes - 1)).astype(np.int64)
        step = (self._rng.random(sizes.size) * (sizes - 1 - first)).astype(np.int64)
        second = first + 1 + (0 if next_one else step)
        return self._order[starts + first], self._order[starts + second]
