"""Calibration to a target: the noise multiplier, the most releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy

from accounting.checks import check_count, check_delta, check_epsilon, check_guarantee_delta
from accounting.profile import Bound, PrivacyProfile, Question, UpperEnd
from accounting.profiles.truncated import TruncatedProfile
from accounting.roots import log_excess, point_near_root

_COARSE = 0.02
"""Relative width of an epsilon far from its target, and of a delta spent by cuts."""
_NEAR = 0.05
"""Distance in log noise within which a point is near the smallest noise."""
_ROUGH, _CLOSE = 0.15, 0.005
"""Relative widths of the intervals of `_Target.rough` and `_Target.close`."""
_SMALLEST_LOG_NOISE = math.log(1e-3)
"""Approximate log of the smallest noise multiplier that is returned."""
_SLOPE = -2.0
"""About the slope of an answer's logarithm in the noise's, to begin with."""
_LARGEST_LOG_NOISE = math.log(1e9)
"""Largest logarithm of a noise multiplier that is tried."""


def calibrate(
    privacy: Callable[[float], PrivacyProfile],
    *,
    epsilon: float,
    delta: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier that meets (`epsilon`, `delta`).

    It is the smallest whose certified upper bound does, up to `relative_tolerance`.

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
    """Returns the smallest noise multiplier for any `delta` in (0, 1).

    Like `calibrate`, for a point of the profile's curve that need be no guarantee.
    """
    check_delta(delta)
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")
    goal = f"epsilon <= {epsilon} at delta = {delta}: ask for a larger epsilon or delta"
    target = _Target(privacy, Question("epsilon", delta), epsilon)
    return _smallest_noise(target, relative_tolerance, goal)


def calibrate_advantage(
    privacy: Callable[[float], PrivacyProfile],
    *,
    advantage: float,
    relative_tolerance: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier that bounds attackers' advantage.

    The largest advantage of a membership attack is delta(0), see `accounting.attack`. The result
    was itself seen to suffice: `attack_advantage(privacy(result)).upper <= advantage`.

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
    goal = f"an attack advantage <= {advantage}: ask for a larger one"
    target = _Target(privacy, Question("delta", 0.0), advantage, scipy.special.erfinv)
    return _smallest_noise(target, relative_tolerance, goal)


def _simplified(profile: PrivacyProfile, delta: float) -> PrivacyProfile:
    """Returns a cheaper profile: upper end only, without truncation if it costs little."""
    if isinstance(profile, UpperEnd):
        return profile.profile
    if isinstance(profile, TruncatedProfile) and math.exp(profile.log_spent) <= _COARSE * delta:
        return profile.profile
    return profile


def _estimate(bound: Bound) -> float:
    """Returns an estimate of the value, or the upper end of a wide interval.

    On grids the excess of an upper end is about twice the lower end's.
    """
    if 2.0 * bound.lower > bound.upper:
        return (2.0 * bound.lower + bound.upper) / 3.0
    return bound.upper


@dataclass(frozen=True)
class _Target:
    """Target of a calibration, and how far the answer of a noise multiplier exceeds it.

    Attributes:
      privacy: Maps a noise multiplier to a profile.
      question: Question whose answer is to be at most the target.
      answer: Largest answer that meets the goal.
      scale: Function of an answer that is about proportional to a power of the noise.
    """

    privacy: Callable[[float], PrivacyProfile]
    question: Question
    answer: float
    scale: Callable[[float], float] = float

    def excess(self, reached: float) -> float:
        """Returns the excess of an answer's logarithm, <= 0 where it meets the target."""
        value = log_excess(float(self.scale(reached)), float(self.scale(self.answer)))
        # Rounding of the scale must not decide the sign.
        return min(value, 0.0) if reached <= self.answer else max(value, 5e-324)

    def rough(self, log_noise: float) -> float:
        """Returns an estimate of the excess, without truncation if it costs little."""
        delta = self.question.at if self.question.wanted == "epsilon" else self.answer
        profile = _simplified(self.privacy(math.exp(log_noise)), delta)
        return self.excess(_estimate(self._loosely(_ROUGH).ask(profile)))

    def close(self, log_noise: float) -> float:
        """Returns a closer estimate of the excess."""
        return self.excess(_estimate(self._loosely(_CLOSE).ask(self.privacy(math.exp(log_noise)))))

    def upper(self, log_noise: float) -> float:
        """Returns the excess of the upper end, computed without the lower one."""
        alone = self.question._replace(upper_only=True)
        return self.excess(alone.ask(self.privacy(math.exp(log_noise))).upper)

    def exact(self, log_noise: float) -> float:
        """Returns the excess of the upper end that the profile prints."""
        return self.excess(self.question.ask(self.privacy(math.exp(log_noise))).upper)

    def _loosely(self, width: float) -> Question:
        return self.question._replace(tolerance=width * max(1.0, self.answer))


