"""Balls-and-bins: each epoch every example falls into one of T batches, independently, by lot."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from accounting.composition import compose_both
from accounting.gaussian import GaussianProfile
from accounting.likelihood_ratio import LikelihoodRatio, Side
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    PrivacyProfile,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
    wanted_width,
)

_COARSEST = 0.2
_FINEST = 1e-3
_MANY_EPOCHS = 8
_SMALLEST_DELTA = 1e-40
_SMALLEST_SIGMA = 0.05  # below it likelihood ratios leave the range of doubles


@dataclass(frozen=True)
class BallsAndBinsProfile:
    r"""The certified profile of balls-and-bins sampling, from below and above.

    One epoch of T = `bins` batches at s = `noise_multiplier` is dominated, tightly, by

    .. math:: P = \frac{1}{T} \sum_t N(e_t, s^2 I), \qquad Q = N(0, s^2 I)

    with e_t the t-th unit vector of R^T, under zeroing-out adjacency. Its likelihood ratio is the
    average over T of independent log-normals, and E = `epochs` epochs with bins redrawn are the
    product of E of them. Both are evaluated in the algebra of `likelihood_ratio`, which refines
    its grid until the two ends agree.

    `assignment` says what happens between epochs; the two have very different prices:

    - 'redrawn': every epoch draws new bins; the epochs compose.
    - 'fixed': one assignment is kept; the E releases of a bin have a sufficient statistic, their
      sum, so that it is one epoch at s / sqrt(E).

    >>> f"{BallsAndBinsProfile(1.0, bins=565).epsilon(2.7e-8):.2f}"
    '[0.40, 0.41]'

    Source: Chua et al., "Balls-and-Bins Sampling for DP-SGD", AISTATS 2025 (arXiv 2412.16802),
    Theorem 3.1 (the pair), Proposition 3.3 (never above the deterministic order's profile).

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite, `bins` or `epochs` is not an
        integer >= 1, or `assignment` is neither 'redrawn' nor 'fixed'.
    """

    noise_multiplier: float
    bins: int
    epochs: int = 1
    assignment: Literal["redrawn", "fixed"] = "redrawn"

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("bins", self.bins)
        check_count("epochs", self.epochs)
        if self.assignment not in ("redrawn", "fixed"):
            raise ValueError(f"assignment must be 'redrawn' or 'fixed', got {self.assignment!r}")

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0, as sharply as 1e-3 in epsilon allows."""
        check_epsilon(epsilon)
        exact = self._gaussian()
        if exact is not None:
            return exact.delta(epsilon)
        sigma, epochs = self._one_epoch()
        lower, upper = 0.0, _deterministic(sigma, epochs).delta(epsilon).upper
        if sigma < _SMALLEST_SIGMA:
            return Bound(lower, upper, note=_TOO_LITTLE_NOISE)
        resolution = _COARSEST
        while resolution >= _FINEST:
            curves = _curves(sigma, self.bins, epochs, resolution, epsilon=epsilon)
            lower = max(lower, *(low(epsilon) for low, _ in curves))
            upper = min(upper, max(high(epsilon) for _, high in curves))
            # A step of the tolerance in epsilon changes delta by this much.
            moved = max(high(epsilon + EPSILON_TOLERANCE) for _, high in curves)
            if moved <= lower or upper - lower <= 1e-3 * lower:
                return Bound(min(lower, upper), upper)
            if upper <= _SMALLEST_DELTA:
                return Bound(min(lower, upper), upper, note=_TOO_SMALL)
            resolution /= 2.0
        return Bound(min(lower, upper), upper, note="the finest grid was reached")

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`, to within `tolerance`."""
        check_delta(delta)
        exact = self._gaussian()
        if exact is not None:
            return exact.epsilon(delta)
        sigma, epochs = self._one_epoch()
        lower, upper = 0.0, _deterministic(sigma, epochs).epsilon(delta).upper
        if sigma < _SMALLEST_SIGMA:
            return Bound(lower, upper, note=_TOO_LITTLE_NOISE)
        if delta < _SMALLEST_DELTA:
            return Bound(lower, upper, note=_TOO_SMALL)
        resolution = _COARSEST
        while True:
            found = [
                epsilon_from_delta(high, low, delta, resolution=1e-3 * tolerance)
                for low, high in _curves(sigma, self.bins, epochs, resolution, delta=delta)
            ]
            gap = max(b.upper for b in found) - max(b.lower for b in found)
            upper = min(upper, max(b.upper for b in found))
            lower = min(upper, max(lower, *(b.lower for b in found)))
            wanted = wanted_width(tolerance, upper)
            if upper - lower <= wanted:
                return Bound(lower, upper)
            if resolution <= _FINEST:
                return Bound(lower, upper, note="the finest grid was reached")
            # The gap is of second order in the step.
            shrink = math.sqrt(0.7 * wanted / gap)
            resolution = max(_FINEST, resolution * min(0.7, max(0.15, shrink)))

    def _gaussian(self) -> PrivacyProfile | None:
        """The closed form, where the profile has one."""
        if self.bins > 1:
            return None
        return GaussianProfile(self.noise_multiplier / math.sqrt(self.epochs))

    def _one_epoch(self) -> tuple[float, int]:
        """The noise multiplier and number of epochs of the equivalent redrawn assignment."""
        if self.assignment == "fixed":
            return self.noise_multiplier / math.sqrt(self.epochs), 1
        return self.noise_multiplier, self.epochs


_TOO_SMALL = "delta is under the mass at which tails are cut"
_TOO_LITTLE_NOISE = "so little noise that only the deterministic order's bound is computed"


def _deterministic(sigma: float, epochs: int) -> GaussianProfile:
    return GaussianProfile(sigma / math.sqrt(epochs))


@lru_cache(maxsize=64)
def _epoch(sigma: float, bins: int, resolution: float) -> tuple[LikelihoodRatio, LikelihoodRatio]:
    """Returns the lower and the upper likelihood ratio of one epoch at one `resolution`."""
    steps = _steps(sigma, bins, resolution)

    def one(side: Side) -> LikelihoodRatio:
        return LikelihoodRatio.gaussian(sigma, steps[0], side).average(bins, steps)

    return one("lower"), one("upper")


@lru_cache(maxsize=64)
def _ratios(
    sigma: float, bins: int, epochs: int, resolution: float
) -> tuple[LikelihoodRatio, LikelihoodRatio]:
    """Returns the lower and the upper likelihood ratio of all epochs at one `resolution`."""
    low, high = _epoch(sigma, bins, resolution)
    return low.power(epochs), high.power(epochs)


def _curves(
    sigma: float,
    bins: int,
    epochs: int,
    resolution: float,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
) -> list[tuple[Callable[[float], float], Callable[[float], float]]]:
    """Returns pairs of lower and upper bounds on delta(epsilon): the profile is the pairs' maximum.

    Many epochs are composed by tilted FFT where its error is negligible at the `delta` or
    `epsilon` that is asked about. Direct convolutions keep relative accuracy at any delta, but
    take far longer for large grids.
    """
    if epochs >= _MANY_EPOCHS:
        with contextlib.suppress(MemoryError):
            low, high = (
                compose_both(side, epochs, delta=delta, epsilon=epsilon)
                for side in _epoch(sigma, bins, resolution)
            )
            if delta is not None:
                at = max(
                    epsilon_from_delta(part.delta, part.delta, delta, resolution=1e-3).lower
                    for part in high
                )
            else:
                at = epsilon or 0.0
            error = max(part.floor(at) for part in (*low, *high))
            if error <= 1e-3 * max(part.delta(at) for part in low):
                return [(low[0].delta, high[0].delta), (low[1].delta, high[1].delta)]
    below, above = _ratios(sigma, bins, epochs, resolution)
    return [(below.delta, above.delta)]


def _steps(sigma: float, bins: int, resolution: float) -> tuple[float, ...]:
    """Returns the grid step after each doubling, in proportion to the sum's relative deviation.

    The mean of n copies has relative variance (e^{1/s^2} - 1)/n; a split on a step h adds at most
    h^2/4, divided by what later averaging divides it by. Steps in proportion to the deviation keep
    both in proportion, at a constant number of atoms. Where the deviation is above 1/4, single
    summands matter, and nothing is averaged away: there the step stays at `resolution`.
    """
    variance = math.expm1(min(1.0 / sigma**2, 700.0))
    step = resolution * min(1.0, 4.0 * math.sqrt(variance))
    steps = []
    for level in range(bins.bit_length()):
        wanted = resolution * min(1.0, 4.0 * math.sqrt(variance / 2.0**level))
        while step > 1.5 * wanted:
            step /= 2.0
        steps.append(step)
    return tuple(steps)
