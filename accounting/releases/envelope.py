"""The upper envelope of several mechanisms' profiles: a bound whichever of them is run."""

from __future__ import annotations

from dataclasses import dataclass

from accounting.profile import Bound, PrivacyProfile, Profile, Question


@dataclass(frozen=True)
class EnvelopeProfile(Profile):
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

    def answer(self, question: Question) -> Bound:
        """Answers by the largest of the profiles."""
        return Bound.largest(question.of(profile) for profile in self.profiles)
