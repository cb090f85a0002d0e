"""A mechanism together with a release of pure epsilon, such as a private choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.checks import check_epsilon
from accounting.profile import Bound, PrivacyProfile, Profile, Question

_NOTE = "the lower end is that of the mechanism alone"


@dataclass(frozen=True)
class WithPureReleaseProfile(Profile):
    r"""The profile of a mechanism that follows (or precedes) a release with pure epsilon_0.

    .. math:: \delta(\epsilon) \le p\, \delta'(\epsilon - \epsilon_0)
        + (1 - p)\, \delta'(\epsilon + \epsilon_0), \quad p = 1/(1 + e^{-\epsilon_0})

    with delta' = `profile`'s, which must hold for every released value. At a given delta,
    epsilon' + epsilon_0 is sufficient. Proof:
    docs/explanation/composition-with-further-releases.md.

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

    def answer(self, question: Question) -> Bound:
        """Answers by the mechanism's profile at two other epsilons, or by the sum of both."""
        inner = question.ask(self.profile)
        note = (inner.note or _NOTE) if self.pure_epsilon else inner.note
        if question.wanted == "epsilon":
            return Bound.resting_on(inner, inner.lower, inner.upper + self.pure_epsilon, note)
        less, more = question.at - self.pure_epsilon, question.at + self.pure_epsilon
        above = self.profile.delta(abs(less), question.tolerance).upper
        if less < 0.0:
            above = 1.0 - math.exp(less) * (1.0 - above)
        right = 1.0 / (1.0 + math.exp(-self.pure_epsilon))
        upper = right * above + (1.0 - right) * self.profile.delta(more, question.tolerance).upper
        return Bound.resting_on(inner, inner.lower, min(1.0, upper * (1.0 + 1e-12)), note)
