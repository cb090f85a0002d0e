"""Lower bounds: contractions of a likelihood ratio's law to conditional means of cells."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from accounting.algebra.cells import Array
from accounting.algebra.likelihood_ratio import (
    FLUSH,
    ROUNDING,
    UNDERFLOW,
    UNIT,
    LikelihoodRatio,
    ReleaseCells,
    convolve,
    every_other,
    grid_points,
    scaled,
)
from accounting.algebra.sums import Atoms

_FARTHEST = 300.0
"""Largest offset of an atom: e^_FARTHEST times UNIT is a float."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LowerRatio(LikelihoodRatio):
    """A contraction of the law of X: atoms near grid points. Its profile is a lower bound.

    Masses may be left out: less of P is less delta.

    >>> one = LowerRatio.gaussian(1.0, 0.01)
    >>> f"{one.delta(1.0):.6f}"  # 0.126936 is exact
    '0.126932'

    Attributes:
      offset: Distance of each atom from its grid point in log X, float64[atoms].
    """

    offset: Array

    centre: ClassVar[float] = 0.5

    @property
    def log_values(self) -> Array:
        """Log X of each atom, ascending up to the offsets."""
        return self.grid + self.offset

    @classmethod
    def _of_release(cls, step: float, cells: ReleaseCells, tail: float) -> LowerRatio:
        down = 1.0 - cells.drifts
        return cls(
            step=step, start=cells.first, q=down * cells.q, p=down * cells.p, offset=cells.offset,
            shift=cells.shift, tail=tail,
        ).flush()  # fmt: skip

    @classmethod
    def from_masses(
        cls, p: Array, q: Array, step: float, drift: float = 8.0 * ROUNDING
    ) -> LowerRatio:
        """Gathers the outcomes at the grid point nearest their ratio."""
        positive = (p > FLUSH) & (q > FLUSH)
        if not positive.any():  # an atom at X = 1 adds to no delta
            positive, p, q = np.ones(1, bool), *np.full((2, 1), FLUSH)
        p, q = p[positive], q[positive]
        index = np.rint((np.log(p) - np.log(q)) / step).astype(np.int64)
        start, stop = int(index.min()), int(index.max()) + 2
        masses = np.bincount(index - start, q, stop - start).astype(np.float64)
        means = np.bincount(index - start, p, stop - start).astype(np.float64)
        occupied = masses > 0.0
        offset = np.log(np.where(occupied, means, 1.0)) - np.log(np.where(occupied, masses, 1.0))
        offset = np.where(occupied, offset - np.arange(start, stop) * step, 0.0)
        shift = 2.0 * drift + 8.0 * ROUNDING * (700.0 + step * max(abs(start), abs(stop)))
        return cls(
            step=step, start=start, q=masses, p=means, offset=offset,
            drift=drift + p.size * ROUNDING, shift=shift + 2.0 * p.size * ROUNDING,
        )  # fmt: skip

    def product(self, other: LowerRatio) -> LowerRatio:
        """Returns X Y of independent X, Y, bounded from below.

        Pairs of one grid point are contracted to their mean.
        """
        self.check_grid_of(other)
        x, y = self._atoms(self.start), other._atoms(other.start)
        start, log_scale = x.start + y.start, self.log_scale + other.log_scale
        terms = min(self.q.size, other.q.size) + 8
        grid = grid_points(log_scale, start, self.q.size + other.q.size - 1, self.step)
        q, p, offset = _contracted(
            grid, (convolve(x.q, y.q), convolve(x.t, y.t)), (convolve(x.p, y.p), convolve(x.s, y.s))
        )
        # Offsets add up: their mean is left to the grid, which may lie anywhere.
        centre = float(np.dot(q, offset) / max(q.sum(), FLUSH))
        return replace(
            self,
            start=start,
            q=q,
            p=p,
            offset=offset - centre,
            log_scale=log_scale + centre,
            drift=self.drift + other.drift + terms * ROUNDING,
            # Each pair's value carries both errors, and that of a grid point of the result.
            shift=self.shift
            + other.shift
            + ROUNDING * (8.0 * (1.0 + abs(log_scale)) + 4.0 * terms),
            tail=max(self.tail, other.tail),
        ).trim()

    def mean_with(self, count: int, other: LowerRatio, others: int) -> LowerRatio:
        """Returns the weighted mean of X and Y, bounded from below.

        It is (count X + others Y) / (count + others); sums gather at grid points.
        """
        total, grid = count + others, self.sum_grid(count, other, others)
        sums = grid.pairs.lower(
            self._atoms(grid.starts[0], count), other._atoms(grid.starts[1], others)
        )
        q, p, s, t = (mass / UNIT / UNIT for mass in sums[1:])
        points = grid_points(grid.log_scale, sums.start, q.size, self.step)
        q, p, offset = _contracted(points, (q, t), (p / total, s / total))
        return replace(
            self, start=sums.start, q=q, p=p, offset=offset, log_scale=grid.log_scale,
            drift=grid.drift, shift=grid.shift + 4.0 * grid.terms * ROUNDING,
            tail=max(self.tail, other.tail),
        ).trim()  # fmt: skip

    def _atoms(self, start: int, weight: int = 1) -> Atoms:
        q, p, stretch = scaled(self.q), weight * scaled(self.p), np.exp(self.offset)
        return Atoms(start, q, p, p / stretch, q * stretch)

    def diluted(self, count: int, others: int, step: float) -> LowerRatio:
        """Returns the weighted mean of X and 1, on another grid.

        It is (count X + others) / (count + others), contracted to the new grid.
        """
        constant_share = others / (count + others)
        p = (1.0 - constant_share) * self.p + constant_share * self.q
        ratio = self.from_masses(p, self.q, step, self.drift + 8.0 * ROUNDING)
        return replace(ratio, shift=ratio.shift + self.shift, tail=self.tail).trim()

    def refined(self, factor: int) -> LowerRatio:
        """Returns the same atoms on a grid `factor` times finer, exactly."""
        offset = np.zeros((self.q.size - 1) * factor + 1)
        offset[::factor] = self.offset
        return replace(super().refined(factor), offset=offset)

    def trim(self) -> LowerRatio:
        """Contracts each tail with the last atom before it."""
        ratio = self.flush()
        below, above = ratio.kept_range()
        if below == 0 and above == ratio.q.size - 1:
            return ratio
        inside = slice(below, above + 1)
        q, p, offset = (x[inside].copy() for x in (ratio.q, ratio.p, ratio.offset))
        values, grid = ratio.log_values, ratio.grid[inside]
        if q[0] > FLUSH and grid[0] < 0.0:
            tail_mass = ratio.q[:below]
            mean = q[0] * math.exp(offset[0]) + np.dot(tail_mass, np.exp(values[:below] - grid[0]))
            q[0] += tail_mass.sum()
            offset[0] = math.log(mean) - math.log(q[0])
            p[0] = q[0] * math.exp(grid[0] + offset[0])
        if p[-1] > FLUSH and grid[-1] >= 0.0:
            tail_mass, over = ratio.p[above + 1 :], values[above + 1 :]
            mass = p[-1] * math.exp(-offset[-1]) + np.dot(tail_mass, np.exp(grid[-1] - over))
            p[-1] += tail_mass.sum()
            offset[-1] = math.log(p[-1]) - math.log(mass)
            q[-1] = p[-1] * math.exp(-grid[-1] - offset[-1])
        error = (ratio.q.size + 8) * ROUNDING
        errors = {"drift": ratio.drift + error, "shift": ratio.shift + 2.0 * error}
        return replace(ratio, start=ratio.start + below, q=q, p=p, offset=offset, **errors)

    def flush(self) -> LowerRatio:
        """Returns the law without masses under FLUSH."""
        few = self.few()
        if not few.any():
            return self
        q, p, offset = (np.where(few, 0.0, x) for x in (self.q, self.p, self.offset))
        return replace(self, q=q, p=p, offset=offset)

    def coarsened(self) -> LowerRatio:
        """Contracts pairs of atoms to a grid twice as coarse."""
        odd = self.start % 2
        size, start = (self.q.size + odd + 1) // 2 + 1, (self.start - odd) // 2
        (q_even, q_odd), (p_even, p_odd), (even, later) = (
            every_other(x, odd, size) for x in (self.q, self.p, self.offset)
        )
        later = later + self.step
        s = p_even * np.exp(-even) + p_odd * np.exp(-later)
        t = q_even * np.exp(even) + q_odd * np.exp(later)
        grid = grid_points(self.log_scale, start, size, 2.0 * self.step)
        q, p, offset = _contracted(grid, (q_even + q_odd, t), (p_even + p_odd, s))
        errors = {"drift": self.drift + 4.0 * ROUNDING, "shift": self.shift + 16.0 * ROUNDING}
        return replace(self, step=2.0 * self.step, start=start, q=q, p=p, offset=offset, **errors)

    def remove(self, epsilon: float) -> float:
        """Returns a lower bound on H_epsilon(P || Q)."""
        return self._hockey_stick(epsilon, self.p, self.log_values)

    def add(self, epsilon: float) -> float:
        """Returns a lower bound on H_epsilon(Q || P)."""
        return self._hockey_stick(epsilon, self.q, -self.log_values)

    def _hockey_stick(self, epsilon: float, mass: Array, loss: Array) -> float:
        error = self.value_error()
        above = loss > epsilon + error
        value = float(np.dot(mass[above], -np.expm1(epsilon + error - loss[above])))
        # The values' errors also are factors of the terms, and their sum is rounded.
        drift = self.drift + error + (mass.size + 8) * ROUNDING
        return max(0.0, value * (1.0 - drift) - UNDERFLOW)


def _contracted(
    grid: Array, below: tuple[Array, Array], above: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Returns q, p and offsets of cells that are contracted to their conditional means.

    Args:
      grid: g, log X of the cells' grid points: float64[cells].
      below: q and t = p e^{-g}, each right where g < 0: float64[cells].
      above: p and s = q e^g, each right where g >= 0: float64[cells].
    """
    high = grid >= 0.0
    mass, partner = np.where(high, above[0], below[0]), np.where(high, above[1], below[1])
    usable = (mass > FLUSH) & (partner > FLUSH) & (partner < math.inf)
    offset = np.log(np.where(usable, mass, 1.0)) - np.log(np.where(usable, partner, 1.0))
    # Cells whose mean is too far from their grid point for the next partners are left out.
    usable &= np.abs(offset) < _FARTHEST
    mass = np.where(usable, mass, 0.0)
    offset = np.where(usable, np.where(high, offset, -offset), 0.0)
    with np.errstate(under="ignore"):
        partner_mass = mass * np.exp(np.where(high, -1.0, 1.0) * (grid + offset))
    return np.where(high, partner_mass, mass), np.where(high, mass, partner_mass), offset
