"""Releases whose two laws are Gaussian mixtures on a line, cut into certified cells.

Pairs P = sum_i w_i N(m_i, s^2), Q = sum_i w'_i N(m'_i, s^2) have no closed-form likelihood ratio:
its law is computed from the masses of cells (see `likelihood_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.algebra.likelihood_ratio import ROUNDING, Ratio
from accounting.algebra.refinement import GridError

EDGE_DRIFT = 1e-12
"""Largest distance, in log X, of the two laws' common cells, or a cell's mean, from the grid."""
_LARGEST_LOSS = 500.0
"""Largest log X of a grid: e^500 and its inverse are far within the range of floats."""
MOST_CELLS = 2**19


class Mixture(NamedTuple):
    """The law sum_i weights[i] N(means[i], scale^2)."""

    means: Array
    """float64[components]."""
    weights: Array
    """Positive, of sum 1: float64[components]."""
    scale: float
    """Common standard deviation, > 0."""

    @classmethod
    def from_weights(
        cls, means: Sequence[float], weights: Sequence[float], scale: float
    ) -> Mixture:
        """Returns the mixture without its components of weight 0.

        Args:
          means: Mean of each component.
          weights: Weight of each component, >= 0.
          scale: Standard deviation of every component.
        """
        positive = [i for i, weight in enumerate(weights) if weight > 0.0]
        return cls(
            np.array([means[i] for i in positive], float),
            np.array([weights[i] for i in positive], float),
            scale,
        )

    def masses(self, edges: Array) -> Array:
        """Returns the mass between successive `edges`, with relative accuracy.

        The edges ascend, and may begin with -inf and end with inf: float64[cells + 1].
        """
        with np.errstate(under="ignore"):
            components = [
                weight * np.exp(log_normal_cells(edges, mean, self.scale))
                for mean, weight in zip(self.means, self.weights, strict=True)
            ]
        return np.sum(components, axis=0)

    def drift(self, edges: Array) -> float:
        """Bounds the relative error of each of `masses`, of exact weights."""
        drifts = [normal_drift(edges, mean, self.scale).max() for mean in self.means]
        return float(max(drifts)) + (len(drifts) + 4.0) * ROUNDING

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns two points with a mass of at most `tail` beyond each."""
        shares = tail / (self.weights * self.weights.size)
        far = -self.scale * scipy.special.ndtri(np.minimum(shares, 0.5))
        return float((self.means - far).min()), float((self.means + far).max())

    def log_density(self, z: Array) -> Array:
        """Returns the log of the density at `z`, up to a constant of the scale: float64[points]."""
        log_terms = [
            math.log(weight) - 0.5 * ((z - mean) / self.scale) ** 2
            for mean, weight in zip(self.means, self.weights, strict=True)
        ]
        return np.logaddexp.reduce(log_terms, axis=0)


def ratio_deviation(p: Mixture, q: Mixture) -> float:
    """Estimates the deviation of X = dP/dQ under Q.

    `|X - 1|` is cut off at 1.

    Args:
      p: P.
      q: Q, with the scale of P.
    """
    (p_low, p_high), (q_low, q_high) = p.reach(1e-12), q.reach(1e-12)
    edges = np.linspace(min(p_low, q_low), max(p_high, q_high), 2000)
    p_mass, q_mass = p.masses(edges), q.masses(edges)
    excess = np.abs(p_mass - q_mass)
    return math.sqrt(float(np.sum(excess * np.minimum(excess / (q_mass + 1e-300), 1.0))))


def ratio_edges(p: Mixture, q: Mixture, step: float, tail: float) -> Array:
    """Returns cells in which log dP/dQ varies by about `step`.

    The outer edges are -inf and inf. The ratio varies by more where the cells would be too many.

    Args:
      p: P.
      q: Q, with the scale of P.
      step: Grid step in log X.
      tail: Mass of each law beyond the range whose variation is counted.
    """
    (p_low, p_high), (q_low, q_high) = p.reach(tail), q.reach(tail)
    z = np.linspace(min(p_low, q_low), max(p_high, q_high), 20_001)
    loss = p.log_density(z) - q.log_density(z)
    varied = np.append(0.0, np.cumsum(np.abs(np.diff(loss)))) / step
    varied *= min(1.0, MOST_CELLS / float(varied[-1]))
    varied += np.linspace(0.0, 1000.0, z.size)
    edges = np.interp(np.arange(math.ceil(varied[-1]) + 1), varied, z)
    edges[0], edges[-1] = -math.inf, math.inf
    return edges


