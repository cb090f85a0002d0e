"""A mechanism together with a release of pure epsilon, such as a private choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    PrivacyProfile,
    check_delta,
    check_epsilon,
)


@dataclass(frozen=True)
class WithPureReleaseProfile:
    r"""The profile of a mechanism that follows (or precedes) a release with pure epsilon_0.

    .. math:: \delta(\epsilon) \le p\, \delta'(\epsilon - \epsilon_0)
        + (1 - p)\, \delta'(\epsilon + \epsilon_0), \quad p = 1/(1 + e^{-\epsilon_0})

    with delta' = `profile`'s, which must hold whatever was released. At a given delta, epsilon' +
    epsilon_0 is sufficient. Proof: docs/explanation/composition-with-further-releases.md.

    Source: Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015.

    Args:
      profile: The mechanism's own.
      pure_epsilon: epsilon_0, >= 0.

    Raises:
      ValueError: If `pure_epsilon` is negative or not finite.
    """

    profile: PrivacyProfile
    pure_epsilon: float

    def __post_init__(self) -> None:
        check_epsilon(self.pure_epsilon)

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        inner = self.profile.delta(check_epsilon(epsilon), tolerance)
        less, more = epsilon - self.pure_epsilon, epsilon + self.pure_epsilon
        above = self.profile.delta(abs(less), tolerance).upper
        if less < 0.0:
            above = 1.0 - math.exp(less) * (1.0 - above)
        right = 1.0 / (1.0 + math.exp(-self.pure_epsilon))
        upper = right * above + (1.0 - right) * self.profile.delta(more, tolerance).upper
        upper = min(1.0, upper * (1.0 + 1e-12))
        return Bound.resting_on(inner, inner.lower, upper)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`."""
        inner = self.profile.epsilon(check_delta(delta), tolerance)
        return Bound.resting_on(inner, inner.lower, inner.upper + self.pure_epsilon)
