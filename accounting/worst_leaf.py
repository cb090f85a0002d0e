"""Multistage sampling from an uneven tree: the profile of its worst leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from accounting.profile import UpperEnd
from accounting.profiles.multistage import MultistageProfile
from accounting.releases import EnvelopeProfile

_MOST_PATHS = 4


def lowest_paths(paths: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the paths of the worst leaves, ascending: no other path is below in every level.

    >>> lowest_paths([(10, 40), (10, 25), (9, 30)])
    ((9, 30), (10, 25))

    Args:
      paths: (N_1, ..., N_L), the sizes along the path of each kind of leaf; at least one.
    """
    ascending = sorted(set(paths))
    lowest = np.empty((0, len(ascending[0])), np.int64)
    for path in ascending:  # lower paths come first
        if not np.all(lowest <= path, axis=1).any():
            lowest = np.vstack([lowest, path])
    return tuple(tuple(int(size) for size in path) for path in lowest)


def worst_leaf(
    noise_multiplier: float,
    steps: int,
    draws: tuple[int, ...],
    paths: Iterable[tuple[int, ...]],
    clipped_level: int | None = None,
) -> EnvelopeProfile:
    """Returns the profile of the worst leaf of an uneven tree.

    Epsilon grows as the N_j on a leaf's path get smaller (docs/explanation/multistage-sampling.md),
    so only paths count that have no other path below them in every level. If these are more than
    a few, the smallest N_j of each level replace them, as an upper bound; the lower end belongs to
    one path.

    Args:
      noise_multiplier: Noise multiplier s, in units of the clipping norm.
      steps: Number T of releases.
      draws: Children n_j drawn of each drawn unit, level 1 first.
      paths: Sizes N_j along the path of each kind of leaf; at least one path.
      clipped_level: Level of the clipped units, see `MultistageProfile`.

    Raises:
      ValueError: If a number is out of range, or more are drawn than there are.
    """

    def leaf(path: tuple[int, ...]) -> MultistageProfile:
        return MultistageProfile(noise_multiplier, steps, draws, path, clipped_level)

    worst = lowest_paths(paths)
    if len(worst) <= _MOST_PATHS:
        return EnvelopeProfile(tuple(leaf(path) for path in worst))
    smallest = tuple(min(sizes) for sizes in zip(*worst, strict=True))
    return EnvelopeProfile((UpperEnd(leaf(smallest), leaf(min(worst, key=math.prod))),))