def check_grid(largest_loss: float, step: float, cells: float) -> None:
    """Raises GridError unless a grid of the losses is computed."""
    if not max(largest_loss, step) <= _LARGEST_LOSS:
        raise GridError(f"no finer grid is computed: losses are beyond {_LARGEST_LOSS:.0f}")
    if cells > MOST_CELLS:
        raise GridError(f"no finer grid is computed: it has more than {MOST_CELLS} cells")


def release_ratio(
    noise_multiplier: float, beside: Ratio, tail: float | None = None
) -> list[tuple[Ratio, int]]:
    """Returns the ratio of a Gaussian release, and its number 1.

    The list is empty at infinite noise.

    Args:
      noise_multiplier: Noise of the release.
      beside: Law whose kind and grid the release gets.
      tail: Mass that may be cut; by default the other law's.

    Raises:
      GridError: If the release's grid would be too large.
    """
    if noise_multiplier == math.inf:
        return []
    tail = beside.tail if tail is None else tail
    reach = (0.5 / noise_multiplier - float(scipy.special.ndtri(tail))) / noise_multiplier
    check_grid(reach, beside.step, 2.0 * reach / beside.step)
    return [(type(beside).gaussian(noise_multiplier, beside.step, tail), 1)]


def sampled_release(
    kind: type[Ratio], noise_multiplier: float, rate: float, step: float, tail: float
) -> Ratio:
    """Returns the ratio of a release with participation at `rate`.

    Args:
      kind: Side of the bound: upper or lower.
      noise_multiplier: s of the release.
      rate: Probability that the example takes part.
      step: Grid step in log X.
      tail: Largest mass beyond either end of the grid.

    Raises:
      GridError: If the grid would be too large.
    """
    top = reach = (0.5 / noise_multiplier - float(scipy.special.ndtri(tail))) / noise_multiplier
    bottom = -reach
    if rate < 1.0:
        bottom = math.log1p(-rate)
        top = float(np.logaddexp(bottom, math.log(rate) + reach))
    check_grid(max(top, -bottom), step, (top - bottom) / step)
    return kind.subsampled_gaussian(noise_multiplier, rate, step, tail)


def solve_increasing(
    function: Callable[[Array], Array], values: Array, low: float, high: float
) -> Array:
    """Returns x in [low, high] with function(x) = `values`.

    By regula falsi with bisections in between, until the function is met to a few roundings or the
    bracket ends at neighbouring doubles; a value out of reach gives the nearer end.

    Args:
      function: Increasing vectorised function.
      values: Values to reach: float64[n].
      low: Lower end of every x.
      high: Upper end of every x.
    """
    lows, highs = np.full(values.shape, low), np.full(values.shape, high)
    below, above = function(lows) - values, function(highs) - values
    x = np.where(below >= 0.0, lows, highs)
    close = np.maximum(1e-13, 4.0 * ROUNDING * np.abs(values))
    for k in range(200):
        middle = 0.5 * (lows + highs)
        unsolved = (below < -close) & (above > close) & (lows < middle) & (middle < highs)
        if not unsolved.any():
            break
        if k % 3 < 2:
            with np.errstate(invalid="ignore", divide="ignore"):
                secant = lows - below * ((highs - lows) / (above - below))
            middle = np.where((lows < secant) & (secant < highs), secant, middle)
        x = np.where(unsolved, middle, x)
        excess = function(x) - values
        falls = unsolved & (excess < 0.0)
        rises = unsolved & (excess >= 0.0)
        lows, below = np.where(falls, x, lows), np.where(falls, excess, below)
        highs, above = np.where(rises, x, highs), np.where(rises, excess, above)
    return np.where(-below <= above, lows, highs)
