"""What is asked of a run that is not made: its sampler, and the public sizes of its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accounting.checks import check_count
from dpsgd.runs.spec import RunSpec
from experiments.cli.options import naming, spec_of
from samplers import Population, UnitTree
from samplers.settings import SamplerSettings
from samplers.tree import TreeShape

if TYPE_CHECKING:
    from dpsgd.runs.resolve import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class OfSizes:
    """The run that is asked about, of data that are known by public sizes alone."""

    sampler: SamplerSettings
    """Sampler that draws the batches."""
    num_examples: int
    """Number of training examples (public)."""
    unit: Literal["example", "user"] = "example"
    """Meaning of one row. user: all data of one user, clipped as one."""
    max_contributions: int | None = None
    """Largest number of examples of one user, for user-poisson."""
    num_users: int | None = None
    """Number of users, for the default delta of user-poisson."""
    sizes: tuple[int, ...] = ()
    """Children per unit on each level, for samplers of units within units: on the path of the
    example that is drawn most often, and the smallest where sizes differ."""
    units: tuple[str, ...] = ()
    """Name of the units on each level, for the guarantee's sentence."""
    largest_unit: int | None = None
    """Examples of the largest unit. Default: all units are equally large."""

    def spec(self, **others: Any) -> RunSpec:
        """Returns the run that is asked about, with `others` in place of its own options.

        Raises:
          ValueError: for options that no run has, as the command line names them.
        """
        return spec_of(self, **{"l2_clip_norm": 1.0, **others})

    def population(self, *, drawn: bool = False) -> Population:
        """Returns what is drawn from.

        Args:
          drawn: Whether it is, in which case all units of a level have one size.

        Raises:
          ValueError: for sizes that no data have, or that the sampler does not go by.
        """
        levels, needed = len(self.sizes) - 1, self.sampler.of_data()
        for name, given in {
            "tree": self.sizes,
            "max_contributions": self.max_contributions,
            "num_users": self.num_users,
        }.items():
            option = "--sizes" if name == "tree" else f"--{name.replace('_', '-')}"
            if given and name not in needed:
                raise ValueError(f"sampler:{self.sampler.name} takes no {option}")
            if not given and name in needed and name != "num_users":
                raise ValueError(f"sampler:{self.sampler.name} needs {option}")
        if self.sizes and min(self.sizes) < 1:
            raise ValueError(f"--sizes needs a number >= 1 for each level, got {self.sizes}")
        if self.units and len(self.units) != levels:
            raise ValueError(
                f"--units needs {max(levels, 0)} names, one for each level of --sizes above the "
                f"examples, got {self.units}"
            )
        if self.sizes and self.unit != "example":
            raise ValueError(f"--unit {self.unit}: the rows of --sizes are examples")
        if self.largest_unit is not None and self.largest_unit < (*self.sizes, 1)[levels]:
            raise ValueError(f"--largest-unit is less than the smallest unit: {self.largest_unit}")
        with naming(self):
            check_count("num_examples", self.num_examples)
        tree: UnitTree | TreeShape | None = None
        names = self.units or ("unit",) * levels
        if self.sizes and drawn:
            if math.prod(self.sizes) != self.num_examples:
                raise ValueError(
                    f"--num-examples must be {math.prod(self.sizes)}, the product of --sizes: "
                    "units of one size are drawn"
                )
            tree = UnitTree.even(self.sizes, names)
        elif self.sizes:
            tree = TreeShape(
                digest="",
                names=names,
                num_leaves=self.num_examples,
                most_leaves=self.largest_unit or self.sizes[-1],
                mean_leaves=float(self.sizes[-1]),
                worst_paths=(self.sizes,),
            )
        return Population(
            self.num_examples, self.unit, self.max_contributions, self.num_users, tree
        )

    def resolved(self) -> ResolvedRun:
        """Returns the run: its sampler, the size of its noise, and the delta of its guarantee.

        Raises:
          ValueError: for choices that no run can have, or a target out of reach.
        """
        spec, population = self.spec(), self.population()
        from dpsgd.runs.resolve import resolved

        with naming(self):
            return resolved(spec, population)
