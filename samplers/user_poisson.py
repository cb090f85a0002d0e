"""Poisson sampling of examples of which each user has several: protects users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accounting import PrivacyProfile, UserPoissonProfile
from accounting.profile import check_count
from samplers.poisson import Poisson


@dataclass(frozen=True)
class UserPoisson(Poisson):
    """Poisson sampling of examples of which no user has more than tau; protects users.

    `num_examples` counts the examples kept under the cap (`Contributions.kept`), which are the rows
    of the training data. Each is clipped by itself.
    """

    max_contributions: int = field(kw_only=True)
    """Most examples tau of one user among the rows."""
    unit: str = field(default="user", kw_only=True)

    def __post_init__(self) -> None:
        check_count("max_contributions", self.max_contributions)
        super().__post_init__()

    def privacy_of(self, noise_multiplier: float, stretches: Sequence[range]) -> PrivacyProfile:
        """Returns the profile for users: of Binomial(tau, q) of a user's examples in every step.

        Source: see `accounting.profiles.user_poisson`; truncation as for `Poisson`.
        """
        steps = sum(map(len, stretches))
        profile = UserPoissonProfile(
            noise_multiplier, steps, self.sampling_prob, self.max_contributions
        )
        return self.with_truncation(profile, steps)
