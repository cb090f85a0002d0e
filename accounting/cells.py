"""Cells of a line: the normal law's mass in them, and likelihood ratios spread to a grid's points.

A likelihood ratio X that is cut into cells at a geometric grid is bounded from above by the law
that has each cell's mass at its two end points, split so as to keep its mean (a spread, see
`likelihood_ratio`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]


def log_normal_cells(edges: Array) -> Array:
    """Log of the standard normal's mass between successive `edges`.

    On the right of 0 upper tails are subtracted, so that no difference of near-ones is taken.
    """
    left, right = edges[:-1], edges[1:]
    flip = left > 0.0
    low, high = np.where(flip, -right, left), np.where(flip, -left, right)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_low, log_high = special.log_ndtr(low), special.log_ndtr(high)
        cells = log_high + np.log(-np.expm1(np.minimum(log_low - log_high, 0.0)))
    return np.where(high > low, cells, -math.inf)


def up_weight(above: Array, step: float) -> Array:
    """Share that goes to the upper of two grid points, of a value whose log is `above` the lower's.

    The rest goes to the lower one: the mean is kept.
    """
    return np.clip(np.expm1(above) / math.expm1(step), 0.0, 1.0)


def log_mean_above(first: int, step: float, p: Array, q: Array) -> Array:
    """Returns log X of each cell's mean X = p/q, less that of its grid point: float64[cells].

    Cell k has the grid point e^{(first + k) step}. Without P-mass it is -inf, else without Q-mass
    inf.
    """
    log_grid = (first + np.arange(q.size)) * step
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0.0, np.log(p) - np.log(q) - log_grid, -math.inf)


class Spread(NamedTuple):
    """Cells of X = P/Q, each split between its two grid points so as to keep mass and mean."""

    q: Array
    """Q-mass of each grid point, = p / X: float64[cells]."""
    p: Array
    """P-mass of each grid point, = q X: float64[cells]."""
    zero: float
    """Q-mass at X = 0."""
    infinity: float
    """P-mass at X = infinity."""


def spread(step: float, p: Array, q: Array, above: Array, *, bounded: bool = True) -> Spread:
    """Splits cells of P-mass `p` and Q-mass `q` between the grid points that end them.

    Cell k is [e^{k step}, e^{(k + 1) step}) in X, up to a common factor. The last one never ends:
    what its mean exceeds its grid point by goes to infinity. Unless `bounded`, the first one begins
    at X = 0, and is split between that and its upper end.

    Args:
      step: Grid step in log X.
      p: float64[cells].
      q: float64[cells].
      above: As `log_mean_above` gives it: float64[cells].
      bounded: Whether the first cell begins at its grid point.
    """
    up = np.where(np.isfinite(above), up_weight(np.minimum(above, step), step), 0.0)
    up[-1] = 0.0
    stretch = 1.0 + up * math.expm1(step)
    q_up, p_up = q * up, p * up * math.exp(step) / stretch
    q_down, p_down = q * (1.0 - up), p * (1.0 - up) / stretch
    zero = 0.0
    if not bounded:
        share = min(math.exp(float(above[0]) - step), 1.0)
        zero, q_up[0], p_up[0] = float(q[0]) * (1.0 - share), q[0] * share, p[0]
        q_down[0] = p_down[0] = 0.0
    share = math.exp(-max(float(above[-1]), 0.0))
    infinity = float(p[-1]) * (1.0 - share)
    p_down[-1] = p[-1] * share
    q_down[1:] += q_up[:-1]
    p_down[1:] += p_up[:-1]
    return Spread(q_down, p_down, zero, infinity)
