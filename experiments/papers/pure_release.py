"""A mechanism together with a release of pure epsilon, such as a private choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.checks import check_epsilon
from accounting.profile import Bound, PrivacyProfile, Profile, Question

_NOTE = "the lower end is that of the mechanism alone"


@dataclass(frozen=True)
class WithPureReleaseProfile(Profile):
    r"""Profile of a mechanism beside a release with pure epsilon_0, in either order.

    .. math:: \delta(\epsilon) \le p\, \delta'(\epsilon - \epsilon_0)
        + (1 - p)\, \delta'(\epsilon + \epsilon_0), \quad p = 1/(1 + e^{-\epsilon_0})

    with delta' of `profile`, which must hold for every released value. At a given delta, epsilon' +
    epsilon_0 is sufficient. Proof:
    docs/explanation/composition-with-further-releases.md.

    Source: Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015.

    Args:
      profile: Profile of the mechanism alone.
      pure_epsilon: Epsilon_0 >= 0 of the pure release.

    Raises:
      ValueError: If `pure_epsilon` is negative or not finite.
    """

    profile: PrivacyProfile
    pure_epsilon: float

    def __post_init__(self) -> None:
        check_epsilon(self.pure_epsilon)

    def answer(self, question: Question) -> Bound:
        """Answers by the mechanism's profile at shifted epsilons."""
        inner = question.ask(self.profile)
        note = (inner.note or _NOTE) if self.pure_epsilon else inner.note
        if question.wanted == "epsilon":
            return Bound.resting_on(inner, inner.lower, inner.upper + self.pure_epsilon, note)
        low, high = question.at - self.pure_epsilon, question.at + self.pure_epsilon
        delta_at_low = self.profile.delta(abs(low), question.tolerance).upper
        if low < 0.0:
            delta_at_low = 1.0 - math.exp(low) * (1.0 - delta_at_low)
        weight = 1.0 / (1.0 + math.exp(-self.pure_epsilon))
        delta_at_high = self.profile.delta(high, question.tolerance).upper
        upper = weight * delta_at_low + (1.0 - weight) * delta_at_high
        return Bound.resting_on(inner, inner.lower, min(1.0, upper * (1.0 + 1e-12)), note)
