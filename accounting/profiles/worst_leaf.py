"""Multistage sampling from an uneven tree: the profile of its worst leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from accounting.checks import check_settings
from accounting.profile import Bound, PrivacyProfile, Question, UpperEnd
from accounting.profiles.gaussian import WithRelease
from accounting.profiles.multistage import MultistageProfile

_MOST_PATHS = 4


def lowest_paths(paths: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the paths that no other path is below in every level, ascending: the worst leaves'.

    >>> lowest_paths([(10, 40), (10, 25), (9, 30)])
    ((9, 30), (10, 25))

    Args:
      paths: (N_1, ..., N_L), the sizes along the path of each kind of leaf; at least one.
    """
    ascending = sorted(set(paths))
    lowest = np.empty((0, len(ascending[0])), np.int64)
    for path in ascending:  # what is below a path comes before it
        if not np.all(lowest <= path, axis=1).any():
            lowest = np.vstack([lowest, path])
    return tuple(tuple(int(size) for size in path) for path in lowest)


@dataclass(frozen=True)
class WorstLeafProfile(WithRelease):
    """The profile of the worst leaf of an uneven tree.

    Epsilon grows as the N_j on a leaf's path get smaller (docs/explanation/multistage-sampling.md),
    so that only the paths count that no other path is below in every level. If these are more than
    a few, the smallest N_j of each level stand for all: an upper bound; the lower end belongs to
    one path.

    Args:
      noise_multiplier: s, in units of the clipping norm.
      steps: T, number of releases.
      draws: n_j, children drawn of each drawn unit.
      paths: For each kind of leaf, the N_j on its path.
      clipped_level: As for `MultistageProfile`.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Raises:
      ValueError: If a number is out of range, or more are drawn than there are.
    """

    noise_multiplier: float
    steps: int
    draws: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    clipped_level: int | None = None
    release: float = math.inf

    def __post_init__(self) -> None:
        check_settings(self, counts=("steps",))
        if not self.paths:
            raise ValueError("paths must name the sizes along the path of at least one leaf")
        for path in self.paths:
            self._profile(path)

    def answer(self, question: Question) -> Bound:
        """Answers by the largest of the worst leaves' profiles."""
        return Bound.largest(question.of(profile) for profile in self._worst())

    def _profile(self, path: tuple[int, ...]) -> MultistageProfile:
        return MultistageProfile(
            self.noise_multiplier,
            self.steps,
            self.draws,
            path,
            self.clipped_level,
            release=self.release,
        )

    def _worst(self) -> list[PrivacyProfile]:
        worst = lowest_paths(self.paths)
        if len(worst) <= _MOST_PATHS:
            return [self._profile(path) for path in worst]
        smallest = tuple(min(sizes) for sizes in zip(*worst, strict=True))
        likeliest = min(worst, key=math.prod)
        return [UpperEnd(self._profile(smallest), self._profile(likeliest))]
