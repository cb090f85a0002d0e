"""The Gaussian mechanism's privacy profile, in closed form: the price of a deterministic order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
)

_SMALLEST = 2.3e-308  # below the smallest normal double a product may silently become 0


@dataclass(frozen=True)
class GaussianProfile:
    r"""The profile of one Gaussian release with sensitivity 1: P = N(1, s^2), Q = N(0, s^2).

    .. math:: \delta(\epsilon) = \Phi(a) - e^\epsilon \Phi(b), \quad
        a = \frac{1}{2s} - s\epsilon, \quad b = -\frac{1}{2s} - s\epsilon

    with s = `noise_multiplier`; both directions are equal by symmetry. Since
    phi(a) = e^epsilon phi(b), this is phi(a) (m(a) - m(b)) with the Mills ratio m = Phi / phi,
    which keeps relative accuracy however small delta is.

    E passes in one fixed order are E releases of one coordinate: one release at s / sqrt(E).

    >>> f"{GaussianProfile(1.0).epsilon(1e-5):.4f}"
    '[4.3771, 4.3772]'

    Source: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018,
    Theorem 8 (arXiv 1805.06530).

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0; the two ends differ by floating point alone."""
        value, error = self.value(check_epsilon(epsilon))
        return Bound(max(0.0, value - error), min(1.0, value + error))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`; `tolerance` is not needed."""
        return epsilon_from_delta(
            lambda e: sum(self.value(e)), lambda e: _difference(self.value(e)), check_delta(delta)
        )

    def value(self, epsilon: float) -> tuple[float, float]:
        """Returns delta and a bound on the floating-point error of it."""
        sigma = self.noise_multiplier
        a = 0.5 / sigma - sigma * epsilon
        b = -0.5 / sigma - sigma * epsilon
        if a > 0.0:
            first = special.ndtr(a)
            second = math.exp(epsilon + special.log_ndtr(b))
            value, scale = first - second, first
        else:
            density = math.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
            first = math.sqrt(math.pi / 2.0) * special.erfcx(-a / math.sqrt(2.0))
            second = math.sqrt(math.pi / 2.0) * special.erfcx(-b / math.sqrt(2.0))
            value, scale = density * (first - second), density * first
        # a, b and the exponents carry a few roundings each; erfcx, ndtr are good to 1e-15.
        exponent = 0.5 / sigma**2 + (sigma * epsilon) ** 2 + epsilon
        error = 1e-14 * scale + 4e-16 * exponent * (abs(value) + 1e-14 * scale) + _SMALLEST
        return min(max(float(value), 0.0), 1.0), float(error)


def _difference(pair: tuple[float, float]) -> float:
    return pair[0] - pair[1]
