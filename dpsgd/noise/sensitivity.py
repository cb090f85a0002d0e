"""Cost of noise whose columns reach over several steps of an example, in a known order.

With M Toeplitz and without negative coefficients c, and an example's steps T apart, N steps cost as
much as one Gaussian release of sensitivity Delta,
Delta^2 = sum_{t<N} (sum_{kT <= t} c_{t-kT})^2. Proof and sources:
docs/explanation/sensitivity-in-a-known-order.md.
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDING = 2.0**-52


def overlapped(column: np.ndarray, period: int) -> np.ndarray:
    """Returns the sum of the columns of one example's steps, the first of which is step 0: [N].

    >>> overlapped(np.array([1.0, 0.5, 0.25, 0.0]), 2).tolist()
    [1.0, 0.5, 1.25, 0.5]

    Args:
      column: c_0, ..., c_{N-1}.
      period: T >= 1.
    """
    steps = len(column)
    padded = np.pad(column, (0, -steps % period))
    return padded.reshape(-1, period).cumsum(axis=0).ravel()[:steps]


def squared_sensitivity(column: np.ndarray, period: int) -> float:
    """Returns Delta^2, within `relative_error` of itself; the module says of what.

    >>> squared_sensitivity(np.array([1.0, 0.5, 0.25, 0.0]), 2)
    3.0625

    Args:
      column: c_0, ..., c_{N-1}, none negative.
      period: T >= 1.

    Raises:
      ValueError: If a coefficient is negative: then another sum of columns may be longer.
    """
    if not (column >= 0).all():
        raise ValueError("coefficients must not be negative")
    return float(np.sum(np.square(overlapped(column, period))))


def relative_error(num_steps: int, period: int) -> float:
    """Returns how far rounding may move `squared_sensitivity`, relative to it."""
    return _ROUNDING * (2 * -(-num_steps // period) + math.log2(num_steps) + 64)
