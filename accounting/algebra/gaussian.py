"""The Gaussian mechanism's hockey-stick divergence, in closed form."""

from __future__ import annotations

import math

import scipy

_SMALLEST = 2.3e-308  # below the smallest normal double a product may silently become 0


def gaussian_delta(sigma: float, epsilon: float) -> tuple[float, float]:
    r"""Returns H_epsilon(N(1, s^2) || N(0, s^2)), s = `sigma`, and a bound on its rounding error.

    .. math:: \Phi(a) - e^\epsilon \Phi(b), \quad
        a = \frac{1}{2s} - s\epsilon, \quad b = -\frac{1}{2s} - s\epsilon

    As phi(b) = e^-epsilon phi(a), it is phi(a) (m(a) - m(b)), m = Phi / phi, to all digits.
    """
    a = 0.5 / sigma - sigma * epsilon
    b = -0.5 / sigma - sigma * epsilon
    if a > 0.0:
        first = scipy.special.ndtr(a)
        second = math.exp(epsilon + scipy.special.log_ndtr(b))
        value, scale = first - second, first
    else:
        density = math.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
        first = math.sqrt(math.pi / 2.0) * scipy.special.erfcx(-a / math.sqrt(2.0))
        second = math.sqrt(math.pi / 2.0) * scipy.special.erfcx(-b / math.sqrt(2.0))
        value, scale = density * (first - second), density * first
    # a, b and the exponents carry a few roundings each; erfcx, ndtr are good to 1e-15.
    exponent = 0.5 / sigma**2 + (sigma * epsilon) ** 2 + epsilon
    error = 1e-14 * scale + 4e-16 * exponent * (abs(value) + 1e-14 * scale) + _SMALLEST
    return min(max(float(value), 0.0), 1.0), float(error)
