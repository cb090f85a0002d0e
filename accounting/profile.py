"""Bounds, privacy profiles, and the questions asked of them: epsilon, the noise, the counts."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Protocol, runtime_checkable

Direction = Literal["remove", "add"]
"""Which law of a pair is P and which Q: the example's row against zeros, or zeros against it."""

EPSILON_TOLERANCE = 1e-3
"""How far apart, in epsilon, the two ends of a certified bound may stay by default.

It is relative to an epsilon below 1: see `wanted_width`.
"""

_SMALLEST_EPSILON = 1e-12
"""No search tells an epsilon below this from 0."""

# Beyond these, squares and logarithms leave the range of floats.
_SMALLEST_DELTA = 1e-300
_SMALLEST_NOISE = 1e-100

_COARSE = 0.02
"""Relative width, in epsilon and in noise, at which `calibrate` begins to look closely."""

_LARGEST_LOG_NOISE = math.log(1e9)
"""Largest logarithm of a noise multiplier that `calibrate` tries."""

_SPEC = re.compile(r"\.(\d+)([efg])")


class ContradictoryBounds(RuntimeError):
    """A lower bound above an upper one: at least one is wrong, and neither may be used.

    Each end is rounded outward by its own error, so that roundings alone cannot make two ends
    cross. It is an error of this program, never of its input.
    """


@dataclass(frozen=True)
class Bound:
    """A number that knows how it bounds the truth: truth in [lower, upper].

    Formatting rounds outward, so that a printed upper end is never below the true one:

    >>> bound = Bound(0.40371, 0.40376)
    >>> f"{bound:.3f}"
    '[0.403, 0.404]'
    >>> bound.format_upper(".2e")
    '4.04e-01'

    Attributes:
      lower: No truth lies below it.
      upper: No truth lies above it; this end, with confidence 1, is what a guarantee may print.
      confidence: Probability with which the interval holds; 1.0 means proved.
      note: Why the interval is wider than was asked for; empty where it is not.

    Raises:
      ContradictoryBounds: If `lower` is above `upper`, or one of them is not a number.
      ValueError: If `confidence` is not in (0, 1].
    """

    lower: float
    upper: float
    confidence: float = 1.0
    note: str = ""

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise ContradictoryBounds(
                f"a lower bound of {self.lower!r} contradicts an upper bound of {self.upper!r}: "
                "this is an error of the program, please report it; neither number may be used"
            )
        if not 0.0 < self.confidence <= 1.0:
            raise ValueError(f"confidence must be in (0, 1], got {self.confidence}")

    @classmethod
    def resting_on(cls, inner: Bound, lower: float, upper: float, note: str | None = None) -> Bound:
        """Returns a bound derived from `inner`, with its confidence and, by default, its note.

        Where `inner` is not proved chance may make the two ends cross: the upper one gives way.
        """
        if inner.confidence < 1.0:
            upper = max(lower, upper)
        return cls(lower, upper, inner.confidence, inner.note if note is None else note)

    @property
    def width(self) -> float:
        """The distance between the two ends; 0 where both are the same infinity."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower

    def format_lower(self, spec: str = ".3f") -> str:
        """Formats the lower end, rounded down; `spec` is '.Nf', '.Ne' or '.Ng'."""
        return _round_outward(self.lower, spec, up=False)

    def format_upper(self, spec: str = ".3f") -> str:
        """Formats the upper end, rounded up; `spec` is '.Nf', '.Ne' or '.Ng'."""
        return _round_outward(self.upper, spec, up=True)

    def __format__(self, spec: str) -> str:
        """Formats as '[lower, upper]', rounded outward; `spec` is '.Nf', '.Ne' or '.Ng'."""
        if not spec:
            return str(self)
        return f"[{self.format_lower(spec)}, {self.format_upper(spec)}]"


def _round_outward(value: float, spec: str, *, up: bool) -> str:
    """Formats `value` so that the decimal that is printed is >= it (up) or <= it (down)."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"a Bound is formatted by '.Nf', '.Ne' or '.Ng', got {spec!r}")
    if not math.isfinite(value):
        return str(value)
    digits, kind = int(match[1]), match[2]
    # 'g' drops trailing zeros, which hide the last place: round in 'e', then print that decimal.
    working = f".{max(digits - 1, 0)}e" if kind == "g" else spec
    printed, exact = Decimal(format(value, working)), Decimal(value)
    last_place = Decimal(1).scaleb(int(printed.as_tuple().exponent))
    if up and printed < exact:
        printed += last_place
    elif not up and printed > exact:
        printed -= last_place
    # Decimal writes 4.04e-1 where float writes 4.04e-01.
    return re.sub(r"e([+-])(\d)$", r"e\g<1>0\2", format(printed, spec))


