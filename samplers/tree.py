"""A public tree of units within units, with examples as leaves, and its shape for accounting."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import accounting


@dataclass(frozen=True)
class TreeShape:
    """Facts of a tree that decide its privacy cost: for accounting, not for drawing.

    A leaf with more children on its path is drawn less often, and costs less: only minimal paths
    count, which no other path is below in every level.

    Attributes:
      digest: SHA-256 of the tree, as hexadecimal digits.
      names: Name of the units of each level below the root, outermost first.
      num_leaves: Number of examples.
      most_leaves: Number of examples of the largest unit of the last level.
      mean_leaves: Mean number of examples of a unit of the last level, drawn from the root by one
        uniform child at each level.
      worst_paths: Minimal paths (N_1, ..., N_L): numbers of children on a leaf's path from the
        root.
    """

    digest: str
    names: tuple[str, ...]
    num_leaves: int
    most_leaves: int
    mean_leaves: float
    worst_paths: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        named = "".join(f"{name}, " for name in self.names)
        return f"TreeShape({named}{self.num_leaves} leaves, {self.digest[:8]})"

    @property
    def shape(self) -> TreeShape:
        """The shape itself: it may stand for a `UnitTree`."""
        return self

    @property
    def num_levels(self) -> int:
        """Number of levels L, with the leaves."""
        return len(self.names) + 1

    def smallest(self, level: int) -> tuple[int, str]:
        """Returns the smallest number of children, and its unit's name."""
        label = f"some {self.names[level - 1]}" if level else "the root"
        return min(path[level] for path in self.worst_paths), label

    def likeliest(self, draws: Sequence[int]) -> tuple[float, int]:
        """Returns the likeliest unit's probability and number of children.

        Args:
          draws: Numbers n_1, n_2, ... of children drawn of each drawn unit; the likeliest unit is
            of level len(draws).
        """
        return max(
            (math.prod(map(operator.truediv, draws, path)), path[len(draws)])
            for path in self.worst_paths
        )

    def terms(self) -> dict[str, Any]:
        """Returns the shape as JSON values."""
        return asdict(self)

    @classmethod
    def from_terms(cls, terms: Mapping[str, Any]) -> TreeShape:
        """Returns the shape of `terms`."""
        paths = tuple(tuple(path) for path in terms["worst_paths"])
        return cls(**{**terms, "names": tuple(terms["names"]), "worst_paths": paths})


