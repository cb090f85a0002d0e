"""Certified order of two profiles at an epsilon, and epsilons at which it changes.

Proofs for two samplers: docs/explanation/balls-and-bins-against-poisson.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from accounting.profile import Bound, PrivacyProfile

_TOLERANCES = (1e-2, 1e-3, 1e-5, 1e-9)
"""Widths of successive comparisons of two profiles, relative to delta."""
_LARGEST_EPSILON = 1e4


class Order(NamedTuple):
    """The deltas of two profiles at one epsilon."""

    first: Bound
    second: Bound

    @property
    def sign(self) -> int:
        """Certified order: -1, 1, or 0 if undecided.

        It is -1 if the first delta is certified smaller, 1 if it is certified larger.
        """
        if min(self.first.confidence, self.second.confidence) < 1.0:
            return 0  # estimates certify nothing
        if self.first.upper < self.second.lower:
            return -1
        return int(self.first.lower > self.second.upper)


def compare(first: PrivacyProfile, second: PrivacyProfile, epsilon: float) -> Order:
    """Bounds two deltas until their order is certified.

    Args:
      first: Profile of the first delta.
      second: Profile of the second delta.
      epsilon: Epsilon >= 0 of both deltas.

    Returns:
      The last bounds; their `sign` is 0 if the sharpest do not decide.
    """
    bounds = [Bound(0.0, 1.0), Bound(0.0, 1.0)]
    for tolerance in _TOLERANCES:
        for i, profile in enumerate((first, second)):
            if not bounds[i].note:
                new = profile.delta(epsilon, tolerance)
                lower, upper = max(bounds[i].lower, new.lower), min(bounds[i].upper, new.upper)
                bounds[i] = Bound(lower, upper, new.confidence, new.note)
        if Order(*bounds).sign:
            break
    return Order(*bounds)


def crossing(
    first: PrivacyProfile, second: PrivacyProfile, guess: float = 1.0, ratio: float = 1.01
) -> Bound:
    """Bounds an epsilon at which two profiles' order changes.

    At the upper end the first delta is certified smaller than the second one; at the lower end it
    is certified larger, unless that end is 0. So the curves cross between both ends, or at 0; they
    may cross again elsewhere.

    Args:
      first: The profile whose delta is larger near epsilon 0.
      second: The profile whose delta is larger at large epsilons.
      guess: First guess of the crossing, > 0.
      ratio: Ratio of upper to lower end at which the search stops, > 1.

    Raises:
      ValueError: If the first delta is certified smaller at no epsilon that was tried.
    """

    @cache
    def sign(epsilon: float) -> int:
        """Returns the certified order at ε."""
        return compare(first, second, epsilon).sign

    upper, lower = guess, 0.0
    while sign(upper) >= 0:
        lower, upper = (upper if sign(upper) > 0 else lower), 2.0 * upper
        if upper > _LARGEST_EPSILON:
            raise ValueError(f"the first delta is not certified smaller up to epsilon {upper:g}")
    while lower == 0.0 and upper > 1e-12 and sign(0.5 * upper) < 0:
        upper *= 0.5
    probe = 0.5 * upper
    while lower == 0.0 and probe > 0.01 * upper:
        lower, probe = (probe if sign(probe) > 0 else 0.0), 0.5 * probe
    crossed = upper
    upper = _edge(lambda e: sign(e) < 0, upper, lower or probe, ratio)
    return Bound(_edge(lambda e: sign(e) > 0, lower, crossed, ratio), upper)


def _edge(met: Callable[[float], bool], inside: float, outside: float, ratio: float) -> float:
    """Returns a point where `met` is true, `inside` or one that is nearer to `outside`."""
    while inside > 0.0 and max(inside / outside, outside / inside) > ratio:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if met(middle) else (inside, middle)
    return inside
