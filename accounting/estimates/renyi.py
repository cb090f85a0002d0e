"""Rényi divergences of balls-and-bins: proved bounds, which the certified profile never exceeds.

X = dP/dQ is the mean of T independent log-normal variables of mean 1. Proofs:
docs/explanation/renyi-divergences.md.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from accounting.algebra.cells import Array
from accounting.checks import check_count
from accounting.estimates.tails import log_laplace_transform
from accounting.profiles.max_events import Epoch

_LOG_STEP = 0.02
_FIRST, _LAST = -30.0, 600.0
"""Least and greatest logarithm of t, between which E[X^-β] is integrated by cells."""


def renyi_divergence(order: int, epoch: Epoch, epochs: int = 1) -> float:
    """Bounds from above the Rényi divergence of balls-and-bins: the larger of both directions.

    "Remove", log E[X^α] / (α - 1), is a power series in closed form; "add", log E[X^(1 - α)] /
    (α - 1), an integral over Laplace transforms.

    Args:
      order: α >= 2, an integer.
      epoch: σ and T.
      epochs: Number of epochs with bins drawn anew, whose divergences add.

    Raises:
      ValueError: If an argument is out of its range.
    """
    check_count("order", order)
    if order < 2:
        raise ValueError(f"order must be at least 2, got {order}")
    check_count("epochs", epochs)
    variance = epoch.noise_multiplier**-2
    log_moment = max(
        _log_moment(order, variance, epoch.bins),
        _log_inverse_moment(order - 1, epoch),
    )
    # No release of a known order costs more.
    return epochs * min(0.5 * order * variance, log_moment / (order - 1))


def _log_moment(order: int, variance: float, bins: int) -> float:
    """Returns log E[X^α]: α! / T^α times the coefficient of z^α in (sum_k E[A^k] z^k / k!)^T."""
    k = np.arange(order + 1)
    factorials = scipy.special.gammaln(k + 1.0)
    base = 0.5 * variance * k * (k - 1.0) - factorials
    power, left = np.where(k == 0, 0.0, -math.inf), bins
    while left:
        power = _log_product(power, base) if left % 2 else power
        base, left = _log_product(base, base) if left > 1 else base, left // 2
    found = float(power[-1] + factorials[-1] - order * math.log(bins))
    return found + 1e-14 * (order + 2.0 * bins.bit_length()) * (1.0 + abs(found) + factorials[-1])


def _log_product(a: Array, b: Array) -> Array:
    """Returns the logarithms of the coefficients of a product of two power series, to its end."""
    return np.array([scipy.special.logsumexp(a[: n + 1] + b[n::-1]) for n in range(a.size)])


def _log_inverse_moment(beta: int, epoch: Epoch) -> float:
    """Bounds log E[X^-β] = log of the integral of t^(β - 1) E[e^(-tX)] / Γ(β) over t > 0."""
    variance, bins = epoch.noise_multiplier**-2, epoch.bins
    gamma = 2.0 * beta
    # Of X >= the geometric mean: E[X^-γ]; and e^(-tX) <= (γ / (e t X))^γ beyond the last t.
    log_tail = gamma * (math.log(gamma) - 1.0 + 0.5 * variance * (1.0 + gamma / bins))
    last = min(_LAST, max(_FIRST + 1.0, (log_tail + 40.0) / (gamma - beta)))
    log_t = np.linspace(_FIRST, last, 1 + math.ceil((last - _FIRST) / _LOG_STEP))
    step = float(log_t[1] - log_t[0])
    transform = log_laplace_transform(np.exp(log_t), epoch)
    # The transform is convex in t: in each cell it lies below its chord.
    mean = beta / (beta + 1.0) * math.expm1((beta + 1.0) * step) / math.expm1(beta * step)
    up = (mean - 1.0) / math.expm1(step) - 1e-9
    chord = np.logaddexp(transform[:-1] + math.log1p(-up), transform[1:] + math.log(up))
    cells = beta * log_t[1:] + math.log(-math.expm1(-beta * step) / beta) + chord
    first = beta * _FIRST - math.log(beta)
    beyond = log_tail - (gamma - beta) * last - math.log(gamma - beta)
    found = scipy.special.logsumexp(np.concatenate([[first], cells, [beyond]]))
    return float(found - scipy.special.gammaln(beta)) + 1e-12 * (1.0 + beta * abs(last))
