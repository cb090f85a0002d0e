"""Shuffling: each epoch a uniformly random order, cut into batches; bounds from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.balls_and_bins import BallsAndBinsProfile
from accounting.gaussian import GaussianProfile
from accounting.likelihood_ratio import LikelihoodRatio
from accounting.max_events import log_probability_max_below, max_event_lower_bound
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
)

_SHIFTS = 2.0, 1.0
"""Where the example's coordinate stands under P and under Q."""
_GRID = 4001
_BUCKET_STEP = 0.01
_BUCKET_ERROR = 1e-8


@dataclass(frozen=True)
class ShuffleProfile:
    """The profile of shuffled batches, between the best known lower and upper bounds.

    No tight accounting of shuffling is known. With T = `steps_per_epoch`, s = `noise_multiplier`:

    - upper: a shuffled order is a mixture of deterministic ones, so that the deterministic
      order's profile holds, E = `epochs` epochs being one at s / sqrt(E). It is never Poisson's.
    - lower: concrete neighbouring data sets whose outputs contain the pair
      P = (1/T) sum_t N(2 e_t, s^2 I), Q = (1/T) sum_t N(e_t, s^2 I), tested by max_t x_t; raised
      to balls-and-bins' certified lower bound, as its profile is never above shuffling's.

    `order` says what happens between epochs:

    - 'redrawn' ('dynamic' in the papers): every epoch draws a new order; the epochs compose.
    - 'fixed' ('persistent'): one random order is kept: one epoch at s / sqrt(E).

    Sources: Chua et al., "How Private are DP-SGD Implementations?", ICML 2024 (the pair and its
    events); "Scalable DP-SGD", NeurIPS 2024 (several epochs); "Balls-and-Bins Sampling for
    DP-SGD", AISTATS 2025, Proposition 3.3 (the order of the samplers).

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite, `steps_per_epoch` or `epochs`
        is not an integer >= 1, or `order` is neither 'redrawn' nor 'fixed'.
    """

    noise_multiplier: float
    steps_per_epoch: int
    epochs: int = 1
    order: Literal["redrawn", "fixed"] = "redrawn"

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("steps_per_epoch", self.steps_per_epoch)
        check_count("epochs", self.epochs)
        if self.order not in ("redrawn", "fixed"):
            raise ValueError(f"order must be 'redrawn' or 'fixed', got {self.order!r}")

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        check_epsilon(epsilon)
        upper = self._deterministic().delta(epsilon).upper
        lower = max(self._balls_and_bins().delta(epsilon).lower, self._event_delta(epsilon))
        return Bound(min(lower, upper), upper)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`; the gap is not the grid's."""
        check_delta(delta)
        upper = self._deterministic().epsilon(delta).upper
        lower = self._balls_and_bins().epsilon(delta, tolerance).lower
        lower = max(
            lower,
            epsilon_from_delta(self._event_delta, self._event_delta, delta, resolution=1e-6).lower,
        )
        return Bound(min(lower, upper), upper)

    def _deterministic(self) -> GaussianProfile:
        return GaussianProfile(self.noise_multiplier / math.sqrt(self.epochs))

    def _balls_and_bins(self) -> BallsAndBinsProfile:
        return BallsAndBinsProfile(
            self.noise_multiplier, self.steps_per_epoch, self.epochs, self.order
        )

    def _event_delta(self, epsilon: float) -> float:
        """Lower bound on delta by tests of max_t x_t, or of its values in several epochs."""
        if self.order == "redrawn" and self.epochs > 1:
            return _several_epochs(self.noise_multiplier, self.steps_per_epoch, self.epochs).delta(
                epsilon
            )
        return max_event_lower_bound(
            epsilon,
            noise_multiplier=self.noise_multiplier / math.sqrt(self.epochs),
            bins=self.steps_per_epoch,
            shifts=_SHIFTS,
        )


@lru_cache(maxsize=16)
def _several_epochs(sigma: float, steps: int, epochs: int) -> LikelihoodRatio:
    """Returns a lower likelihood ratio of `epochs` independent values of max_t x_t, in buckets."""
    # Values of c around those that max_t x_t takes under P and under Q.
    low = sigma * float(special.ndtri_exp(-100.0 / steps))
    thresholds = np.linspace(low, max(_SHIFTS) + 14.0 * sigma, _GRID)
    log_p, log_q = (
        log_probability_max_below(thresholds, noise_multiplier=sigma, bins=steps, shift=shift)
        for shift in _SHIFTS
    )
    ratio = LikelihoodRatio.from_masses(
        _buckets(log_p), _buckets(log_q), _BUCKET_STEP, "lower", drift=_BUCKET_ERROR
    )
    return ratio.power(epochs)


def _buckets(log_cdf: NDArray[np.float64]) -> NDArray[np.float64]:
    """Masses between thresholds, each good to _BUCKET_ERROR; the others are left out, as 0."""
    cdf, tail = np.exp(log_cdf), -np.expm1(log_cdf)
    # On the right of the median upper tails are subtracted: they are known to relative accuracy.
    left = cdf[1:] < 0.5
    inner = np.where(left, np.diff(cdf), -np.diff(tail))
    scale = np.where(left, cdf[1:], tail[:-1])
    inner = np.where(inner > 1e-6 * scale, inner, 0.0)
    return np.concatenate([[cdf[0]], inner, [tail[-1]]])
