"""The one root search of a falling function; its ends are proved where the caller asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable


def falling_root(
    excess: Callable[[float], float],
    start: float,
    enough: Callable[[float], float],
    *,
    low: float = -math.inf,
    slope: float = -1.0,
    near: float = 0.0,
    either: bool = False,
    farthest: float = 1e12,
) -> tuple[float, float]:
    """Returns a point with `excess` > 0, or `low`, and one with `excess` <= 0, or infinity.

    By secants that end a little past the root, so that both ends move (above it, where one end is
    enough), and by bisection where these do not shrink the bracket.

    >>> low, high = falling_root(lambda x: 2.0 - x * x, 1.0, lambda x: 1e-9, low=0.0)
    >>> low < 2.0**0.5 <= high <= low + 1e-9
    True

    Args:
      excess: Falling function, up to errors; it may be infinite below some point. Where it is not
        a number nothing is proved: the search goes on as if it were infinite.
      start: First point, >= `low`.
      enough: Maps a point to the width of a bracket that suffices there.
      low: Point that is not above the root.
      slope: About the slope of `excess`, < 0.
      near: Share of that width within which, by the slope, a point above the root may lie for the
        search to end there; 0 to prove both ends.
      either: True if a point below the root ends the search as well.
      farthest: Largest point that is tried.
    """
    high, at, stride = math.inf, start, 0.0
    last, widths = (math.nan, math.nan), [math.inf] * 3
    while True:
        value, width = excess(at), enough(at)
        if math.isnan(value):
            value = math.inf
        measured = (value - last[1]) / (at - last[0]) if at != last[0] else math.nan
        if -math.inf < measured < 0.0:
            slope = measured
        last = at, value
        low, high = (max(low, at), high) if value > 0.0 else (low, min(high, at))
        narrow = high < math.inf and high - low <= enough(high)
        close = near > 0.0 and near * width * slope <= value <= 0.0
        close = close or (either and abs(value) <= -near * width * slope)
        if narrow or close or low >= farthest:
            return low, high
        guess = at - value / slope
        guess += 0.4 * near * width if near else math.copysign(0.4 * width, guess - at)
        stride = 2.0 * stride or width
        if measured >= 0.0 or value == math.inf:  # a plateau
            guess, stride = at, max(stride, 0.1 * max(1.0, abs(at)))
        if high == math.inf:
            at = min(max(guess, at + stride), 2.0 * abs(at) + 1.0, farthest)
        elif low == -math.inf:
            at = min(at - stride, guess)
        elif low < guess < high and high - low <= 0.5 * widths[-3]:
            at = guess
        else:
            at = 0.5 * (low + high)
        widths.append(high - low)


def log_excess(value: float, target: float) -> float:
    """Returns log(`value` / `target`), with their difference's exact sign.

    >>> log_excess(1.0, 1.0), log_excess(0.0, 1.0) < 0.0 < log_excess(2.0, 1.0)
    (0.0, True)

    Args:
      value: Number >= 0.
      target: Number > 0.
    """
    if value == math.inf:
        return math.inf
    excess = math.log(max(value, 1e-320) / target)
    return max(excess, 5e-324) if value > target else min(excess, 0.0)
