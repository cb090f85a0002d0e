"""The float32 form of Toeplitz coefficients that programs compute with. It imports no JAX."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

MAX_SPREAD = 32.0
"""Most standard deviations of independent noise that correlated noise may have in a step."""


def rounded(coefficients: tuple[float, ...]) -> tuple[np.ndarray, np.float32]:
    """Returns all c_j / c_0, j >= 1, in float32, and at least the norm of these and 1."""
    ratios = np.array([c / coefficients[0] for c in coefficients[1:]], np.float32)
    square = 1 + sum(Fraction(float(ratio)) ** 2 for ratio in ratios)
    gain = np.float32(float(square) ** 0.5)
    while Fraction(float(gain)) ** 2 < square:
        gain = np.nextafter(gain, np.float32(np.inf))
    return ratios, gain
