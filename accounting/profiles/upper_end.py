"""A profile of which the upper end alone is proved for what it is taken for."""

from __future__ import annotations

from dataclasses import dataclass

from accounting.profile import EPSILON_TOLERANCE, Bound, PrivacyProfile


@dataclass(frozen=True)
class UpperEnd:
    """The upper end of another profile, with 0 as lower end and a note that says so.

    >>> from accounting import GaussianProfile
    >>> UpperEnd(GaussianProfile(2.0)).delta(1.0).lower
    0.0
    """

    profile: PrivacyProfile

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0 from above."""
        return _upper(self.profile.delta(epsilon, tolerance))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` from above."""
        return _upper(self.profile.epsilon(delta, tolerance))


def _upper(found: Bound) -> Bound:
    note = "no lower end is proved"
    return Bound(
        0.0, found.upper, found.confidence, f"{found.note}; {note}" if found.note else note
    )
