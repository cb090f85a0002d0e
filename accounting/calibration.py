"""Calibration to a target: the noise multiplier, the most releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy

from accounting.attack import attack_advantage
from accounting.checks import check_count, check_delta, check_epsilon, check_guarantee_delta
from accounting.profile import EPSILON_TOLERANCE, Bound, PrivacyProfile, UpperEnd
from accounting.profiles.truncation import TruncatedProfile

_COARSE = 0.02
"""Relative width, in noise, at which `calibrate` begins to look closely; of an epsilon that is far
from its target."""

_ROUGH = 0.05
"""Relative width of an epsilon, or an advantage, before that: its middle is nearer to the truth."""

_LARGEST_LOG_NOISE = math.log(1e9)
"""Largest logarithm of a noise multiplier that `calibrate` tries."""


def calibrate(
    privacy: Callable[[float], PrivacyProfile],
    *,
    epsilon: float,
    delta: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier whose upper bound meets (`epsilon`, `delta`).

    More noise is a post-processing of less, so that the true epsilon falls in the noise multiplier.
    The result was itself seen to meet the guarantee: `privacy(result).epsilon(delta).upper <=
    epsilon`.

    Args:
      privacy: Maps a noise multiplier > 0 to the profile of the mechanism that uses it.
      epsilon: The epsilon that may be spent, > 0.
      delta: The delta that may be spent, in (0, 0.1).
      relative_tolerance: How much above the smallest noise multiplier whose upper bound meets the
        guarantee the result may be. That bound is within EPSILON_TOLERANCE of the truth.

    Raises:
      TypeError: If `privacy` is no function, such as a sampler or a profile.
      ValueError: If the arguments are out of range, or no noise multiplier up to 1e9 suffices.
    """
    if not callable(privacy):
        kind = type(privacy).__name__
        raise TypeError(f"calibrate takes a function such as sampler.privacy, got a {kind}")
    check_guarantee_delta(delta)
    return least_noise(privacy, epsilon, delta, relative_tolerance)


