"""Poisson sampling of users' examples: protects users."""

from __future__ import annotations

from dataclasses import dataclass, field

import accounting
from accounting.profile import ComposesWithGaussian
from accounting.records import Count
from samplers.poisson import Poisson
from samplers.population import Population


@dataclass(frozen=True)
class UserPoisson(Poisson):
    """Poisson sampling that protects users with at most tau examples each.

    `num_examples` counts the rows of the training data, after the cap of tau examples per user
    (`Contributions.of_examples`). Each example is clipped separately.

    >>> sampler = UserPoisson(num_examples=1_000, batch_size=100, max_contributions=5)
    >>> sampler.unit, sampler.sampling_prob
    ('user', 0.1)

    Attributes:
      max_contributions: Largest number tau of examples of one user.
      num_users: Number of users, for the default delta. Default: the number of rows.
    """

    max_contributions: Count = field(kw_only=True)
    num_users: Count | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_users is not None and self.num_users > self.num_examples:
            raise ValueError(f"num_users must be at most {self.num_examples}, got {self.num_users}")
        if self.max_contributions > self.num_examples:
            raise ValueError(
                f"max_contributions must be at most the {self.num_examples} rows, got "
                f"{self.max_contributions}"
            )
        if self.cycle_length > 1:
            raise ValueError(
                f"cycle_length must be 1 for UserPoisson, got {self.cycle_length}: it separates "
                "the steps of examples, and not of users"
            )

    @property
    def unit(self) -> str:
        """Name of the protected unit: "user"."""
        return "user"

    @property
    def num_units(self) -> int:
        """Number of users, or of rows if unknown."""
        return self.num_users or self.num_examples

    def protected_unit(self, population: Population) -> str:
        """Returns "user", after a check of the data's cap.

        Raises:
          ValueError: If a user may have more rows than tau, or the number of users differs.
        """
        super().protected_unit(population)
        most = population.max_contributions
        if population.row != "example" or most is None or most > self.max_contributions:
            limit = f"up to {most}" if most else "any number of"
            raise ValueError(
                f"the sampler draws from at most {self.max_contributions} examples of each user, "
                f"and in these data a user may hold {limit}: pass "
                "cap_contributions(...).of_examples(columns)"
            )
        if self.num_users is not None and population.num_users not in (None, self.num_users):
            raise ValueError(
                f"the sampler has num_users {self.num_users}, and the data have "
                f"{population.num_users}"
            )
        return "user"

    def _untruncated(
        self, noise_multiplier: float, steps: int | None = None
    ) -> ComposesWithGaussian:
        """Returns the profile for users: of Binomial(tau, q) of a user's examples in every step.

        Source: see `accounting.profiles.user_poisson`.
        """
        steps = self.num_steps if steps is None else steps
        return accounting.UserPoissonProfile(
            noise_multiplier, steps, self.sampling_prob, self.max_contributions
        )