@runtime_checkable
class PrivacyProfile(Protocol):
    """The curve delta(epsilon) = sup over neighbours, events of P(event) - e^epsilon Q(event)."""

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        ...

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` in (0, 1).

        `tolerance` is the width at which a profile that refines a grid may stop: in epsilon, and
        relative to an epsilon below 1. A search far from its answer asks for less. A closed form
        ignores it.
        """
        ...


def epsilon(profile: PrivacyProfile, delta: float) -> Bound:
    """Bounds the smallest epsilon that `profile` guarantees at `delta`.

    Raises:
      ValueError: If `delta` is not in (0, 1).
    """
    return profile.epsilon(check_delta(delta))


def wanted_width(tolerance: float, epsilon: float) -> float:
    """Returns the width at which a bound near `epsilon` is sharp enough.

    >>> wanted_width(1e-3, 5.0), wanted_width(1e-3, 0.01)
    (0.001, 1e-05)
    """
    return tolerance * min(1.0, max(epsilon, _SMALLEST_EPSILON))


def format_delta(delta: float) -> str:
    """Formats the delta of a guarantee to three digits, rounded up: no stronger than certified.

    >>> format_delta(1 / 37_000_000), format_delta(1e-5)
    ('2.71e-08', '1e-05')
    """
    nearest = f"{delta:.3g}"
    if float(nearest) >= delta:
        return nearest
    return f"{float(_round_outward(delta, '.3g', up=True)):.3g}"


def check_delta(delta: float) -> float:
    """Returns `delta` if it is in (0, 1), else raises a ValueError."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if delta < _SMALLEST_DELTA:
        raise ValueError(f"delta must be at least {_SMALLEST_DELTA:g}, got {delta}")
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """Returns `epsilon` if it is >= 0 and finite, else raises a ValueError."""
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be >= 0 and finite, got {epsilon}")
    return float(epsilon)


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises a ValueError unless `noise_multiplier` is positive and finite."""
    if not 0.0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be > 0 and finite for a guarantee, got {noise_multiplier}"
        )
    if noise_multiplier < _SMALLEST_NOISE:
        raise ValueError(
            f"noise_multiplier must be at least {_SMALLEST_NOISE:g}, got {noise_multiplier}"
        )


def check_count(name: str, value: int) -> None:
    """Raises a ValueError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value}")


def check_probability(name: str, value: float) -> None:
    """Raises a ValueError unless `value` is in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


def epsilon_from_delta(
    delta_upper: Callable[[float], float],
    delta_lower: Callable[[float], float],
    delta: float,
    *,
    resolution: float = 1e-12,
) -> Bound:
    """Bounds the smallest epsilon >= 0 with delta(epsilon) <= `delta`, by bisection.

    The true curve falls and lies in [`delta_lower`, `delta_upper`]. The upper end returned is a
    point where `delta_upper` was seen <= `delta`, the lower end 0 or one where `delta_lower` was
    seen > `delta`: either proves its side, whatever the shape of the two functions.

    Args:
      delta_upper: Upper bound on the curve, as a function of epsilon.
      delta_lower: Lower bound on it.
      delta: The probability that is asked for, in (0, 1).
      resolution: Width at which the bisection stops, as `wanted_width` has it.
    """
    _, upper = _bracket(lambda e: delta_upper(e) <= delta, resolution)
    lower, _ = _bracket(lambda e: delta_lower(e) <= delta, resolution)
    return Bound(lower, upper)


def _bracket(met: Callable[[float], bool], resolution: float) -> tuple[float, float]:
    """Returns (a point where `met` was false, or 0; a point where it was true, or infinity)."""
    if met(0.0):
        return 0.0, 0.0
    low, high = 0.0, 1.0
    while not met(high):
        low, high = high, 2.0 * high
        if high > 1e12:
            return low, math.inf
    while high - low > max(wanted_width(resolution, high), 1e-14 * high):
        if high <= _SMALLEST_EPSILON:
            break
        middle = 0.5 * (low + high)
        if met(middle):
            high = middle
        else:
            low = middle
    return low, high


def calibrate(
    privacy: Callable[[float], PrivacyProfile],
    *,
    epsilon: float,
    delta: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier whose upper bound meets (`epsilon`, `delta`).

    More noise is a post-processing of less, so that the true epsilon falls in the noise
    multiplier: bisection on its logarithm, sped up by secants, finds the edge, by coarse grids
    until these cannot tell the side. The noise multiplier that is returned was itself seen to
    meet the guarantee: `privacy(result).epsilon(delta).upper <= epsilon`.

    Args:
      privacy: Maps a noise multiplier > 0 to the profile of the mechanism that uses it.
      epsilon: The epsilon that may be spent, > 0.
      delta: The delta that may be spent, in (0, 1).
      relative_tolerance: How much above the smallest noise multiplier whose upper bound meets the
        guarantee the result may be. That bound is within EPSILON_TOLERANCE of the truth.

    Raises:
      ValueError: If the arguments are out of range, or no noise multiplier up to 1e9 suffices.
    """
    check_delta(delta)
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")

    def excess(log_sigma: float, tolerance: float = EPSILON_TOLERANCE) -> float:
        """log(upper / epsilon) at this noise: <= 0 only where the guarantee is met."""
        upper = privacy(math.exp(log_sigma)).epsilon(delta, tolerance).upper
        return math.log(max(upper, 1e-9 * epsilon) / epsilon) if upper < math.inf else math.inf

    coarse = functools.partial(excess, tolerance=_COARSE * max(1.0, epsilon))
    high = 0.0
    high_excess = coarse(high)
    low, low_excess = high, high_excess
    while high_excess > 0.0:
        if high >= _LARGEST_LOG_NOISE:
            raise ValueError(
                f"no noise multiplier up to {math.exp(_LARGEST_LOG_NOISE):.0e} gives epsilon <= "
                f"{epsilon} at delta = {delta}: "
                "ask for a larger epsilon or delta, or a larger maximum batch size"
            )
        low, low_excess = high, high_excess
        # At large noise epsilon falls as the noise grows, about in proportion.
        stride = high_excess if high_excess < math.inf else 0.0
        high = min(high + max(math.log(2.0), stride), _LARGEST_LOG_NOISE)
        high_excess = coarse(high)
    while low_excess <= 0.0:
        high, high_excess = low, low_excess
        low -= math.log(2.0)
        if low < math.log(1e-3):
            return math.exp(high)
        low_excess = coarse(low)

    bracket = _Bracket(low, low_excess, high, high_excess)
    while bracket.width > 2.0 * _COARSE:
        guess = bracket.guess(_COARSE)
        bracket.narrow(guess, coarse(guess))
    return math.exp(_edge(excess, bracket.guess(0.0), bracket.slope, relative_tolerance))


@dataclass
class _Bracket:
    """Where a function is positive, and above it where it is not: bisection, sped up by secants."""

    low: float
    low_value: float
    high: float
    high_value: float
    halved: bool = True

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def slope(self) -> float:
        """The secant's, or -1 where an end has none."""
        slope = (self.high_value - self.low_value) / self.width
        return slope if math.isfinite(slope) else -1.0

    def guess(self, margin: float) -> float:
        """Returns where the root may be, at least `margin` within the bracket."""
        middle = 0.5 * (self.low + self.high)
        if not self.halved or self.low_value == math.inf:
            return middle
        root = self.low - self.low_value / self.slope
        # Step past the root, so that the next bracket has both ends near it.
        root += math.copysign(margin, middle - root)
        return min(max(root, self.low + margin), self.high - margin)

    def narrow(self, at: float, value: float) -> None:
        before = self.width
        if value <= 0.0:
            self.high, self.high_value = at, value
        else:
            self.low, self.low_value = at, value
        self.halved = self.width <= 0.5 * before


def _edge(excess: Callable[[float], float], guess: float, slope: float, width: float) -> float:
    """Returns a point with excess <= 0, about at most `width` above one with excess > 0.

    The function falls, up to errors that may be larger than `width` allows for.

    Args:
      excess: The function.
      guess: A point near its root.
      slope: About its slope there.
      width: How near the two points must be.
    """
    fails, meets, stride = -math.inf, math.inf, 0.3 * width
    at, before = guess, math.inf
    while meets - fails > width:
        value = excess(guess)
        if abs(before) < math.inf and abs(value) < math.inf and abs(guess - at) > 3.0 * width:
            slope = min((value - before) / (guess - at), 0.25 * slope)
        at, before = guess, value
        if value <= 0.0:
            meets = guess
            if value >= 0.7 * width * slope:
                break
        else:
            fails = guess
        root = guess - (value / slope if value < math.inf else 0.0)
        if meets == math.inf:
            guess = max(root + stride, fails + stride)
        elif fails == -math.inf:
            guess = min(root + stride, meets - stride)
        elif fails + stride < root + stride < meets - stride:
            guess = root + stride
        else:
            guess = 0.5 * (fails + meets)
        stride *= 1.3
    return meets


def _meets(profile: PrivacyProfile, epsilon: float, delta: float) -> bool:
    """Whether the upper bound meets the guarantee; by a coarse grid where that tells."""
    bound = profile.epsilon(delta, _COARSE * max(1.0, epsilon))
    if bound.lower <= epsilon < bound.upper:
        bound = profile.epsilon(delta)
    return bound.upper <= epsilon


def largest_count(
    privacy: Callable[[int], PrivacyProfile],
    *,
    epsilon: float,
    delta: float,
    limit: int = 1_000_000,
) -> int:
    """Returns the largest n in [1, `limit`] for which `privacy(n)` meets (`epsilon`, `delta`).

    For quantities in which the price rises: the number of epochs or of steps (more releases can
    be post-processed into fewer, for every sampler). The search doubles, then bisects, and the
    n that is returned was itself seen to meet the guarantee. If the price were not monotone, the
    result would still be sufficient, but perhaps not the largest.

    Returns 0 where not even n = 1 suffices.
    """
    check_delta(delta)
    check_epsilon(epsilon)
    check_count("limit", limit)

    def met(count: int) -> bool:
        return _meets(privacy(count), epsilon, delta)

    if not met(1):
        return 0
    low, high = 1, 2
    while high <= limit and met(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if met(middle):
            low = middle
        else:
            high = middle
    return low


def smallest_count(
    privacy: Callable[[int], PrivacyProfile],
    *,
    epsilon: float,
    delta: float,
    limit: int = 1_000_000,
) -> int:
    """Returns the smallest n in [1, `limit`] for which `privacy(n)` meets (`epsilon`, `delta`).

    For quantities in which the price falls: the number of balls-and-bins' bins an epoch, so that
    the largest batch size is n / result. (A mean of T + 1 copies is the conditional mean, given
    all of them, of the mean of T of them that are drawn at random: a contraction of it.) The n
    that is returned was itself seen to meet the guarantee.

    Raises:
      ValueError: If not even `limit` suffices.
    """
    check_delta(delta)
    check_epsilon(epsilon)
    check_count("limit", limit)

    def met(count: int) -> bool:
        return _meets(privacy(count), epsilon, delta)

    high = 1
    while not met(high):
        if high == limit:
            raise ValueError(f"no count up to {limit} gives epsilon <= {epsilon} at delta {delta}")
        high = min(2 * high, limit)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if met(middle):
            high = middle
        else:
            low = middle
    return high
