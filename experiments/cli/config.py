"""What a user asks for: typed, frozen, and the help of a command line that is not needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accounting import check_guarantee_delta, default_delta
from experiments.cli.errors import naming_options
from samplers import BatchSampler, Population, TreeShape, UnitTree
from samplers.settings import DEFAULTS, SamplerSettings

if TYPE_CHECKING:
    from dpsgd.runs.spec import RunSpec


def check_default_batch_size(batch_size: int, num_examples: int) -> None:
    """Raises ValueError if the default is a larger batch than there are examples."""
    if 1 <= num_examples < batch_size == DEFAULTS["batch_size"]:
        raise ValueError(
            f"--batch-size is {batch_size} by default, which is more than the {num_examples} "
            "training examples: give a smaller one"
        )


def check_target(epsilon: float | None, advantage: float | None) -> None:
    """Raises ValueError, as the command line names it, unless there is one target of a run."""
    if (epsilon is None) == (advantage is None):
        raise ValueError("give exactly one of --target-epsilon and --target-advantage")
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise ValueError(f"--target-epsilon must be finite and > 0, got {epsilon}")
    if advantage is not None and not 0 < advantage < 1:
        raise ValueError(f"--target-advantage must lie in (0, 1), got {advantage}")


@dataclass(frozen=True)
class GuaranteeConfig:
    """The run that a guarantee is asked for, of data that are known by public sizes alone."""

    sampler: SamplerSettings
    """How batches are drawn."""
    num_examples: int
    """Training examples (public)."""
    target_delta: float | None = None
    """Delta of the guarantee; by default min(1e-5, n^-1.1) for n protected units, rounded down to
    one digit."""
    unit: Literal["example", "user"] = "example"
    """What one of the num_examples rows is: user, where it is all data of one, clipped as one."""
    max_contributions: int | None = None
    """Most examples of one user, for user-poisson."""
    num_users: int | None = None
    """Users among the examples, for user-poisson: the default delta goes by them."""
    sizes: tuple[int, ...] = ()
    """For samplers of units within units: how many children there are, level by level, on the path
    of the example that is drawn most often; of units of unequal sizes, the smallest."""
    units: tuple[str, ...] = ()
    """What the units of each level are, for the guarantee's words."""
    largest_unit: int | None = None
    """Examples of the largest unit; by default as many as of the smallest."""
    calibration: Literal["none", "platt"] = "none"
    """platt: the run also calibrates its model, as `dpsgd train` does with clicks by default, and
    all that is said is about both together."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values without a guarantee."""
        if self.num_examples < 1:
            raise ValueError(f"--num-examples must be at least 1, got {self.num_examples}")
        if self.target_delta is not None:
            check_guarantee_delta(self.target_delta, "--target-delta")
        levels = len(self.sizes) - 1
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
        needed = self.sampler.of_data()
        for name, given in (("tree", self.sizes), ("max_contributions", self.max_contributions)):
            option = {"tree": "--sizes", "max_contributions": "--max-contributions"}[name]
            if (name in needed) != bool(given):
                what = "needs" if name in needed else "takes no"
                raise ValueError(f"sampler:{self.sampler.name} {what} {option}")
        if self.num_users is not None and "num_users" not in needed:
            raise ValueError(f"sampler:{self.sampler.name} takes no --num-users")

    def population(self, *, drawn: bool = False) -> Population:
        """Returns what is drawn from.

        Args:
          drawn: Whether it is, in which case all units of a level have one size.
        """
        tree: UnitTree | TreeShape | None = None
        names = self.units or ("unit",) * (len(self.sizes) - 1)
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

    def build(self, *, drawn: bool = False) -> tuple[BatchSampler, float]:
        """Returns the sampler, and the delta of its guarantee."""
        self.check()
        with naming_options(type(self.sampler)):
            sampler = self.sampler.build(self.population(drawn=drawn), self.target_delta)
        return sampler, self.delta_of(sampler)

    def delta_of(self, sampler: BatchSampler) -> float:
        """Returns the delta of the guarantee."""
        return default_delta(sampler.num_units) if self.target_delta is None else self.target_delta

    def full_sums(self, sampler: BatchSampler, delta: float, goal: Any) -> Any:
        """Returns the sums over all rows of the calibration that is asked for, or None.

        Args:
          sampler: From `build`.
          delta: From `build`.
          goal: By what they are chosen, see `dpsgd.runs.search.platt`.

        Raises:
          ValueError: if the run cannot be calibrated.
        """
        if self.calibration == "none":
            return None
        from dpsgd.runs.resolve import full_sums
        from dpsgd.runs.spec import RunSpec

        try:
            return full_sums(RunSpec(self.sampler, goal), sampler, delta)
        except ValueError as error:
            raise ValueError(
                f"--calibration {self.calibration} cannot be had: {error}; leave it out"
            ) from None


@dataclass(frozen=True)
class AuditConfig(GuaranteeConfig):
    """The run that is audited, and how."""

    noise_multiplier: float = field(kw_only=True)
    """Noise standard deviation over the clipping norm."""
    l2_clip_norm: float = 1.0
    """Bound on the L2 norm of one example's gradient."""
    secure_noise: bool = False
    """Audit exact sums and exact noise, as of a run with --secure-noise."""
    bands: int | None = None
    """Audit noise that is correlated over so many steps, as of a run with --bands; as in a run, the
    sampler's cycle_length becomes this."""
    tables: Literal["dense", "lazy"] = "dense"
    """lazy: audit tables whose noise comes late, as of a run with --tables lazy."""
    tables_momentum: float | None = None
    """Of lazy tables, in [0, 1); by default 0."""
    tables_weight_decay: float = 0.0
    """Of lazy tables."""
    claim: str | None = None
    """Hold the run to the guarantee of this sampler, in place of its own: see what, for example,
    shuffling that is claimed to be Poisson really costs."""
    black_box: bool = False
    """Bound epsilon from below by the outputs of whole runs alone."""
    trials: int = 200_000
    """Runs of the black-box audit, in each of the two worlds."""
    plot: Path = Path("audit.png")
    """Figure that the black-box audit writes, .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace a figure that is there under that name."""

    def spec(self) -> RunSpec:
        """Returns the run that is audited.

        Raises:
          ValueError: as the command line names them, for choices that no run can have.
        """
        from dpsgd.runs.resolve import check
        from dpsgd.runs.spec import RunSpec, known_options

        names = known_options().keys() & {one.name for one in fields(self)} - {"calibration"}
        with naming_options(type(self), type(self.sampler)):
            spec = RunSpec.of(**{name: getattr(self, name) for name in names})
            check(spec)
        return replace(spec, delta=self.target_delta, calibration="none")
