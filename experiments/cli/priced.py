"""Samplers over units and users, as a price needs them: by public sizes, without the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from experiments.cli.config import GuaranteeConfig, Poisson
from experiments.cli.sampler_commands import SamplerCommand, subcommand

if TYPE_CHECKING:
    from samplers import BatchSampler, TreeShape


@dataclass(frozen=True)
class _Tree:
    draws_examples: ClassVar[bool]
    """Whether the examples, too, are drawn without replacement."""

    draws: tuple[int, ...]
    """How many are drawn of the children of each drawn unit, the outermost level first."""
    sizes: tuple[int, ...]
    """How many children there are, level by level, on the path of the example that is drawn most
    often: of units of unequal sizes, the smallest."""
    steps: int
    """Steps of the run, each with an episode of its own."""
    units: tuple[str, ...] = ()
    """What the units of each level are, for the guarantee's words."""

    def _shape(self, num_examples: int, largest_unit: int | None = None) -> TreeShape:
        from samplers import TreeShape

        levels = len(self.sizes) - 1
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if levels < 0 or min(self.sizes) < 1:
            raise ValueError(f"--sizes needs a number >= 1 for each level, got {self.sizes}")
        drawn = levels + self.draws_examples
        if len(self.draws) != drawn or min(self.draws) < 1:
            what = "level" if self.draws_examples else "level above the examples"
            raise ValueError(
                f"--draws needs {drawn} number{'s' if drawn > 1 else ''} >= 1, one for each {what} "
                f"of --sizes, got {self.draws}"
            )
        if self.units and len(self.units) != levels:
            raise ValueError(
                f"--units needs {levels} names, one for each level above the examples, "
                f"got {self.units}"
            )
        largest = self.sizes[-1] if largest_unit is None else largest_unit
        if largest < self.sizes[-1]:
            raise ValueError(
                f"--largest-unit is less than the smallest unit: {largest} < {self.sizes[-1]}"
            )
        return TreeShape(
            digest="",
            names=self.units or ("unit",) * levels,
            num_leaves=num_examples,
            most_leaves=largest,
            mean_leaves=float(self.sizes[-1]),
            worst_paths=(self.sizes,),
        )


@dataclass(frozen=True)
class Multistage(_Tree):
    """Episodes: units, units of these, ..., then examples, without replacement at each level."""

    name: ClassVar[str] = "multistage"
    draws_examples: ClassVar[bool] = True

    clipped_level: int | None = None
    """Level of the units whose gradient is clipped as one; by default each example's is."""
    protected_level: int | None = None
    """Level of what is protected: the examples by default, or --clipped-level."""

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns a sampler that can be priced, and not drawn from."""
        import samplers

        return samplers.Multistage(
            self._shape(num_examples),
            self.draws,
            steps=self.steps,
            clipped_level=self.clipped_level,
            protected_level=self.protected_level,
        )

    def alternatives(self, noise_multiplier: float, delta: float) -> list[str]:
        """Returns epsilon of what could be done in its place at equal noise, a line each."""
        from accounting import Bound
        from accounting.estimates import episodic

        found = episodic.compare(noise_multiplier, self.steps, self.draws, self.sizes, delta)
        return [
            "at equal noise, protecting one example:",
            *(
                f"  {name}: {price:.4g}" if isinstance(price, Bound) else f"  {name}: {price}"
                for name, price in found.items()
            ),
        ]


@dataclass(frozen=True)
class UnitsThenPoisson(_Tree):
    """Units drawn without replacement, then each of their examples independently."""

    name: ClassVar[str] = "units-then-poisson"
    draws_examples: ClassVar[bool] = False

    sampling_prob: float = 0.1
    """Probability with which an example of a drawn unit takes part."""
    largest_unit: int | None = None
    """Examples of the largest unit; by default as many as of the smallest."""
    max_batch_size: int | None = None
    """Examples that one step can hold; by default so many that truncation costs next to nothing."""

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns a sampler that can be priced, and not drawn from."""
        import samplers

        return samplers.UnitsThenPoisson(
            self._shape(num_examples, self.largest_unit),
            self.draws,
            self.sampling_prob,
            steps=self.steps,
            max_batch_size=self.max_batch_size,
            target_delta=target_delta,
        )


@dataclass(frozen=True)
class UserPoisson(Poisson):
    """Each example independently, of which each user has at most --max-contributions; for users.

    To sample whole users, take any other sampler with the number of users for --num-examples.
    """

    name: ClassVar[str] = "user-poisson"

    max_contributions: int = 10
    """Most examples of one user."""

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns the sampler over `num_examples` examples, all users' together."""
        import samplers

        return samplers.UserPoisson(
            self._fitting(num_examples),
            max_contributions=self.max_contributions,
            **self._sizes(target_delta),
        )


PricedSampler = (
    SamplerCommand
    | Annotated[Multistage, subcommand(Multistage)]
    | Annotated[UnitsThenPoisson, subcommand(UnitsThenPoisson)]
    | Annotated[UserPoisson, subcommand(UserPoisson)]
)


@dataclass(frozen=True)
class PriceConfig(GuaranteeConfig):
    """The run that is priced."""

    sampler: PricedSampler  # type: ignore[assignment]  # more can be priced than trained with
    """How batches are drawn."""
    unit: Literal["example", "user"] | None = None
    """What one of the num_examples rows is and the guarantee protects, if not an example: "user"
    where a row is all data of one user, clipped together."""

    def protected_unit(self, sampler: BatchSampler) -> str:
        """Returns what one of the num_examples rows, or the sampler, says is protected."""
        if self.unit is None:
            return sampler.unit
        if isinstance(self.sampler, _Tree | UserPoisson):
            raise ValueError("--unit: what this sampler protects is not up to its rows")
        return self.unit
