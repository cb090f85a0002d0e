r"""Releases whose two laws are Gaussian mixtures on a line: certified cells, and their composition.

Several mechanisms (multistage sampling, users with many examples) are dominated by pairs

.. math:: P = \sum_i w_i N(m_i, s^2), \qquad Q = \sum_i w'_i N(m'_i, s^2)

that have no closed-form likelihood ratio. Here they are cut into cells, and many equal releases
are composed from finer and finer grids (see `likelihood_ratio` and `composition`).
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from scipy import special

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.algebra.composition import ComposedLoss, compose_both
from accounting.algebra.likelihood_ratio import ROUNDING, LikelihoodRatio, Side
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    PrivacyProfile,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
    wanted_width,
)

EDGE_DRIFT = 1e-12
"""How far, in log X, the two laws' common cells may be from the grid, and the mean of a group."""
_LARGEST_LOSS = 500.0
"""Largest log X of a grid: e^500 and its inverse are far within the range of floats."""
MOST_CELLS = 2**21
_COARSEST = 0.4
_FINEST = 2e-3
_COARSEST_OF_ALL = 1e6
_SMALLEST_MASS = 1e-300
_FLOOR = "delta is so small that the composition's certified error is a part of it"
_NO_FINER = "no finer grid is computed"


class Mixture(NamedTuple):
    """The law sum_i weights[i] N(means[i], scale^2)."""

    means: Array
    """float64[components]."""
    weights: Array
    """Positive, of sum 1: float64[components]."""
    scale: float
    """Common standard deviation, > 0."""

    @classmethod
    def of(cls, means: Sequence[float], weights: Sequence[float], scale: float) -> Mixture:
        """Returns the mixture without its components of weight 0."""
        kept = [i for i, weight in enumerate(weights) if weight > 0.0]
        return cls(
            np.array([means[i] for i in kept], float),
            np.array([weights[i] for i in kept], float),
            scale,
        )

    def masses(self, edges: Array) -> Array:
        """Returns the mass between successive `edges`, ascending, with relative accuracy.

        Args:
          edges: May begin with -inf and end with +inf; float64[cells + 1].
        """
        with np.errstate(under="ignore"):
            parts = [
                weight * np.exp(log_normal_cells(edges, mean, self.scale))
                for mean, weight in zip(self.means, self.weights, strict=True)
            ]
        return np.sum(parts, axis=0)

    def drift(self, edges: Array) -> float:
        """Bounds the relative error of each of `masses`, weights taken as they are."""
        each = [normal_drift(edges, mean, self.scale).max() for mean in self.means]
        return float(max(each)) + (len(each) + 4.0) * ROUNDING

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns two points beyond each of which the mass is at most `tail`."""
        shares = tail / (self.weights * self.weights.size)
        far = -self.scale * special.ndtri(np.minimum(shares, 0.5))
        return float((self.means - far).min()), float((self.means + far).max())

    def log_density(self, z: Array) -> Array:
        """Returns the log of the density at `z`, up to a constant of the scale: float64[points]."""
        parts = [
            math.log(weight) - 0.5 * ((z - mean) / self.scale) ** 2
            for mean, weight in zip(self.means, self.weights, strict=True)
        ]
        return np.logaddexp.reduce(parts, axis=0)


def ratio_deviation(p: Mixture, q: Mixture) -> float:
    """Returns about the deviation of X = dP/dQ under Q, where |X - 1| is cut off at 1."""
    (p_low, p_high), (q_low, q_high) = p.reach(1e-12), q.reach(1e-12)
    edges = np.linspace(min(p_low, q_low), max(p_high, q_high), 2000)
    p_mass, q_mass = p.masses(edges), q.masses(edges)
    excess = np.abs(p_mass - q_mass)
    return math.sqrt(float(np.sum(excess * np.minimum(excess / (q_mass + 1e-300), 1.0))))


def ratio_edges(p: Mixture, q: Mixture, step: float, tail: float) -> Array:
    """Returns edges of cells, -inf and inf the outer ones, in which log dP/dQ varies by about step.

    By more, where they would be too many.
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
    """Raises MemoryError where losses, or the number of `cells` at that `step`, are too large."""
    if largest_loss > _LARGEST_LOSS:
        raise MemoryError(f"losses up to {largest_loss:.0f} are beyond the range of the grid")
    if cells > MOST_CELLS:
        raise MemoryError(f"a grid step of {step} needs too many cells")


def solve_increasing(
    function: Callable[[Array], Array], values: Array, low: float, high: float
) -> Array:
    """Returns x in [low, high] with function(x) = `values`, for an increasing vectorised function.

    By regula falsi with bisections in between, until the function is met to a few roundings or the
    bracket ends at neighbouring doubles; a value out of reach gives the nearer end.
    """
    left, right = np.full(values.shape, low), np.full(values.shape, high)
    below, above = function(left) - values, function(right) - values
    x = np.where(below >= 0.0, left, right)
    close = np.maximum(1e-13, 4.0 * ROUNDING * np.abs(values))
    for k in range(200):
        middle = 0.5 * (left + right)
        unsolved = (below < -close) & (above > close) & (left < middle) & (middle < right)
        if not unsolved.any():
            break
        if k % 3 < 2:
            with np.errstate(invalid="ignore", divide="ignore"):
                secant = left - below * ((right - left) / (above - below))
            middle = np.where((left < secant) & (secant < right), secant, middle)
        x = np.where(unsolved, middle, x)
        excess = function(x) - values
        falls = unsolved & (excess < 0.0)
        rises = unsolved & (excess >= 0.0)
        left, below = np.where(falls, x, left), np.where(falls, excess, below)
        right, above = np.where(rises, x, right), np.where(rises, excess, above)
    return np.where(-below <= above, left, right)


