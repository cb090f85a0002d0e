"""Balls-and-bins at little noise, in closed form: the release that holds the example decides.

Proof: docs/explanation/balls-and-bins-at-little-noise.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from accounting.algebra.cells import Array
from accounting.profile import Bound, Profile, Question
from accounting.profiles.gaussian import GaussianProfile, known_order

_ROUNDING = 1e-14
"""Relative slack for the roundings of the few sums here; G brings its own."""
_SHARE = 1e-8
"""Share of delta that is left to events on which other releases matter."""


@dataclass(frozen=True)
class LargestRelease(Profile):
    """An upper bound on balls-and-bins' profile, sharp where one release outweighs all others."""

    noise_multiplier: float
    bins: int
    epochs: int
    release: float = math.inf

    def answer(self, question: Question) -> Bound:
        """Answers in closed form; `AssignmentsProfile` has the lower end."""
        upper = self._upper_delta if question.wanted == "delta" else self._upper_epsilon
        return Bound(0.0, upper(question.at))

    def _upper_delta(self, epsilon: float) -> float:
        guess = self._gaussian().delta(epsilon + self.epochs * math.log(self.bins)).lower
        if guess <= 0.0:
            return 1.0
        log_share = math.log(guess) + math.log(1e-5)
        moved = self._moved(log_share)
        if self._several:
            shifted = epsilon + self.epochs * math.log(self.bins) - moved
        elif moved < epsilon:
            shifted = math.log(self.bins) + epsilon + math.log1p(-math.exp(moved - epsilon))
        else:
            return 1.0
        if shifted < 0.0:
            return 1.0
        remove = self._gaussian().delta(shifted * (1.0 - _ROUNDING)).upper
        remove += 1.0001e-5 * guess
        return min(1.0, max(remove, math.exp(min(0.0, self._log_add(epsilon)))))

    def _upper_epsilon(self, delta: float) -> float:
        moved = self._moved(math.log(delta) + math.log(_SHARE))
        gaussian_delta = delta * (1.0 - 1.0001 * _SHARE)
        curve = self._gaussian().delta
        shifted = Question("epsilon", gaussian_delta).upper_end(lambda e: curve(e).upper)
        log_bins = self.epochs * math.log(self.bins)
        epsilon = shifted - log_bins + _ROUNDING * (abs(shifted) + log_bins)
        epsilon = epsilon + moved if self._several else float(np.logaddexp(epsilon, moved))
        epsilon += _ROUNDING * abs(epsilon)
        if not (0.0 <= epsilon < math.inf) or self._log_add(epsilon) > math.log(delta):
            return math.inf
        return epsilon

    def _gaussian(self) -> GaussianProfile:
        return known_order(self.noise_multiplier, self.epochs, self.release)

    @property
    def _several(self) -> bool:
        """True if X has more factors than one epoch's."""
        return self.epochs > 1 or self.release < math.inf

    def _moved(self, log_share: float) -> float:
        """Returns log r of one epoch alone, or E log(1 + r T e^{-c}) of several.

        The events that are left out then have at most the mass e^`log_share`.
        """
        sigma, bins, epochs = self.noise_multiplier, self.bins, self.epochs
        log_share_each = log_share - math.log(epochs) - (math.log(2.0) if self._several else 0.0)
        log_r = min(
            -log_share_each, (_quantile(log_share_each - math.log(bins)) - 0.5 / sigma) / sigma
        )
        if not self._several:
            return log_r
        c = (0.5 / sigma - _quantile(log_share_each)) / sigma
        exponent = log_r + math.log(bins) - c
        exponent += _ROUNDING * (abs(log_r) + abs(c)) + 1e-9
        return epochs * float(np.logaddexp(0.0, exponent))

    def _log_add(self, epsilon: float) -> float:
        """Bounds the logarithm of H_epsilon(Q || P)."""
        sigma, bins, epochs = self.noise_multiplier, self.bins, self.epochs
        if not self._several:
            threshold = sigma * (math.log(bins) - epsilon) + 0.5 / sigma
            return bins * float(scipy.special.log_ndtr(threshold + 1e-12 * abs(threshold) + 1e-9))
        slopes, log_moments = _log_moments(bins)
        log_powers = log_moments + slopes * (sigma * math.log(bins) + 0.5 / sigma)
        powers = slopes * sigma
        beside = 0.5 * (powers / self.release) * ((powers + 1.0) / self.release)
        bounds = epochs * log_powers + beside - powers * epsilon
        return float(bounds.min()) + 1e-12 * float((epochs * np.abs(log_powers) + beside).max())


def _quantile(log_tail: float) -> float:
    """Returns a point beyond which a standard normal has at most the mass e^`log_tail`."""
    quantile = -float(scipy.special.ndtri_exp(log_tail))
    return quantile + 1e-9 * (1.0 + abs(quantile))


@lru_cache(maxsize=64)
def _log_moments(bins: int) -> tuple[Array, Array]:
    """Returns slopes v > 0 and bounds on log E e^{-v m}, m the largest of `bins` normals."""
    m = np.linspace(-60.0, 40.0, 4001)
    slopes = np.geomspace(0.02, 40.0, 60)
    v = slopes[:, None]
    with np.errstate(divide="ignore"):
        log_cdf = bins * scipy.special.log_ndtr(m[1:])
        cells = log_cdf - v * m[:-1] + np.log(-np.expm1(-v * np.diff(m)))
    below = 0.5 * slopes**2 + scipy.special.log_ndtr(m[0] + slopes)
    above = -slopes * m[-1]
    total = scipy.special.logsumexp(np.column_stack([cells, below, above]), axis=1)
    return slopes, total + 1e-9
