"""Root searches of falling functions: with both ends proved, or with an upper end near the root."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Function = Callable[[float], float]


@dataclass
class _Search:
    """A bracket of the root, and the next point, by secants or by bisection.

    Attributes:
      low: Point with a positive value, or one that is not above the root.
      at: Next point.
      farthest: Largest point that is tried.
      slope: About the function's slope, < 0.
      high: Point with a value <= 0, or infinity.
      stride: Step beyond the known points while one end is open.
      last: Last point and its value.
      widths: Widths of the bracket so far.
      rises: True if the last two values show no fall.
    """

    low: float
    at: float
    farthest: float
    slope: float = -1.0
    high: float = math.inf
    stride: float = 0.0
    last: tuple[float, float] = (math.nan, math.nan)
    widths: list[float] = field(default_factory=lambda: [math.inf] * 3)
    rises: bool = False

    def record(self, value: float) -> float:
        """Moves an end to the point `at`, and returns its value; NaN counts as infinity."""
        at, value = self.at, math.inf if math.isnan(value) else value
        measured = (value - self.last[1]) / (at - self.last[0]) if at != self.last[0] else math.nan
        if -math.inf < measured < 0.0:
            self.slope = measured
        self.rises = measured >= 0.0
        self.last = at, value
        if value > 0.0:
            self.low = max(self.low, at)
        else:
            self.high = min(self.high, at)
        return value

    def root(self) -> float:
        """Estimates the root, by the last value and the slope."""
        return self.last[0] - self.last[1] / self.slope

    def move(self, guess: float, width: float) -> None:
        """Moves on to `guess`, or to a point that shrinks the bracket.

        Args:
          guess: Point that is probably near the root.
          width: First step beyond the known points while one end is open.
        """
        low, high, at = self.low, self.high, self.at
        self.stride = 2.0 * self.stride or width
        if self.rises or self.last[1] == math.inf:  # a plateau
            guess, self.stride = at, max(self.stride, 0.1 * max(1.0, abs(at)))
        if high == math.inf:
            self.at = min(max(guess, at + self.stride), 2.0 * abs(at) + 1.0, self.farthest)
        elif low == -math.inf:
            self.at = min(at - self.stride, guess)
        elif low < guess < high and high - low <= 0.5 * self.widths[-3]:
            self.at = guess
        else:
            self.at = 0.5 * (low + high)
        self.widths.append(high - low)

    def ends(self, enough: Function) -> bool:
        """Returns whether the bracket is narrow enough, or no root is within reach."""
        narrow = self.high < math.inf and self.high - self.low <= enough(self.high)
        return narrow or self.low >= self.farthest


def falling_root(
    excess: Function,
    start: float,
    enough: Function,
    *,
    low: float = -math.inf,
    farthest: float = 1e12,
) -> tuple[float, float]:
    """Returns proved ends of the root of a falling function.

    They are a point with `excess` > 0, or `low`, and one with `excess` <= 0, or infinity. Secants
    end a little past the root, so that both ends move; where they do not shrink the bracket it is
    bisected.

    >>> low, high = falling_root(lambda x: 2.0 - x * x, 1.0, lambda x: 1e-9, low=0.0)
    >>> low < 2.0**0.5 <= high <= low + 1e-9
    True

    Args:
      excess: Falling function, up to errors; it may be infinite below some point. Where it is not
        a number nothing is proved: the search goes on as if it were infinite.
      start: First point, >= `low`.
      enough: Maps a point to the width of a bracket that suffices there.
      low: Point that is not above the root.
      farthest: Largest point that is tried.
    """
    search = _Search(low, start, farthest)
    while True:
        search.record(excess(search.at))
        if search.ends(enough):
            return search.low, search.high
        width, root = enough(search.at), search.root()
        search.move(root + math.copysign(0.4 * width, root - search.at), width)


def point_near_root(
    excess: Function,
    start: float,
    enough: Function,
    *,
    low: float,
    slope: float = -1.0,
    near: float = 1.0,
    either: bool = False,
    farthest: float = 1e12,
) -> tuple[float, float]:
    """Returns ends of the root, one of them near it.

    As `falling_root`, but the search ends at the first point that is near the root by the slope:
    the upper end, or with `either` possibly the lower one. The other end need not be near; each has
    the sign that `falling_root` proves.

    Args:
      excess: As for `falling_root`.
      start: First point, >= `low`.
      enough: Maps a point to the width that suffices there.
      low: Point that is not above the root.
      slope: About the slope of `excess`, < 0.
      near: Share of the width within which a point above the root ends the search, > 0.
      either: True if a point as near below the root ends the search as well.
      farthest: Largest point that is tried.
    """
    search = _Search(low, start, farthest, slope)
    while True:
        value, width = search.record(excess(search.at)), enough(search.at)
        reach = -near * width * search.slope
        if -reach <= value <= 0.0 or (either and abs(value) <= reach) or search.ends(enough):
            return search.low, search.high
        search.move(search.root() + 0.4 * near * width, width)


def log_excess(value: float, target: float) -> float:
    """Returns log(`value` / `target`), with their difference's exact sign.

    >>> log_excess(1.0, 1.0), log_excess(0.0, 1e300) < 0.0 < log_excess(2.0, 1.0)
    (0.0, True)

    Args:
      value: Number >= 0.
      target: Number > 0.
    """
    if value == math.inf:
        return math.inf
    excess = math.log(max(value / target, 1e-320))
    return max(excess, 5e-324) if value > target else min(excess, 0.0)
