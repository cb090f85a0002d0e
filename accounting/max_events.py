"""Proved lower bounds on delta, in closed form, from the law of the largest coordinate.

Proof and sources: docs/explanation/lower-bounds-for-shuffled-batches.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.checks import Noise, check_count, check_epsilon
from accounting.records import Count, Record

# Relative slack for the rounding of closed forms that are printed as proved.
_ROUNDING = 1e-9
# And for that of exponents, relative to the numbers that they are made of.
_EXPONENT_ROUNDING = 1e-14


@dataclass(frozen=True)
class Epoch(Record):
    """T releases of an example in one of them: x ~ N(shift e_t, σ² I) in T dimensions.

    Attributes:
      noise_multiplier: σ.
      bins: T, the number of batches of the epoch.

    Raises:
      ValueError: If one of them is out of range.
    """

    noise_multiplier: Noise
    bins: Count

    def log_max_below(self, ceilings: Array, shift: float) -> Array:
        """Returns log Pr(max_t x_t < c) at each ceiling c.

        It is log Φ((c - shift)/σ) + (T - 1) log Φ(c/σ).

        Args:
          ceilings: c: float64[ceilings].
          shift: Mean of the example's coordinate; the others have mean 0.
        """
        z = np.asarray(ceilings, dtype=np.float64) / self.noise_multiplier
        log_others_below = (self.bins - 1) * scipy.special.log_ndtr(z) if self.bins > 1 else 0.0
        return scipy.special.log_ndtr(z - shift / self.noise_multiplier) + log_others_below


def maximum_buckets(epoch: Epoch, ceilings: Array, shift: float) -> tuple[Array, float]:
    """Returns the law of max_t x_t between ascending `ceilings`.

    The law has the masses below, between and above the ceilings.

    Args:
      epoch: One epoch.
      ceilings: Ascending bounds: float64[ceilings].
      shift: Mean of the example's coordinate.

    Returns:
      float64[ceilings + 1], and a bound on their relative error.
    """
    sigma, other_bins = epoch.noise_multiplier, epoch.bins - 1
    log_below = epoch.log_max_below(ceilings, shift)
    neighbours = ceilings[:-1], ceilings[1:]
    log_g = scipy.special.log_ndtr((neighbours[0] - shift) / sigma)
    log_h = scipy.special.log_ndtr(neighbours[1] / sigma)
    first = np.exp(log_normal_cells(ceilings, shift, sigma) + other_bins * log_h)
    share = np.exp(np.minimum(log_normal_cells(ceilings, 0.0, sigma) - log_h, 0.0))
    with np.errstate(divide="ignore"):
        any_other_above = (
            -np.expm1(other_bins * np.log1p(-share)) if other_bins else np.zeros(share.shape)
        )
    inner = first + np.exp(log_g + other_bins * log_h) * any_other_above
    drift = max(float(normal_drift(ceilings, mean, sigma).max()) for mean in (0.0, shift))
    masses = np.concatenate([[np.exp(log_below[0])], inner, [-np.expm1(log_below[-1])]])
    # Logarithms down to -1000 are good to 8 roundings of their size.
    return masses, drift + 1e-12


def sum_of_maxima_lower_bound(epsilon: float, epoch: Epoch, epochs: int) -> float:
    """Returns a proved lower bound on shuffling's δ >= 0, sharp at little noise."""
    check_count("epochs", epochs)
    check_epsilon(epsilon)
    variance = epoch.noise_multiplier**2 / epochs
    # y/E that is best for the pair N(2, variance), N(1, variance) at a larger epsilon.
    extra = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 60) * epochs * np.log(epoch.bins)])
    threshold = 0.5 + variance * (epsilon + extra)
    log_q = scipy.special.log_ndtr(-threshold / np.sqrt(variance))
    log_others = epochs * np.log1p(
        (epoch.bins - 1) * np.exp(-threshold / epoch.noise_multiplier**2)
    )
    exponent = epsilon + log_others + log_q
    exponent += _EXPONENT_ROUNDING * (epsilon + log_others - log_q)
    with np.errstate(over="ignore"):
        p_above = np.exp(scipy.special.log_ndtr((1.0 - threshold) / np.sqrt(variance)))
        gains = (1 - _ROUNDING) * p_above - np.exp(exponent)
    return max(float(gains.max()), 0.0)
