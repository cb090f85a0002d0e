"""The upper envelope of several mechanisms' profiles: a bound whichever of them is run."""

from __future__ import annotations

from dataclasses import dataclass

from accounting.profile import EPSILON_TOLERANCE, Bound, PrivacyProfile


@dataclass(frozen=True)
class EnvelopeProfile:
    """The pointwise maximum of profiles, delta(epsilon) = max_i delta_i(epsilon).

    It bounds a mechanism that is one of several, chosen independently of the data, with the choice
    released (docs/explanation/composition-with-further-releases.md).

    Args:
      profiles: One or more, of the same adjacency.

    Raises:
      ValueError: If there are none.

    >>> from accounting import GaussianProfile
    >>> sharp, noisy = GaussianProfile(1.0), GaussianProfile(2.0)
    >>> EnvelopeProfile((noisy, sharp)).delta(1.0) == sharp.delta(1.0)
    True
    """

    profiles: tuple[PrivacyProfile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles must name at least one")

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        return Bound.largest(profile.delta(epsilon, tolerance) for profile in self.profiles)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` in (0, 1)."""
        return Bound.largest(profile.epsilon(delta, tolerance) for profile in self.profiles)
