"""Shuffling: each epoch a uniformly random order, cut into batches; bounds from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from accounting.balls_and_bins import BallsAndBinsProfile
from accounting.gaussian import GaussianProfile
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
)

_SLACK = 1e-9
_GRID = 4001


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
        lower = max(lower, epsilon_from_delta(lambda e: 0.0, self._event_delta, delta).lower)
        return Bound(min(lower, upper), upper)

    def _deterministic(self) -> GaussianProfile:
        return GaussianProfile(self.noise_multiplier / math.sqrt(self.epochs))

    def _balls_and_bins(self) -> BallsAndBinsProfile:
        return BallsAndBinsProfile(
            self.noise_multiplier, self.steps_per_epoch, self.epochs, self.order
        )

    def _event_delta(self, epsilon: float) -> float:
        """Lower bound by the events {max_t x_t >= c}: P(A) - e^eps Q(A), the best of many c."""
        if self.order == "redrawn" and self.epochs > 1:
            return 0.0
        sigma = self.noise_multiplier / math.sqrt(self.epochs)
        others = self.steps_per_epoch - 1
        c = np.linspace(-10.0 * sigma, 2.0 + 40.0 * sigma, _GRID)
        p = -np.expm1(special.log_ndtr((c - 2) / sigma) + others * special.log_ndtr(c / sigma))
        q = -np.expm1(special.log_ndtr((c - 1) / sigma) + others * special.log_ndtr(c / sigma))
        with np.errstate(over="ignore", invalid="ignore"):
            value = p * (1.0 - _SLACK) - np.exp(min(epsilon, 700.0)) * q * (1.0 + _SLACK)
        return max(0.0, float(np.nanmax(value)))