def least_noise(
    privacy: Callable[[float], PrivacyProfile],
    epsilon: float,
    delta: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the same for any point of the profile's curve, `delta` in (0, 1): no guarantee."""
    check_delta(delta)
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")

    def excess(log_sigma: float, coarse: bool) -> float:
        """log(upper / epsilon) at this noise: <= 0 only where the guarantee is met, or roughly."""
        tolerance = _ROUGH * max(1.0, epsilon) if coarse else EPSILON_TOLERANCE
        profile = _from_above(privacy(math.exp(log_sigma)), delta if coarse else 0.0)
        bound = profile.epsilon(delta, tolerance)
        found = _middle(bound) if coarse else bound.upper
        return math.log(max(found, 1e-9 * epsilon) / epsilon) if found < math.inf else math.inf

    goal = f"epsilon <= {epsilon} at delta = {delta}: ask for a larger epsilon or delta"
    return _smallest_noise(excess, relative_tolerance, goal)


def calibrate_advantage(
    privacy: Callable[[float], PrivacyProfile],
    *,
    advantage: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier at which no membership attack has a larger advantage.

    That is the total variation distance delta(0), see `accounting.attack`. The result was itself
    seen to suffice: `attack_advantage(privacy(result)).upper <= advantage`.

    >>> from accounting import GaussianProfile
    >>> round(calibrate_advantage(GaussianProfile, advantage=0.1), 2)
    3.98

    Args:
      privacy: Maps a noise multiplier > 0 to the profile of the mechanism that uses it.
      advantage: The largest advantage, in (0, 1); the accuracy is then at most (1 + advantage)/2.
      relative_tolerance: How much above the smallest noise multiplier whose upper bound meets the
        target the result may be. That bound is within 0.1 % of the truth where it is tight.

    Raises:
      ValueError: If `advantage` is out of range, or no noise multiplier up to 1e9 suffices.
    """
    if not 0.0 < advantage < 1.0:
        raise ValueError(f"advantage must be in (0, 1), got {advantage}")
    target = float(scipy.special.erfinv(advantage))

    def excess(log_sigma: float, coarse: bool) -> float:
        """log(mu / its target) at this noise; <= 0 only where the upper bound is at most that."""
        profile = _from_above(privacy(math.exp(log_sigma)), advantage if coarse else 0.0)
        upper = _middle(profile.delta(0.0, _ROUGH)) if coarse else attack_advantage(profile).upper
        mu = float(scipy.special.erfinv(upper))
        value = math.log(max(mu, 1e-9 * target) / target) if mu < math.inf else math.inf
        # No rounding of the inverse may tell the side.
        return min(value, 0.0) if upper <= advantage else max(value, 5e-324)

    goal = f"an attack advantage <= {advantage}: ask for a larger one"
    return _smallest_noise(excess, relative_tolerance, goal)


def _from_above(profile: PrivacyProfile, delta: float = 0.0) -> PrivacyProfile:
    """Returns a cheaper profile of the same upper end, or roughly the same at `delta`.

    What a lower end of its own costs is saved; for a rough answer, batches that are hardly ever
    cut are not cut.
    """
    if isinstance(profile, UpperEnd):
        return profile.profile
    if isinstance(profile, TruncatedProfile) and math.exp(profile.log_spent) <= _COARSE * delta:
        return profile.profile
    return profile


def _middle(bound: Bound) -> float:
    """Returns about where the truth is: the middle, or the upper end where that is all there is."""
    return 0.5 * (bound.lower + bound.upper) if 2.0 * bound.lower > bound.upper else bound.upper


def _smallest_noise(excess: Callable[[float, bool], float], width: float, goal: str) -> float:
    """Returns the smallest noise multiplier of excess <= 0, to `width` of it.

    Bisection on its logarithm, sped up by secants, by coarse answers until these cannot tell the
    side.

    Args:
      excess: (logarithm of a noise multiplier, whether a coarse answer will do) -> a number that
        falls in the noise, about as its logarithm, and is <= 0 where the target is met: a coarse
        one roughly, others only there.
      width: How much too large the result may be, relative to itself.
      goal: The target in words, and what to ask for if no noise meets it.
    """

    def coarse(log_sigma: float) -> float:
        return excess(log_sigma, True)

    high = 0.0
    high_excess = coarse(high)
    low, low_excess = high, high_excess
    while high_excess > 0.0:
        if high >= _LARGEST_LOG_NOISE:
            raise ValueError(
                f"no noise multiplier up to {math.exp(_LARGEST_LOG_NOISE):.0e} gives {goal}, or a "
                "larger maximum batch size"
            )
        low, low_excess = high, high_excess
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
    start, slope = bracket.guess(0.0), bracket.slope
    ends = bracket.low, bracket.high
    return math.exp(_edge(lambda at: excess(at, False), start, slope, width, ends))


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


def _edge(
    excess: Callable[[float], float],
    guess: float,
    slope: float,
    width: float,
    ends: tuple[float, float],
) -> float:
    """Returns a point with excess <= 0, about at most `width` above one with excess > 0.

    The function falls, up to errors that may be larger than `width` allows for. `slope` is about
    its slope at its root, near `guess` and probably between `ends`; it may also fall from infinity
    at once.
    """
    low, high = ends
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
        if meets == math.inf and value == math.inf and fails + width < high:
            guess = max(fails + stride, 0.5 * (fails + high))
        elif meets == math.inf:
            guess = max(root + stride, fails + stride)
        elif fails == -math.inf:
            guess = min(root + stride, meets - stride)
            guess = max(guess, low) if low + width < meets else guess
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
    """Returns the largest n in [1, `limit`] at which `privacy(n)` meets the guarantee, or 0.

    For quantities in which the privacy cost rises: the number of epochs or of steps (more releases
    can be post-processed into fewer, for every sampler). The n that is returned was itself seen to
    meet the guarantee; were the cost not monotone, it would still suffice.
    """
    check_guarantee_delta(delta)
    check_epsilon(epsilon)
    check_count("limit", limit)

    low, high = 0, 1
    while high <= limit and _meets(privacy(high), epsilon, delta):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _meets(privacy(middle), epsilon, delta) else (low, middle)
    return low
