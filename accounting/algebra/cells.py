"""The normal law in closed form: its divergence, and its mass in cells spread to a grid's points.

Errors: docs/explanation/likelihood-ratios-in-convex-order.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_WIDEST = 1.0
_STEEPEST = 12.0
"""Largest width, and width times distance from 0, of a cell that is integrated by _NODES."""


def log_normal_cells(edges: Array, mean: float = 0.0, scale: float = 1.0) -> Array:
    """Returns the log of a normal law's mass in each cell.

    Narrow cells are integrated by quadrature, of wide ones the tails are subtracted: no digits
    cancel. The relative error of the masses of these very `edges` is bounded by `normal_drift`.

    Args:
      edges: Ends of the cells, ascending, -inf and inf allowed: float64[cells + 1].
      mean: Mean of the law.
      scale: Standard deviation of the law, > 0.
    """
    lows, highs = edges[:-1], edges[1:]
    with np.errstate(invalid="ignore"):
        width = (highs - lows) / scale
        middle = (0.5 * (lows + highs) - mean) / scale
        narrow = (width <= _WIDEST) & (np.abs(middle) * width <= _STEEPEST)
    cells = np.full(width.shape, -math.inf)
    if narrow.any():
        m, w = middle[narrow], width[narrow]
        with np.errstate(divide="ignore"):
            log_density = -0.5 * m * m - 0.5 * math.log(2.0 * math.pi)
            cells[narrow] = np.log(w * _mean_density(m, w)) + log_density
    wide = ~narrow
    if wide.any():
        low, high = (lows[wide] - mean) / scale, (highs[wide] - mean) / scale
        flip = low > 0.0
        low, high = np.where(flip, -high, low), np.where(flip, -low, high)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_low, log_high = scipy.special.log_ndtr(low), scipy.special.log_ndtr(high)
            difference = log_high + np.log(-np.expm1(np.minimum(log_low - log_high, 0.0)))
        cells[wide] = np.where(high > low, difference, -math.inf)
    return cells


def _mean_density(middle: Array, width: Array) -> Array:
    slope, curvature = -0.5 * middle * width, -0.125 * width * width
    total = np.zeros(middle.shape)
    for node, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        total += 0.5 * weight * np.exp(slope * node + curvature * node**2)
    return total


def normal_drift(edges: Array, mean: float = 0.0, scale: float = 1.0) -> Array:
    """Bounds the relative error of each mass of `log_normal_cells`.

    The bound holds for masses of at least 1e-305. Arguments as in `log_normal_cells`.
    """
    nearest = np.clip((edges - mean) / scale, -38.0, 38.0)
    far = np.where(np.isfinite(edges), np.abs(edges) + abs(mean), 0.0) / scale
    distance = np.maximum(np.abs(nearest[:-1]), np.abs(nearest[1:]))
    # The far end of a wide cell matters as little as its mass.
    distance = np.minimum(distance, np.minimum(np.abs(nearest[:-1]), np.abs(nearest[1:])) + 12.0)
    offset = np.maximum(far[:-1], far[1:])
    return 2.0**-53 * (400.0 + 12.0 * distance**2 + 16.0 * (distance + 2.0) * offset)


def log_tilted_means(
    edges: Array, log_masses: Array, log_tilted: Array, deviation: float
) -> tuple[Array, Array]:
    """Returns log E[e^Y | cell] of a normal Y, and its errors.

    Y ~ N(-d^2/2, d^2), d = `deviation`; the errors are bounds. Empty cells have mean 1.

    Args:
      edges: Ends of the cells in y, ascending: float64[cells + 1].
      log_masses: Log of the mass of Y in each cell: float64[cells].
      log_tilted: Log of the mass of N(d^2/2, d^2), whose density is e^y times Y's: float64[cells].
      deviation: d > 0.
    """
    half = 0.5 * deviation**2
    with np.errstate(invalid="ignore"):
        width, middle = np.diff(edges) / deviation, 0.5 * (edges[:-1] + edges[1:])
        means = np.where(np.isneginf(log_masses), 0.0, log_tilted - log_masses)
    errors = normal_drift(edges, -half, deviation) + normal_drift(edges, half, deviation)
    m, tilted = (middle + half) / deviation, (middle - half) / deviation
    steep = np.maximum(np.abs(m), np.abs(tilted)) * width
    narrow = np.isfinite(middle) & (width <= _WIDEST) & (steep <= _STEEPEST)
    w = width[narrow]
    quotient = _mean_density(tilted[narrow], w) / _mean_density(m[narrow], w)
    means[narrow] = middle[narrow] + np.log(quotient)
    errors[narrow] = 2.0**-53 * (128.0 + 4.0 * np.abs(middle[narrow]))
    return means, errors


def up_weight(above: Array, step: float) -> Array:
    """Returns the share that goes to a value's upper grid point.

    Args:
      above: Distance of the value from the lower grid point, in log: float64[values].
      step: Grid step in log.
    """
    return np.clip(np.expm1(above) / math.expm1(step), 0.0, 1.0)


SMALLEST = 2.3e-308
"""Smaller numbers are subnormal."""


def log_mean_above(first: int, step: float, p: Array, q: Array) -> Array:
    """Returns each cell mean's distance from its grid point, in log X.

    Cell k has the grid point e^{(first + k) step}. Without P-mass it is -inf, else without Q-mass
    inf. Subnormal masses, which have few digits, count as none.

    Args:
      first: Index of the grid point of cell 0.
      step: Grid step in log X.
      p: P-mass of each cell: float64[cells].
      q: Q-mass of each cell: float64[cells].
    """
    log_grid = (first + np.arange(q.size)) * step
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.where(q < SMALLEST, math.inf, np.log(p) - np.log(q) - log_grid)
        return np.where(p < SMALLEST, -math.inf, above)


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
    """Splits the cells of X between the grid points around them.

    Cell k is [e^{k step}, e^{(k + 1) step}) in X, up to a common factor. The last one is unbounded:
    the excess of its mean over its grid point goes to infinity. Unless `bounded`, the first one
    begins at X = 0, and is split between that and its upper end. A cell whose mean is unknown is
    spread to 0 and infinity, plus 1e-307 for underflow of its masses.

    Args:
      step: Grid step in log X.
      p: P-mass of each cell: float64[cells].
      q: Q-mass of each cell: float64[cells].
      above: Distance of each cell's mean from its grid point, see `log_mean_above`: float64[cells].
      bounded: True if the first cell begins at its grid point.
    """
    unknown = ~np.isfinite(above)
    lost_q = float(q[unknown].sum()) + 1e-307 * int(np.count_nonzero(unknown & (p > 0.0)))
    lost_p = float(p[unknown].sum()) + 1e-307 * int(np.count_nonzero(unknown & (q > 0.0)))
    p, q, above = (np.where(unknown, 0.0, x) for x in (p, q, above))
    up = up_weight(np.minimum(above, step), step)
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
    return Spread(q_down, p_down, zero + lost_q, infinity + lost_p)


def gaussian_delta(sigma: float, epsilon: float) -> tuple[float, float]:
    r"""Returns a Gaussian release's delta, and its rounding error.

    The delta is H_epsilon(N(1, s^2) || N(0, s^2)), s = `sigma`; the error is a bound.

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
    exponent = min(0.5 / sigma**2 + (sigma * epsilon) * (sigma * epsilon) + epsilon, 1e300)
    error = 1e-14 * scale + 4e-16 * exponent * (abs(value) + 1e-14 * scale) + SMALLEST
    return min(max(float(value), 0.0), 1.0), float(error)
