"""Calibration to a target: the noise multiplier, the most releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy

from accounting.checks import check_count, check_delta, check_epsilon, check_guarantee_delta
from accounting.profile import Bound, PrivacyProfile, Question, UpperEnd
from accounting.profiles.truncation import TruncatedProfile

_COARSE = 0.02
"""Relative width, in noise, at which proved bounds take over; of an epsilon far from its target."""
_ROUGH = 0.05
"""Relative width of rough answers, of an epsilon or an advantage."""
_SMALLEST_NOISE = 1e-3
"""Noise multiplier that is returned if less noise would do."""
_LARGEST_LOG_NOISE = math.log(1e9)
"""Largest logarithm of a noise multiplier that is tried."""


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
        guarantee the result may be. That bound is within 1e-3 (below 1, of epsilon) of the truth.

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
    rough = Question("epsilon", delta, _ROUGH * max(1.0, epsilon))

    def excess(found: float) -> float:
        return math.log(max(found, 1e-9 * epsilon) / epsilon) if found < math.inf else math.inf

    return _smallest_noise(
        lambda sigma: excess(_middle(rough.of(_simplified(privacy(sigma), delta)))),
        lambda sigma: excess(Question("epsilon", delta, upper_only=True).of(privacy(sigma)).upper),
        lambda sigma: excess(privacy(sigma).epsilon(delta).upper),
        relative_tolerance,
        f"epsilon <= {epsilon} at delta = {delta}: ask for a larger epsilon or delta",
    )


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

    def excess(found: float) -> float:
        mu = float(scipy.special.erfinv(found))
        value = math.log(max(mu, 1e-9 * target) / target) if mu < math.inf else math.inf
        # No rounding of the inverse may tell the side.
        return min(value, 0.0) if found <= advantage else max(value, 5e-324)

    rough = Question("delta", 0.0, _ROUGH)
    return _smallest_noise(
        lambda sigma: excess(_middle(rough.of(_simplified(privacy(sigma), advantage)))),
        lambda sigma: excess(Question("delta", 0.0, upper_only=True).of(privacy(sigma)).upper),
        lambda sigma: excess(privacy(sigma).delta(0.0).upper),
        relative_tolerance,
        f"an attack advantage <= {advantage}: ask for a larger one",
    )


def _simplified(profile: PrivacyProfile, delta: float) -> PrivacyProfile:
    """Returns about the same upper end for less: no lower end, and hardly any cut batch counts."""
    if isinstance(profile, UpperEnd):
        return profile.profile
    if isinstance(profile, TruncatedProfile) and math.exp(profile.log_spent) <= _COARSE * delta:
        return profile.profile
    return profile


def _middle(bound: Bound) -> float:
    """Returns a rough estimate: the middle, or the upper end of an interval that says little."""
    return 0.5 * (bound.lower + bound.upper) if 2.0 * bound.lower > bound.upper else bound.upper


def _smallest_noise(
    rough: Callable[[float], float],
    upper: Callable[[float], float],
    seen: Callable[[float], float],
    width: float,
    goal: str,
) -> float:
    """Returns a noise multiplier that is proved to meet a target, hardly above the smallest one.

    Args:
      rough: Maps a noise multiplier to a number that falls in it, about as its logarithm; a rough
        one, <= 0 where the target is met.
      upper: The same, by an upper end that was asked for alone: a proof where it is <= 0.
      seen: The same, as the caller will see it.
      width: Excess of the result, relative to the smallest noise multiplier.
      goal: The target in words, and a larger one to ask for.
    """
    bracket = _rough_bracket(lambda x: rough(math.exp(x)), goal)
    if bracket is None:
        return _SMALLEST_NOISE
    while bracket.width > 2.0 * _COARSE:
        guess = bracket.guess(_COARSE)
        bracket.narrow(guess, rough(math.exp(guess)))
    edge = _proved_edge(lambda x: upper(math.exp(x)), bracket, width)
    if (value := seen(math.exp(edge))) > 0.0:  # on other grids
        bracket = _Bracket(edge, value, max(bracket.high, edge + _COARSE), bracket.high_value)
        edge = _proved_edge(lambda x: seen(math.exp(x)), bracket, width)
    return math.exp(edge)


def _rough_bracket(excess: Callable[[float], float], goal: str) -> _Bracket | None:
    """Returns logarithms of noise on both sides of a target; None if hardly any noise meets it."""
    high, low = 0.0, 0.0
    high_value = low_value = excess(0.0)
    while high_value > 0.0:
        if high >= _LARGEST_LOG_NOISE:
            raise ValueError(
                f"no noise multiplier up to {math.exp(_LARGEST_LOG_NOISE):.0e} gives {goal}, or a "
                "larger maximum batch size"
            )
        low, low_value = high, high_value
        stride = high_value if high_value < math.inf else 0.0
        high = min(high + max(math.log(2.0), stride), _LARGEST_LOG_NOISE)
        high_value = excess(high)
    while low_value <= 0.0:
        high, high_value = low, low_value
        low -= math.log(2.0)
        if low < math.log(_SMALLEST_NOISE):
            return None
        low_value = excess(low)
    return _Bracket(low, low_value, high, high_value)


@dataclass
class _Bracket:
    """Two points on both sides of the root of a falling function, for bisection and secants."""

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


def _proved_edge(excess: Callable[[float], float], rough: _Bracket, width: float) -> float:
    """Returns a point with excess <= 0, about at most `width` above one with excess > 0.

    By Newton's steps, each aimed a little beyond the root, within the points that are known.

    Args:
      excess: Function that falls, up to errors that `width` may not allow for, or from infinity.
      rough: Points that are probably on both sides of its root.
      width: Distance at which the search ends.
    """
    guess, slope = rough.guess(0.0), rough.slope
    fails, meets, stride = -math.inf, math.inf, 0.3 * width
    last, last_value = guess, math.inf
    while meets - fails > width:
        value = excess(guess)
        both = value < math.inf and last_value < math.inf
        if both and abs(guess - last) > 3.0 * width:
            slope = min((value - last_value) / (guess - last), 0.25 * slope)
        last, last_value = guess, value
        if value <= 0.0:
            meets = guess
            if value >= 0.7 * width * slope:
                break
        else:
            fails = guess
        lowest = fails + stride
        if fails == -math.inf and rough.low + width < meets:
            lowest = rough.low
        target = guess + stride - (value / slope if value < math.inf else 0.0)
        if value == math.inf and meets == math.inf:
            target = 0.5 * (fails + rough.high)
        guess = min(max(target, lowest), meets - stride)
        if not fails < guess or (value == math.inf and meets < math.inf):
            guess = 0.5 * (fails + meets)
        stride *= 1.3
    return meets


def _meets(profile: PrivacyProfile, epsilon: float, delta: float) -> bool:
    """Returns whether the upper bound meets the guarantee, by a coarse grid if that suffices."""
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
