"""Public facts about the rows that a sampler draws from: their number and their unit.

Rows are examples unless the data are of the type `UnitData`, made by `Contributions.of_users`,
`Contributions.of_examples` or `UnitData.of_tree`: its population decides the protected unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from samplers.tree import TreeShape, UnitTree


@dataclass(frozen=True)
class Population:
    """Public facts of the rows that a sampler draws from.

    Attributes:
      num_examples: Number n of rows.
      row: Meaning of one row: an example, or all data of one user, clipped as one.
      max_contributions: Most examples of one user among rows that are examples; None if unknown.
      num_users: Number of users among rows that are examples; None if unknown.
      tree: Tree of nested units with the rows as leaves, or its shape; None for rows without units.
    """

    num_examples: int
    row: Literal["example", "user"] = "example"
    max_contributions: int | None = None
    num_users: int | None = None
    tree: UnitTree | TreeShape | None = None


class UnitData(NamedTuple):
    """Training data with the unit of their rows; plain data have examples as rows."""

    columns: Any
    """Pytree of arrays, each with `population.num_examples` rows in its leading axis."""
    population: Population

    @classmethod
    def of_tree(cls, tree: UnitTree, columns: Any) -> UnitData:
        """Returns data whose rows are leaves of `tree`.

        >>> tree = UnitTree.from_columns({"shop": ["a", "a", "b"]})
        >>> UnitData.of_tree(tree, {"x": [1, 2, 3]}).population.num_examples
        3

        Args:
          tree: Tree of units, with one leaf per row.
          columns: Pytree of arrays with one row per leaf.
        """
        return cls(columns, Population(tree.num_leaves, tree=tree))
