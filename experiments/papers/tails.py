"""Tails of balls-and-bins' likelihood ratio, by its Laplace transform: proved bounds.

X = dP/dQ is the mean of T independent log-normal variables of mean 1. Proofs:
docs/explanation/tails-of-balls-and-bins.md.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.checks import check_epsilon
from accounting.max_events import Epoch

_LOWEST, _HIGHEST, _CELLS = -36.0, 12.0, 1200
_ROUNDING = 1e-12
"""Bounds the relative error of a sum of masses of these cells."""


def log_laplace_transform(t: Array, epoch: Epoch, ceiling: float = math.inf) -> Array:
    """Bounds log E[e^(-tX)] from above at each t.

    Args:
      t: float64[points], all > 0, or all < 0 with a ceiling.
      epoch: Noise multiplier σ and number T of bins.
      ceiling: Largest value, in [-30, 12], of each of X's T standard normal variables in the event
        that counts; by default none.

    Returns:
      float64[points].
    """
    deviation, bins = 1.0 / epoch.noise_multiplier, epoch.bins
    edges = np.linspace(_LOWEST, min(_HIGHEST, ceiling), _CELLS + 1)
    value = np.exp(deviation * edges - 0.5 * deviation**2)
    log_mass = log_normal_cells(edges)
    mass, mean = np.exp(log_mass), np.exp(log_normal_cells(edges, deviation) - log_mass)
    error = 2.0 * (normal_drift(edges) + normal_drift(edges, deviation)) * mean
    # e^(-ta) is convex in a: in each cell it lies below its chord, also where its slope is rounded.
    sign = 1.0 if np.all(t > 0.0) else -1.0
    with np.errstate(invalid="ignore"):
        up = (mean - sign * error - value[:-1]) / np.diff(value)
    # Where values underflow all weight is on the end of the larger e^(-ta).
    up = np.clip(np.where(np.isnan(up), 0.5 - 0.5 * sign, up), 0.0, 1.0)
    weights = np.concatenate([mass * (1.0 - up), [0.0]]) + np.concatenate([[0.0], mass * up])
    below = float(scipy.special.ndtr(_LOWEST))
    if ceiling > _HIGHEST:
        weights[-1] += float(scipy.special.ndtr(-_HIGHEST))
    with np.errstate(over="ignore"):
        terms = np.exp(-np.multiply.outer(t / bins, value))
    log_transform = bins * (np.log(np.maximum(terms @ weights + below, 1e-300)) + _ROUNDING)
    return np.minimum(log_transform, 0.0) if sign > 0.0 else log_transform


def add_delta_upper_bound(epsilon: float, epoch: Epoch) -> float:
    """Bounds H_ε(Q||P) of one epoch from above, with proof.

    The direction is "add". The bound is the least (a/t) e^(t/a - 1) E[e^(-tX)] over t >= a = e^ε.

    Args:
      epsilon: ε >= 0.
      epoch: Noise multiplier σ and number T of bins.
    """
    check_epsilon(epsilon)
    ratio = np.geomspace(1.0, 1e6, 200)
    transform = log_laplace_transform(np.exp(min(epsilon, 600.0)) * ratio, epoch)
    return float(np.exp(min(0.0, (ratio - 1.0 - np.log(ratio) + transform).min()) + _ROUNDING))


def truncated_tail(values: Array, epoch: Epoch, ceiling: float) -> Array:
    """Bounds Pr(X >= x, no normal above c) from above.

    The bound under Q is the least e^(-tx) E[e^(tX)] over t > 0, within the event that no normal
    variable exceeds c.

    Args:
      values: Points x: float64[points].
      epoch: Noise multiplier σ and number T of bins.
      ceiling: Ceiling c of each of X's T standard normal variables, in [-30, 12].
    """
    largest = ceiling / epoch.noise_multiplier - 0.5 / epoch.noise_multiplier**2
    t = epoch.bins * np.geomspace(0.1, 60.0, 48) * math.exp(-max(largest, -600.0))
    log_mgf = log_laplace_transform(-t, epoch, ceiling)
    bounds = np.exp(np.minimum(log_mgf[:, None] - np.multiply.outer(t, values), 0.0)).min(0)
    return bounds * (1.0 + _ROUNDING)
