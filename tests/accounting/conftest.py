"""Quadrature, against which estimators and bounds are held."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr


@functools.cache
def _quadrature(epsilon: float, sigma: float, bins: int, direction: str) -> float:
    """H_ε for T in {1, 2, 3}: one coordinate in closed form, the others by the trapezoid rule.

    remove: E[(X - a)_+] = E[(Y - (Ta - S))_+]/T, a call; add: E[(1 - aX)_+] = a E[(T/a - S -
    Y)_+]/T, a put; Y is log-normal with mean 1, S the sum of the other T - 1 and a = e^ε. Good to
    1e-6 relative for T <= 2 and to 1e-3 for T = 3 (a narrow bend where S passes Ta).
    """
    scale, a = 1.0 / sigma, math.exp(epsilon)
    high = 10.0 + 2 * scale + (epsilon + math.log(bins)) / scale
    z = np.linspace(-10.0 - epsilon / scale, high, 2001 if bins == 3 else 100_001)
    weight = stats.norm.pdf(z) * (z[1] - z[0])
    y = np.exp(scale * z - 0.5 * scale**2)
    total, mass = np.zeros(1), np.ones(1)
    for _ in range(bins - 1):
        total = (total[:, None] + y).ravel()
        mass = (mass[:, None] * weight).ravel()
    strike = bins * a - total if direction == "remove" else bins / a - total
    inside = strike > 0
    k = np.where(inside, strike, 1.0)
    d = -np.log(k) / scale + 0.5 * scale
    if direction == "remove":
        value = np.where(inside, ndtr(d) - k * ndtr(d - scale), 1.0 - strike) / bins
    else:
        value = np.where(inside, k * ndtr(scale - d) - ndtr(-d), 0.0) * a / bins
    return float(mass @ value)


@pytest.fixture
def quadrature() -> Callable[[float, float, int, str], float]:
    """H_ε of (epsilon, sigma, bins, direction) for up to 3 bins, see above."""
    return _quadrature
