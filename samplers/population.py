"""The data that a sampler draws from: how many rows, and what each of them is.

Rows are examples unless the data are of the type `UnitData`, made by `Contributions.of_users`,
`Contributions.of_examples` or `UnitData.of_tree`: the unit of a guarantee is read from them.
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
      tree: Units within units, with the rows as leaves, or the shape of such a tree.
    """

    num_examples: int
    row: Literal["example", "user"] = "example"
    max_contributions: int | None = None
    num_users: int | None = None
    tree: UnitTree | TreeShape | None = None


class UnitData(NamedTuple):
    """Training data that say what their rows are; all other data have examples as rows."""

    columns: Any
    """The rows: a pytree of arrays with one leading row each, `population.num_examples` in all."""
    population: Population

    @classmethod
    def of_tree(cls, tree: UnitTree, columns: Any) -> UnitData:
        """Returns data whose rows are the leaves of `tree`: columns with a row for each leaf."""
        return cls(columns, Population(tree.num_leaves, tree=tree))