def _smallest_noise(target: _Target, width: float, goal: str) -> float:
    """Returns a noise multiplier that provably meets a target and is nearly the smallest.

    Args:
      target: Target of the search.
      width: Excess of the result, relative to the smallest noise multiplier.
      goal: The target in words, and a larger one to ask for.
    """
    values: dict[float, float] = {}

    def rough(log_noise: float) -> float:
        return values.setdefault(log_noise, target.rough(log_noise))

    low, high = point_near_root(
        rough, 0.0, lambda x: _NEAR,
        low=_SMALLEST_LOG_NOISE, slope=_SLOPE, either=True, farthest=_LARGEST_LOG_NOISE,
    )  # fmt: skip
    start, slope = _secant(values)
    start = min(max(start, _SMALLEST_LOG_NOISE), _LARGEST_LOG_NOISE)
    floor = start - 2.0 * _NEAR
    if values.get(low) == math.inf:  # no secant meets a cliff
        start, floor = min(high, _LARGEST_LOG_NOISE), low
    else:
        moved = target.close(start) / -slope
        start = min(start + min(max(moved, -_NEAR), _NEAR) + 0.5 * width, _LARGEST_LOG_NOISE)
    log_noise = _least(target.upper, start, floor, slope, width)
    if log_noise < math.inf and not target.exact(log_noise) <= 0.0:  # on other grids
        log_noise = _least(target.exact, log_noise, log_noise - 2.0 * _NEAR, slope, width)
    if log_noise == math.inf:
        raise ValueError(
            f"no noise multiplier up to {math.exp(_LARGEST_LOG_NOISE):.0e} gives {goal}, or a "
            "larger maximum batch size"
        )
    return math.exp(log_noise)


def _least(
    excess: Callable[[float], float], start: float, floor: float, slope: float, width: float
) -> float:
    """Returns the least logarithm of noise with a proved `excess` <= 0, to `width`."""
    high = math.inf
    for lowest in (max(floor, _SMALLEST_LOG_NOISE), _SMALLEST_LOG_NOISE):
        _, high = point_near_root(
            excess, start, lambda x: width,
            low=lowest, slope=slope, near=0.7, farthest=_LARGEST_LOG_NOISE,
        )  # fmt: skip
        if high > lowest + 2.0 * width:
            break
    return high


def _secant(values: dict[float, float]) -> tuple[float, float]:
    """Estimates the root of a falling function, and its slope there, by two points near it."""
    (x, at_x), *farther = sorted(values.items(), key=lambda point: abs(point[1]))
    for y, at_y in farther[:1]:
        slope = (at_y - at_x) / (y - x)
        if -math.inf < slope < 0.0:
            return x - at_x / slope, slope
    return x, _SLOPE


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
    """Returns the largest count that meets the guarantee, or 0.

    For quantities in which the privacy cost rises: the number of epochs or of steps (more releases
    can be post-processed into fewer, for every sampler). The n that is returned was itself seen to
    meet the guarantee; were the cost not monotone, it would still suffice.

    Args:
      privacy: Maps n >= 1, of epochs or steps, to the profile of a mechanism whose cost rises in n.
      epsilon: The epsilon that may be spent, >= 0.
      delta: The delta that may be spent, in (0, 0.1).
      limit: Largest n that is tried.
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
