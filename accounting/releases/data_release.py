"""What was released of the rows before a run: noisy counts, such as those of private bounds."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from accounting.checks import check_noise_multiplier
from accounting.profile import Bound, PrivacyProfile, Profile, Question, UpperEnd, proved
from accounting.profiles.gaussian import GaussianProfile, composed_noise
from accounting.releases.gaussian_release import WithGaussianReleaseProfile

_UP = 1.0 + 1e-12
"""Outward rounding of what is computed in a few float operations."""


@dataclass(frozen=True)
class DataRelease:
    """Noisy counts of the rows, and a chance that a value of one row alone comes out.

    Two of equal numbers are two releases, and cost more than one: each has a name of its own.

    Attributes:
      noise_multiplier: r > 0: standard deviation of the noise over the L2 norm by which one row
        moves all counts together.
      failure: f in [0, 1): with at most this probability is a value released that one row alone
        has.
      name: What tells it from all others; by default drawn anew.

    Raises:
      ValueError: If a number is out of range.
    """

    noise_multiplier: float
    failure: float = 0.0
    name: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        _check_failure(self.failure)

    def __str__(self) -> str:
        """Returns what it is, in words."""
        failure = f", failure probability {self.failure:.3g}" if self.failure else ""
        return f"noisy counts of the rows (noise multiplier {self.noise_multiplier:.6g}{failure})"

    @staticmethod
    def together(releases: Sequence[DataRelease]) -> DataRelease:
        """Returns one release that costs as much as all of several, at least one, do.

        >>> both = DataRelease.together([DataRelease(3.0), DataRelease(4.0)])
        >>> round(both.noise_multiplier, 3)
        2.4
        """
        if len(releases) == 1:
            return releases[0]
        noise = functools.reduce(composed_noise, (one.noise_multiplier for one in releases))
        return DataRelease(noise / _UP, math.fsum(one.failure for one in releases) * _UP)

    def privacy(self) -> PrivacyProfile:
        """Returns what the release costs by itself."""
        return UpperEnd(WithFailureProfile(GaussianProfile(self.noise_multiplier), self.failure))

    def before(self, profile: PrivacyProfile) -> PrivacyProfile:
        """Returns what the release and a run after it cost; the lower end is that of the run.

        Args:
          profile: Of the run, which must hold whatever was released.
        """
        both = WithGaussianReleaseProfile(profile, self.noise_multiplier)
        return UpperEnd(WithFailureProfile(both, self.failure), profile)


@dataclass(frozen=True)
class WithFailureProfile(Profile):
    r"""The profile of a mechanism beside one that is (0, f)-DP, with f = `failure`.

    .. math:: \delta(\epsilon) \le f + (1 - f)\, \delta'(\epsilon)

    with delta' = `profile`'s. Proof: docs/explanation/composition-with-further-releases.md.

    Source: Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015.

    Raises:
      ValueError: If `failure` is not in [0, 1); on a question, if `profile` is not proved.
    """

    profile: PrivacyProfile
    failure: float

    def __post_init__(self) -> None:
        _check_failure(self.failure)

    def answer(self, question: Question) -> Bound:
        """Answers by the mechanism's profile, which is asked for a smaller delta."""
        inner = proved(question.of(self.profile))
        if not self.failure:
            return inner
        if question.wanted == "delta":
            upper = (self.failure + (1.0 - self.failure) * inner.upper) * _UP
            return Bound.resting_on(inner, inner.lower, min(1.0, upper))
        left = (question.at / _UP - self.failure) / _UP  # divided by 1 - f it would be more
        if left <= 0.0:
            note = f"the failure probability {self.failure:.3g} leaves nothing of delta = "
            return Bound.resting_on(inner, inner.lower, math.inf, f"{note}{question.at}")
        upper = proved(self.profile.epsilon(left, question.tolerance)).upper
        return Bound.resting_on(inner, inner.lower, max(inner.upper, upper))


def _check_failure(failure: float) -> None:
    if not 0.0 <= failure < 1.0:
        raise ValueError(f"failure must be in [0, 1), got {failure}")
