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
"""Widths, relative to delta, at which two profiles are compared, one after another."""
_LARGEST_EPSILON = 1e4


class Order(NamedTuple):
    """The deltas of two profiles at one epsilon."""

    first: Bound
    second: Bound

    @property
    def sign(self) -> int:
        """-1 where the first delta is certified smaller, 1 where larger, 0 where undecided."""
        if min(self.first.confidence, self.second.confidence) < 1.0:
            return 0  # estimates certify nothing
        if self.first.upper < self.second.lower:
            return -1
        return int(self.first.lower > self.second.upper)


def compare(first: PrivacyProfile, second: PrivacyProfile, epsilon: float) -> Order:
    """Bounds two deltas at `epsilon` >= 0, more and more sharply until their order is certified."""
    bounds = [Bound(0.0, 1.0), Bound(0.0, 1.0)]
    for tolerance in _TOLERANCES:
        for i, profile in enumerate((first, second)):
            if not bounds[i].note:
                again = profile.delta(epsilon, tolerance)
                lower, upper = max(bounds[i].lower, again.lower), min(bounds[i].upper, again.upper)
                bounds[i] = Bound(lower, upper, again.confidence, again.note)
        if Order(*bounds).sign:
            break
    return Order(*bounds)


def crossing(
    first: PrivacyProfile, second: PrivacyProfile, guess: float = 1.0, ratio: float = 1.01
) -> Bound:
    """Bounds an epsilon at which the order of two profiles changes.

    At the upper end the first delta is certified smaller than the second one; at the lower end it
    is certified larger, unless that is 0. So the curves cross between, if not at 0; elsewhere they
    may cross again.

    Args:
      first: The profile whose delta is larger near epsilon 0.
      second: The other one.
      guess: About where they cross, > 0.
      ratio: Of the two ends, where the search stops.

    Raises:
      ValueError: If the first delta is certified smaller at no epsilon that was tried.
    """

    @cache
    def sign(epsilon: float) -> int:
        return compare(first, second, epsilon).sign

    upper, lower = guess, 0.0
    while sign(upper) >= 0:
        lower, upper = (upper if sign(upper) > 0 else lower), 2.0 * upper
        if upper > _LARGEST_EPSILON:
            raise ValueError(f"the first delta is not certified smaller up to epsilon {upper:g}")
    while lower == 0.0 and upper > 1e-12 and sign(0.5 * upper) < 0:
        upper *= 0.5
    below = 0.5 * upper
    while lower == 0.0 and below > 0.01 * upper:
        lower, below = (below if sign(below) > 0 else 0.0), 0.5 * below
    crossed = upper
    upper = _edge(lambda e: sign(e) < 0, upper, lower or below, ratio)
    return Bound(_edge(lambda e: sign(e) > 0, lower, crossed, ratio), upper)


def _edge(met: Callable[[float], bool], inside: float, outside: float, ratio: float) -> float:
    """Returns a point where `met` is true, `inside` or one that is nearer to `outside`."""
    while inside > 0.0 and max(inside / outside, outside / inside) > ratio:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if met(middle) else (inside, middle)
    return inside
