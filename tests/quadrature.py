"""Quadrature, against which estimators and bounds are held."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import special


def _call(log_strike: np.ndarray, sigma: float) -> np.ndarray:
    """E[(e^Y - K)_+], Y ~ N(-1/(2 s^2), 1/s^2), K > 0, by logarithms of the normal tails."""
    d1, d2 = 0.5 / sigma - sigma * log_strike, -0.5 / sigma - sigma * log_strike
    log_first = special.log_ndtr(d1)
    return np.exp(log_first) * -np.expm1(log_strike + special.log_ndtr(d2) - log_first)


def _put(log_strike: np.ndarray, sigma: float) -> np.ndarray:
    """E[(K - e^Y)_+]."""
    d1, d2 = 0.5 / sigma - sigma * log_strike, -0.5 / sigma - sigma * log_strike
    log_first = log_strike + special.log_ndtr(-d2)
    return np.exp(log_first) * -np.expm1(special.log_ndtr(-d1) - log_first)


def _exact_sum(payoff, count: int, log_strike: np.ndarray, sigma: float) -> np.ndarray:
    """E[(X_1 + .. + X_n - S)_+] (payoff = _call) or E[(S - X_1 - .. - X_n)_+] (_put), S > 0.

    Conditions on X_n = e^y. Where e^y < S the rest has the strike K = S - e^y > 0; with
    y = log S - log(1 + e^u) the integrand is smooth in u, and the trapezoid rule converges
    exponentially. Where e^y > S the call pays X_n - S plus the others' mean, n - 1, surely.
    """
    if count == 1:
        return payoff(log_strike, sigma)
    highest = max(0.0, float(np.max(log_strike)))
    u = np.linspace(-45.0, 0.5 / sigma**2 + 13.0 / sigma + 20.0 + highest, 1201)
    y = log_strike[..., None] - np.logaddexp(0.0, u)
    density = np.exp(-0.5 * (sigma * y + 0.5 / sigma) ** 2) * sigma / math.sqrt(2 * math.pi)
    weight = density * special.expit(u) * (u[1] - u[0])
    rest = _exact_sum(payoff, count - 1, log_strike[..., None] + special.log_expit(u), sigma)
    value = (weight * rest).sum(-1)
    if payoff is _call:
        above = special.ndtr(-0.5 / sigma - sigma * log_strike)
        value = value + _call(log_strike, sigma) + (count - 1) * above
    return value


@functools.cache
def _quadrature(epsilon: float, sigma: float, bins: int, direction: str) -> float:
    if direction == "remove":
        return float(_exact_sum(_call, bins, np.asarray(math.log(bins) + epsilon), sigma)) / bins
    paid = _exact_sum(_put, bins, np.asarray(math.log(bins) - epsilon), sigma)
    return float(paid) / bins * math.exp(epsilon)


@pytest.fixture
def quadrature() -> Callable[[float, float, int, str], float]:
    """H_ε of balls-and-bins at (epsilon, sigma, bins, direction), to 1e-9, for up to 3 bins."""
    return _quadrature
