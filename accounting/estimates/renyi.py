"""Rényi divergences of balls-and-bins, and the lower tail of its likelihood ratio: proved bounds.

X = dP/dQ is the mean of T independent log-normal variables of mean 1. The certified profile is
never looser: docs/explanation/renyi-divergences.md.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.profile import check_count, check_epsilon, check_noise_multiplier

_CELLS = np.linspace(-36.0, 12.0, 1201)
"""Ends of cells of a standard normal variable."""
_ROUNDING = 1e-12
"""Bounds the relative error of a sum of masses of these cells."""
_LOG_STEP = 0.02
_FIRST, _LAST = -30.0, 600.0
"""Least and greatest logarithm of t, between which E[X^-β] is integrated by cells."""


def log_laplace_transform(t: Array, *, noise_multiplier: float, bins: int) -> Array:
    """Bounds log E[e^(-tX)] from above at each t > 0: float64, of the shape of `t`.

    Args:
      t: float64[points].
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
    """
    deviation = 1.0 / noise_multiplier
    value = np.exp(deviation * _CELLS - 0.5 * deviation**2)
    mass = np.exp(log_normal_cells(_CELLS))
    mean = np.exp(log_normal_cells(_CELLS, deviation) - log_normal_cells(_CELLS))
    error = 2.0 * (normal_drift(_CELLS) + normal_drift(_CELLS, deviation)) * mean
    up = np.clip((mean - error - value[:-1]) / np.diff(value), 0.0, 1.0)
    # e^(-ta) is convex in a: in each cell it lies below its chord.
    points = np.concatenate([mass * (1.0 - up), [0.0]]) + np.concatenate([[0.0], mass * up])
    tail = float(scipy.special.ndtr(_CELLS[0]))
    points[-1] += tail
    with np.errstate(over="ignore"):
        transform = np.exp(-np.multiply.outer(t / bins, value)) @ points + tail
    return np.minimum(bins * (np.log(transform) + _ROUNDING), 0.0)


def add_delta_upper_bound(epsilon: float, *, noise_multiplier: float, bins: int) -> float:
    """Returns a proved upper bound on H_ε(Q||P) of one epoch, the direction "add".

    The least (a/t) e^(t/a - 1) E[e^(-tX)] over t >= a, a = e^ε.

    Args:
      epsilon: ε >= 0.
      noise_multiplier: σ.
      bins: T.
    """
    check_epsilon(epsilon)
    check_noise_multiplier(noise_multiplier)
    check_count("bins", bins)
    ratio = np.geomspace(1.0, 1e6, 200)
    with np.errstate(over="ignore"):
        transform = log_laplace_transform(
            np.exp(min(epsilon, 600.0)) * ratio, noise_multiplier=noise_multiplier, bins=bins
        )
    return float(np.exp(min(0.0, (ratio - 1.0 - np.log(ratio) + transform).min()) + _ROUNDING))


def renyi_divergence(order: int, *, noise_multiplier: float, bins: int, epochs: int = 1) -> float:
    """Bounds from above the Rényi divergence of balls-and-bins: the larger of both directions.

    "Remove", log E[X^α] / (α - 1), is a power series in closed form; "add", log E[X^(1 - α)] /
    (α - 1), an integral over Laplace transforms.

    Args:
      order: α >= 2, an integer.
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      epochs: Number of epochs with bins drawn anew, whose divergences add.

    Raises:
      ValueError: If an argument is out of its range.
    """
    check_count("order", order)
    if order < 2:
        raise ValueError(f"order must be at least 2, got {order}")
    check_noise_multiplier(noise_multiplier)
    check_count("bins", bins)
    check_count("epochs", epochs)
    variance = noise_multiplier**-2
    log_moment = max(
        _log_moment(order, variance, bins),
        _log_inverse_moment(order - 1, noise_multiplier, bins),
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


def _log_inverse_moment(beta: int, noise_multiplier: float, bins: int) -> float:
    """Bounds log E[X^-β] = log of the integral of t^(β - 1) E[e^(-tX)] / Γ(β) over t > 0."""
    variance = noise_multiplier**-2
    gamma = 2.0 * beta
    # Of X >= the geometric mean: E[X^-γ]; and e^(-tX) <= (γ / (e t X))^γ beyond the last t.
    log_tail = gamma * (math.log(gamma) - 1.0 + 0.5 * variance * (1.0 + gamma / bins))
    last = min(_LAST, max(_FIRST + 1.0, (log_tail + 40.0) / (gamma - beta)))
    log_t = np.linspace(_FIRST, last, 1 + math.ceil((last - _FIRST) / _LOG_STEP))
    step = float(log_t[1] - log_t[0])
    transform = log_laplace_transform(np.exp(log_t), noise_multiplier=noise_multiplier, bins=bins)
    # The transform is convex in t: in each cell it lies below its chord.
    mean = beta / (beta + 1.0) * math.expm1((beta + 1.0) * step) / math.expm1(beta * step)
    up = (mean - 1.0) / math.expm1(step) - 1e-9
    chord = np.logaddexp(transform[:-1] + math.log1p(-up), transform[1:] + math.log(up))
    cells = beta * log_t[1:] + math.log(-math.expm1(-beta * step) / beta) + chord
    first = beta * _FIRST - math.log(beta)
    beyond = log_tail - (gamma - beta) * last - math.log(gamma - beta)
    found = scipy.special.logsumexp(np.concatenate([[first], cells, [beyond]]))
    return float(found - scipy.special.gammaln(beta)) + 1e-12 * (1.0 + beta * abs(last))