class UnitTree:
    """Examples as the leaves of a tree of units, in compressed index arrays.

    The children of unit u of level j - 1 are the units starts[j-1][u] : starts[j-1][u + 1] of level
    j; the children of the last level of units are positions in `leaves`. Level 0 is the root.

    Args:
      starts: Index of each unit's first child, for each level j = 0, ..., L-1: int64[units + 1].
      leaves: The example at each position, int32[num_leaves].
      labels: For each level of units below the root, its name and the label of each of its units.

    Attributes:
      starts: Tuple of the arguments' arrays.
      leaves: The example at each position.
      labels: Tuple of (column name, labels [units of the level]).
      shape: Facts that decide the privacy cost.
    """

    def __init__(
        self,
        starts: Sequence[np.ndarray],
        leaves: np.ndarray,
        labels: Sequence[tuple[str, np.ndarray]],
    ) -> None:
        self.starts = tuple(starts)
        self.leaves = leaves
        self.labels = tuple(labels)
        self.shape = self._shape()

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> UnitTree:
        """Builds the tree of a table, whose rows are leaves.

        >>> tree = UnitTree.from_columns({"partner": ["b", "a", "b"], "product": [1, 1, 2]})
        >>> tree.num_levels, tree.num_leaves, tree.label(2, 1)
        (3, 3, 'partner=b, product=1')

        Args:
          columns: One or more columns of equal length, the outermost units first. Units of one
            label under different parents are different units.

        Raises:
          ValueError: If there is no column or no row, or columns differ in length.
        """
        if not columns:
            raise ValueError("a tree of units needs at least one column")
        values = {name: np.asarray(column) for name, column in columns.items()}
        sizes = {name: column.shape for name, column in values.items()}
        if len(set(sizes.values())) > 1 or any(len(shape) != 1 for shape in sizes.values()):
            raise ValueError(f"columns need one value per example, got shapes {sizes}")
        (rows,) = next(iter(sizes.values()))
        if rows == 0:
            raise ValueError("a tree of units needs at least one example")
        codes = [np.unique(column, return_inverse=True)[1] for column in values.values()]
        order = np.lexsort(codes[::-1])
        first, unit = np.arange(rows) == 0, np.zeros(rows, np.int64)  # of rows in this order
        starts, labels = [], []
        for (name, column), code in zip(values.items(), codes, strict=True):
            first = first | np.append(True, np.diff(code[order]) != 0)
            starts.append(np.append(0, np.cumsum(np.bincount(unit[first]))))
            labels.append((name, column[order][first]))
            unit = np.cumsum(first) - 1
        starts.append(np.append(0, np.cumsum(np.bincount(unit))))
        return cls(starts, order.astype(np.int32), labels)

    @classmethod
    def even(cls, sizes: Sequence[int], names: Sequence[str]) -> UnitTree:
        """Builds a tree whose units of a level have equally many children.

        >>> UnitTree.even((2, 3), ("shop",))
        UnitTree(2 x shop, 6 leaves)

        Args:
          sizes: Number of children of each unit by level from the root; the last counts examples.
          names: Name of the units of each level below the root.
        """
        counts = [math.prod(sizes[:level]) for level in range(len(sizes) + 1)]
        starts = [
            np.arange(count + 1) * size for count, size in zip(counts[:-1], sizes, strict=True)
        ]
        labels = [(name, np.arange(count)) for name, count in zip(names, counts[1:-1], strict=True)]
        return cls(starts, np.arange(counts[-1], dtype=np.int32), labels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitTree | TreeShape) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        units = ", ".join(f"{labels.size} x {name}" for name, labels in self.labels)
        return f"UnitTree({units}, {self.num_leaves} leaves)"

    @property
    def num_levels(self) -> int:
        """Number of levels L, with the leaves."""
        return len(self.starts)

    @property
    def num_leaves(self) -> int:
        """Number of examples."""
        return self.leaves.size

    def smallest(self, level: int) -> tuple[int, str]:
        """Returns the smallest unit's number of children, and its label.

        >>> UnitTree.from_columns({"shop": ["a", "b", "a"]}).smallest(1)
        (1, 'shop=b')
        """
        sizes = self.sizes(level)
        unit = int(np.argmin(sizes))
        return int(sizes[unit]), self.label(level, unit)

    def sizes(self, level: int) -> np.ndarray:
        """Returns each unit's number of children on a level.

        >>> UnitTree.from_columns({"shop": ["a", "b", "a"]}).sizes(1)
        array([2, 1])
        """
        return np.diff(self.starts[level])

    def label(self, level: int, unit: int) -> str:
        """Returns the labels on the path to a unit.

        Args:
          level: Level of the unit; 0 is the root.
          unit: Index of the unit within its level.
        """
        path = []
        for j in range(level, 0, -1):
            name, labels = self.labels[j - 1]
            path.append(f"{name}={labels[unit]}")
            unit = int(np.searchsorted(self.starts[j - 1], unit, side="right")) - 1
        return ", ".join(reversed(path)) or "the root"

    def paths(self) -> list[tuple[int, ...]]:
        """Returns the distinct paths (N_1, ..., N_L) of the leaves.

        >>> UnitTree.from_columns({"shop": ["a", "b", "a"]}).paths()
        [(2, 1), (2, 2)]
        """
        table = self.sizes(0)[:, None]
        for level in range(1, self.num_levels):
            parent = np.repeat(np.arange(self.sizes(level - 1).size), self.sizes(level - 1))
            table = np.column_stack([table[parent], self.sizes(level)])
        return [tuple(int(size) for size in path) for path in np.unique(table, axis=0)]

    def _shape(self) -> TreeShape:
        digest = hashlib.sha256()
        for array in (*self.starts, self.leaves):
            digest.update(array.astype("<i8").tobytes() + b"|")
        reached = np.ones(1)  # each unit's probability, where each level draws one child uniformly
        for level in range(self.num_levels - 1):
            reached = np.repeat(reached / self.sizes(level), self.sizes(level))
        leaves = self.sizes(self.num_levels - 1)
        return TreeShape(
            digest=digest.hexdigest(),
            names=tuple(name for name, _ in self.labels),
            num_leaves=self.num_leaves,
            most_leaves=int(leaves.max()),
            mean_leaves=float(np.dot(reached, leaves)),
            worst_paths=accounting.worst_leaf.lowest_paths(self.paths()),
        )
