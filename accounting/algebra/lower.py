"""Lower bounds: contractions of a likelihood ratio's law to conditional means of cells."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from accounting.algebra.cells import Array
from accounting.algebra.composition import (
    FAR,
    Floats,
    Loss,
    Window,
    sum_rounding,
    sums_from,
    tilted,
)
from accounting.algebra.likelihood_ratio import (
    FLUSH,
    ROUNDING,
    UNDERFLOW,
    UNIT,
    LikelihoodRatio,
    ReleaseCells,
    grid_points,
    scaled,
)
from accounting.algebra.sums import Atoms
from accounting.profile import Direction

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

    def mean_with(self, count: int, other: LowerRatio, others: int) -> LowerRatio:
        """Returns the weighted mean of X and Y, bounded from below.

        It is (count X + others Y) / (count + others); sums gather at grid points.
        """
        total, grid = count + others, self.sum_grid(count, other, others)
        sums = grid.pairs.lower(
            self._atoms(grid.starts[0], count / total),  # not the counts, which may overflow
            other._atoms(grid.starts[1], others / total),
        )
        q, p, s, t = (mass / UNIT / UNIT for mass in sums[1:])
        points = grid_points(grid.log_scale, sums.start, q.size, self.step)
        high = sums.start + np.arange(q.size) >= grid.pairs.middle
        q, p, offset = _contracted(points, high, (q, t), (p, s))
        return replace(
            self, start=sums.start, q=q, p=p, offset=offset, log_scale=grid.log_scale,
            drift=grid.drift, shift=grid.shift + 4.0 * grid.terms * ROUNDING,
            tail=max(self.tail, other.tail),
        ).trim()  # fmt: skip

    def _atoms(self, start: int, weight: float) -> Atoms:
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

    def loss(self, direction: Direction) -> LowerLoss:
        """Returns the loss law of one direction, as `UpperRatio.loss`."""
        if direction == "remove":
            masses, partners, base = self.p, self.p * np.exp(-self.offset), self.grid[0]
        else:
            masses, partners = self.q[::-1], (self.q * np.exp(self.offset))[::-1]
            base = -self.grid[-1]
        return LowerLoss(
            step=self.step, base=float(base), masses=masses, drift=self.drift, shift=self.shift,
            partners=partners,
        )  # fmt: skip

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
    grid: Array, high: NDArray[np.bool_], below: tuple[Array, Array], above: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Returns q, p and offsets of cells that are contracted to their conditional means.

    Args:
      grid: g, log X of the cells' grid points: float64[cells].
      high: True for g >= 0, approximately: bool[cells].
      below: q and t = p e^{-g}, valid in the cells that are not high: float64[cells].
      above: p and s = q e^g, valid in the high cells: float64[cells].
    """
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


@dataclass(frozen=True, eq=False, kw_only=True)
class LowerLoss(Loss):
    """A bound from below on the loss: `base` is the grid point of index 0.

    `partners` are masses under the second law times e^(base + k step), float64[atoms].
    """

    partners: Array

    def centred(self, tilt: float) -> LowerLoss:
        """Returns the law with tilted offsets of mean 0.

        So the sum of many indices is where the sum of the losses is.
        """
        weight = tilted(self.masses, np.arange(self.masses.size) * self.step * tilt)[0]
        mean = float(np.dot(weight, self.offsets()))
        return replace(self, base=self.base + mean, partners=self.partners * math.exp(mean))

    def offsets(self) -> Array:
        """Returns the distance of each loss from its grid point: float64[atoms]."""
        positive = (self.masses > 0.0) & (self.partners > 0.0)
        return np.log(np.where(positive, self.masses, 1.0)) - np.log(
            np.where(positive, self.partners, 1.0)
        )

    @staticmethod
    def compose(parts: Sequence[tuple[LowerLoss, int]], tilt: float) -> ComposedLower:
        """Bounds the loss of independent releases from below (see `Loss.compose`)."""
        laws = [(law.centred(tilt), count) for law, count in parts]
        masses = [(law.masses, count) for law, count in laws]
        partners = [(law.partners, count) for law, count in laws]
        window = Window.of_sums([masses, partners], laws[0][0].step, tilt)
        first, second = window.power(masses), window.power(partners)
        # In logarithms: at high tilts the units of the two powers are many e-folds different.
        unit = np.exp(np.minimum(first.log_unit - window.undone, 700.0))
        log_partner_unit = second.log_unit - window.undone
        partner_unit = np.exp(np.minimum(log_partner_unit, 700.0))
        # Where a partner is beyond the range of floats its mass is left out.
        within = log_partner_unit < 700.0
        below = np.maximum(first.entries * unit - first.error * unit, 0.0)
        above = (np.maximum(second.entries, 0.0) + second.error) * partner_unit
        return ComposedLower(
            *window.losses(laws, first.log_unit, max(first.rounding, second.rounding)),
            masses=np.where(within, below, 0.0),
            partners=np.where(within, above, 0.0),
        )


@dataclass(frozen=True, eq=False)
class ComposedLower:
    """A lower bound on the loss of a composition; fields as of `ComposedUpper`.

    `partners` is the mass under the second law times e^loss, bounded from above: float64[atoms].
    """

    loss: Floats
    drift: float
    shift: float
    masses: Floats
    partners: Floats

    def delta(self, epsilon: float) -> float:
        """Returns a lower bound on the hockey-stick divergence at `epsilon`."""
        moved, drift = (
            epsilon + self.shift * max(1.0, epsilon),
            sum_rounding(self.drift, self.loss.size),
        )
        first = int(np.searchsorted(self.loss, moved - 1.0))
        last = int(np.searchsorted(self.loss, moved + FAR))
        factor = np.exp(np.minimum(moved - self.loss[first:last], 2.0)) * (1.0 + drift)
        value = np.maximum(self.masses[first:last] - factor * self.partners[first:last], 0.0).sum()
        masses, partners = self._sums
        far = masses[last] - math.exp(1.0 - FAR) * partners[last]
        return max(0.0, float(value + max(0.0, far)) * (1.0 - drift) - UNDERFLOW)

    @functools.cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        return sums_from(self.masses), sums_from(self.partners)