def _floor(
    low: list[list[ComposedLoss]], high: list[ComposedLoss], lower: float, upper: float
) -> float:
    """Returns how much of delta may be the composition's certified error: each side at its end."""
    below = max(part.floor(lower) for pair in low for part in pair)
    return max(below, *(part.floor(upper) for part in high))


@dataclass(frozen=True)
class RepeatedProfile(abc.ABC):
    """The profile of `steps` equal releases, each bounded by likelihood ratios on a grid.

    The gap between the two ends has two sources: the grid, which is refined until it matters no
    more, and, for some mechanisms, a gap between what is proved and what a concrete pair of data
    sets shows.
    """

    noise_multiplier: float
    steps: int

    gap_note: ClassVar[str] = "the proof is not tight"
    """Why the two ends of the finest grids may still be apart."""

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("steps", self.steps)

    @abc.abstractmethod
    def ratios(self, side: Side, step: float, tail: float) -> Sequence[LikelihoodRatio]:
        """Returns laws of one release's X: 'upper', one that dominates; 'lower', ones dominated.

        Args:
          side: Which bounds.
          step: Grid step in log X.
          tail: Mass, of each of a release's laws, that may be cut off.
        """

    @abc.abstractmethod
    def deviation(self) -> float:
        """Returns about the deviation of one release's X under Q, to choose the grid by."""

    @abc.abstractmethod
    def ceiling(self) -> PrivacyProfile:
        """Returns a closed-form profile that is never below this one."""

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        return self._delta(check_epsilon(epsilon), 1e-12)

    def _delta(self, epsilon: float, tail: float) -> Bound:
        """Bounds delta where each law may be cut off at a mass of `tail`, or of less."""
        lower, upper = 0.0, self.ceiling().delta(epsilon).upper
        for low, high in self._grids(tail, None, epsilon):
            new_lower, new_upper = self._lower(low, epsilon), self._upper(high, epsilon)
            if min(new_upper, upper) < 1e4 * tail and tail > 1e-100:
                return self._delta(epsilon, 1e-12 * tail)
            settled = new_upper >= upper * (1.0 - 1e-3) and new_lower <= lower * (1.0 + 1e-3)
            lower, upper = max(lower, new_lower), min(upper, new_upper)
            if upper - lower <= 1e-3 * lower or upper <= _SMALLEST_MASS:
                return Bound(lower, upper)
            if settled:
                floored = _floor(low, high, epsilon, epsilon) > 0.1 * upper
                return Bound(lower, upper, note=_FLOOR if floored else self.gap_note)
        return Bound(lower, upper, note=_NO_FINER)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`.

        The grid is refined until neither end moves by more than about `tolerance`, or by 1e-4 of
        an epsilon above 10.
        """
        check_delta(delta)
        lower, upper = 0.0, self.ceiling().epsilon(delta).upper
        for low, high in self._grids(1e-6 * delta, delta, None):
            found = epsilon_from_delta(
                functools.partial(self._upper, high),
                functools.partial(self._lower, low),
                delta,
                resolution=1e-3 * tolerance,
            )
            # The gap is of second order in the step: what moved now, moves by a third as much, in
            # all, from here on.
            moved = max(upper - found.upper, found.lower - lower)
            lower, upper = max(lower, found.lower), min(upper, found.upper)
            wanted = wanted_width(tolerance, upper) * max(1.0, 0.1 * lower)
            if upper - lower <= wanted:
                return Bound(lower, upper)
            if moved <= 3.0 * wanted:
                floored = _floor(low, high, lower, upper) > 0.1 * delta
                return Bound(lower, upper, note=_FLOOR if floored else self.gap_note)
        return Bound(lower, upper, note=_NO_FINER)

    def _grids(
        self, tail: float, delta: float | None, epsilon: float | None
    ) -> Iterator[tuple[list[list[ComposedLoss]], list[ComposedLoss]]]:
        """Yields what `_composed` returns on finer and finer grids, from one that can be computed.

        Many releases of tiny deviation need a coarse one: the grid of a release is as fine as that
        of all of them.
        """
        resolution, computed = _COARSEST, False
        while _FINEST <= resolution <= _COARSEST_OF_ALL:
            try:
                sides = self._composed(resolution, tail, delta, epsilon)
            except (MemoryError, OverflowError):
                if computed:
                    return
                resolution *= 4.0
            else:
                yield sides
                computed = True
                resolution /= 2.0

    def _upper(self, parts: list[ComposedLoss], epsilon: float) -> float:
        """Reads the upper bound."""
        deltas = [part.delta(epsilon) for part in parts]
        return max(1.0 if math.isnan(delta) else delta for delta in deltas)

    def _lower(self, pairs: list[list[ComposedLoss]], epsilon: float) -> float:
        """Reads the largest of the lower bounds; contracted cells may have any edges."""
        deltas = [part.delta(epsilon) for parts in pairs for part in parts]
        return max(0.0 if math.isnan(delta) else delta for delta in deltas)

    def _composed(
        self, resolution: float, tail: float, delta: float | None, epsilon: float | None
    ) -> tuple[list[list[ComposedLoss]], list[ComposedLoss]]:
        """Returns, composed in both directions, the lower bounds and the upper one."""
        step = resolution * min(1.0, self.deviation())
        tail = max(tail / self.steps, 1e-300)

        def compose(ratio: LikelihoodRatio) -> list[ComposedLoss]:
            return list(compose_both(ratio, self.steps, delta=delta, epsilon=epsilon))

        low = [compose(ratio) for ratio in self.ratios("lower", step, tail)]
        (upper,) = self.ratios("upper", step, tail)
        return low, compose(upper)
