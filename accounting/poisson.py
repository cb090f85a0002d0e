"""Poisson sampling: every example is in every batch independently with one probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from accounting.gaussian import GaussianProfile
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)


@dataclass(frozen=True)
class PoissonProfile:
    """The profile of `steps` Poisson-sampled Gaussian releases, both directions.

    Tightly dominated by P = ((1-q) N(0, s^2) + q N(1, s^2))^T, Q = N(0, s^2)^T with
    q = `sampling_prob`, s = `noise_multiplier`, T = `steps`.

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite, `sampling_prob` is not in
        (0, 1], or `steps` is not an integer >= 1.
    """

    noise_multiplier: float
    sampling_prob: float
    steps: int

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("steps", self.steps)
        if not 0.0 < self.sampling_prob <= 1.0:
            raise ValueError(f"sampling_prob must be in (0, 1], got {self.sampling_prob}")

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        check_epsilon(epsilon)
        upper = self._deterministic().delta(epsilon).upper
        upper = min(upper, float(self._pld(1e-4).get_delta_for_epsilon(epsilon)))
        return Bound(0.0, upper)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`."""
        check_delta(delta)
        upper = self._deterministic().epsilon(delta).upper
        return Bound(0.0, min(upper, float(self._pld(1e-4).get_epsilon_for_delta(delta))))

    def _deterministic(self) -> GaussianProfile:
        return GaussianProfile(self.noise_multiplier / math.sqrt(self.steps))

    def _pld(self, interval: float):
        return _pld(self.noise_multiplier, self.sampling_prob, self.steps, interval)


@lru_cache(maxsize=8)
def _pld(noise_multiplier: float, sampling_prob: float, steps: int, interval: float):
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_prob, value_discretization_interval=interval
    ).self_compose(steps)
