"""Bounds, privacy profiles, and the two questions asked of them: epsilon and the noise multiplier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Bound:
    """A number that knows how it bounds the truth: truth in [lower, upper].

    Attributes:
      lower: No truth lies below it.
      upper: No truth lies above it; this end, with confidence 1, is what a guarantee may print.
      confidence: Probability with which the interval holds; 1.0 means proved.
    """

    lower: float
    upper: float
    confidence: float = 1.0

    def __post_init__(self) -> None:
        if math.isnan(self.lower) or math.isnan(self.upper) or self.lower > self.upper:
            raise ValueError(f"a bound needs lower <= upper, got [{self.lower}, {self.upper}]")
        if not 0.0 < self.confidence <= 1.0:
            raise ValueError(f"confidence must be in (0, 1], got {self.confidence}")


@runtime_checkable
class PrivacyProfile(Protocol):
    """The curve delta(epsilon) = sup over neighbours and events of P(event) - e^epsilon Q(event)."""

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        ...

    def epsilon(self, delta: float) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` in (0, 1)."""
        ...


def epsilon(profile: PrivacyProfile, delta: float) -> Bound:
    """Bounds the smallest epsilon that `profile` guarantees at `delta`."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    return profile.epsilon(delta)


def calibrate(
    privacy: Callable[[float], PrivacyProfile], *, epsilon: float, delta: float
) -> float:
    """Returns the smallest noise multiplier whose upper bound meets (epsilon, delta)."""
    raise NotImplementedError
