"""Likelihood ratios X = dP/dQ on a grid, in convex order: certified two-sided privacy profiles.

A spread of the true law of X bounds both directions' profile from above, a contraction from below.
Mixture, average and product keep that order, so that bounds may be inserted after every operation.
Proof and errors: docs/explanation/likelihood-ratios-in-convex-order.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import scipy

from accounting.algebra.cells import (
    Array,
    Spread,
    log_normal_cells,
    log_tilted_means,
    normal_drift,
    spread,
    up_weight,
)
from accounting.algebra.sums import RUNNING_SUM_ROUNDINGS, Atoms, Pairs

Side = Literal["upper", "lower"]

ROUNDING = 2.0**-53
FLUSH = 1e-300
"""No smaller mass is kept."""
UNDERFLOW = 1e-303
"""Bound on what subnormal masses may lose of their digits, in all: 1e7 copies of 1e6 atoms."""
TAIL = 1e-45
"""Mass (of Q below, of P above) that a tail may have when it is cut; the cut keeps the bound."""
_UNIT = 2.0**500
"""Masses are multiplied by it before their products are formed."""
_FARTHEST = 300.0
"""Largest offset of an atom: e^_FARTHEST times _UNIT is a float."""


@dataclass(frozen=True, eq=False)
class LikelihoodRatio:
    """A discrete law of X = dP/dQ that bounds a true one in convex order.

    Attributes:
      side: 'upper' if this law is a spread of the true one, 'lower' if it is a contraction.
      step: Distance of neighbouring atoms in log X; > 0.
      start: Index of the first atom; atom k has log X = log_scale + k step + offset.
      q: Q-mass of each atom, float64 [atoms].
      p: P-mass of each atom, = q X, float64 [atoms]; both, as either may underflow.
      offset: Distance of each atom from its grid point in log X, float64 [atoms]; 0 for 'upper'.
      log_scale: log X of index 0.
      zero: Q-mass at X = 0.
      infinity: P-mass at X = infinity (on which Q has none).
      drift: Bound on the relative floating-point error of each mass.
      shift: Bound on the floating-point error of each log X, besides that of `log_values`.
      tail: Mass that a tail may have when it is cut.
    """

    side: Side
    step: float
    start: int
    q: Array
    p: Array
    offset: Array
    log_scale: float = 0.0
    zero: float = 0.0
    infinity: float = 0.0
    drift: float = 0.0
    shift: float = 0.0
    tail: float = TAIL

    @property
    def grid(self) -> Array:
        """Log X of each atom's grid point, ascending."""
        return _grid(self.log_scale, self.start, self.q.size, self.step)

    @property
    def log_values(self) -> Array:
        """Log X of each atom, ascending up to the offsets."""
        return self.grid + self.offset

    @classmethod
    def gaussian(
        cls, noise_multiplier: float, step: float, side: Side, tail: float = TAIL
    ) -> LikelihoodRatio:
        """Discretises the ratio of one Gaussian release with sensitivity 1.

        X = exp(Y) with Y ~ N(-1/(2 s^2), 1/s^2) under Q and N(+1/(2 s^2), 1/s^2) under P, where
        s = `noise_multiplier`.
        """
        return cls.subsampled_gaussian(noise_multiplier, 1.0, step, side, tail)

    @classmethod
    def subsampled_gaussian(
        cls,
        noise_multiplier: float,
        sampling_prob: float,
        step: float,
        side: Side,
        tail: float = TAIL,
    ) -> LikelihoodRatio:
        """Discretises X = (1 - q) + q exp(Y): one step of Poisson sampling at q = `sampling_prob`.

        Beyond the values of Y that have mass <= `tail` the grid ends.
        """
        sigma, rate = noise_multiplier, sampling_prob
        reach = -scipy.special.ndtri(tail) / sigma
        low, high = -0.5 / sigma**2 - reach, 0.5 / sigma**2 + reach

        def log_ratio(y: float) -> float:
            return float(np.logaddexp(math.log1p(-rate), math.log(rate) + y)) if rate < 1.0 else y

        shift = 0.0 if side == "upper" else 0.5
        first = math.floor(log_ratio(low) / step) - 1
        last = math.ceil(log_ratio(high) / step) + 1
        # Cell k is [edge_k, edge_{k+1}) in log X; the first begins at X = 0, the last never ends.
        edges = (np.arange(first + 1, last + 1) - shift) * step
        if rate < 1.0:
            y = np.full(edges.shape, -math.inf)
            # Where e^edge is large, (e^edge - (1-q))/q is e^edge/q to all digits.
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                inside = np.expm1(edges) / rate + 1.0
                np.copyto(y, np.log(inside), where=inside > 0.0)
                np.copyto(y, edges - math.log(rate), where=edges > 40.0)
        else:
            y = edges
        y = np.concatenate([[-math.inf], y, [math.inf]])
        log_q = log_normal_cells(y, -0.5 / sigma**2, 1.0 / sigma)
        log_g = log_normal_cells(y, 0.5 / sigma**2, 1.0 / sigma)
        log_y, errors = log_tilted_means(y, log_q, log_g, 1.0 / sigma)
        drifts = normal_drift(y, -0.5 / sigma**2, 1.0 / sigma)
        drifts = np.maximum(drifts, normal_drift(y, 0.5 / sigma**2, 1.0 / sigma))
        log_p, log_mean = log_g, log_y
        if rate < 1.0:
            log_mean = np.logaddexp(math.log1p(-rate), math.log(rate) + log_y)
            log_p = np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_g)
            errors *= np.exp(math.log(rate) + log_y - log_mean)
        grid = (first + np.arange(log_q.size)) * step
        # Both masses come from the better known one: q below X = 1, p above.
        q = np.exp(np.where(grid < 0.0, log_q, log_p - log_mean))
        p = np.exp(np.where(grid < 0.0, log_q + log_mean, log_p))
        # Cells without an end are left to 0 and infinity where they have no more mass than a tail.
        ends = np.zeros(q.size, bool)
        ends[0], ends[-1] = q[0] <= 2.0 * tail, p[-1] <= 2.0 * tail
        zero, infinity = float(q[ends].sum()), float(p[ends].sum())
        q, p, log_mean, errors = (x[~ends] for x in (q, p, log_mean, errors))
        grid, drifts, first = grid[~ends], drifts[~ends], first + int(ends[0])
        # Edges and grid points are rounded.
        reach = float(np.abs(y[np.isfinite(y)]).max())
        errors[np.isneginf(log_q[~ends])] = 0.0
        shift = float(errors.max()) + 16.0 * ROUNDING * (reach + 8.0)
        offset = log_mean - grid
        if side == "lower":
            q, p = (1.0 - drifts) * q, (1.0 - drifts) * p
            return cls(side, step, first, q, p, offset, shift=shift, tail=tail).flush()
        # All of the first cell is above its grid point if X >= 1 - rate is; else it begins at 0.
        bounded = bool(ends[0]) or (rate < 1.0 and math.log1p(-rate) >= first * step)
        cells = spread(step, (1.0 + drifts) * p, (1.0 + drifts) * q, offset, bounded=bounded)
        cells = cells._replace(zero=zero + cells.zero, infinity=infinity + cells.infinity)
        return replace(cls.of_cells(step, first, cells, 8.0 * ROUNDING, shift), tail=tail).flush()

    @classmethod
    def of_cells(
        cls, step: float, first: int, cells: Spread, drift: float, shift: float
    ) -> LikelihoodRatio:
        """Returns an upper ratio: cells spread to the grid points from index `first` on."""
        atoms = first, cells.q, cells.p, np.zeros(cells.q.size), 0.0
        return cls("upper", step, *atoms, cells.zero, cells.infinity, drift, shift)

    @classmethod
    def from_masses(
        cls, p: Array, q: Array, step: float, side: Side, drift: float = 8.0 * ROUNDING
    ) -> LikelihoodRatio:
        """Returns the law of dP/dQ of two discrete laws on one set of outcomes.

        Args:
          p: Mass of each outcome under P, >= 0, float64 [outcomes].
          q: Mass of each outcome under Q, >= 0, float64 [outcomes].
          step: Grid step in log X.
          side: Which bound to return. As 'lower', masses may be left out: less of p is less delta.
          drift: Bound on the relative error of the masses.
        """
        upper = side == "upper"
        both = (p > FLUSH) & (q > FLUSH)
        zero, infinity = float(q[~both].sum()), float(p[~both].sum())
        if not both.any():  # an atom at X = 1 adds to no delta
            both, p, q, zero, infinity = np.ones(1, bool), *np.full((2, 1), FLUSH), zero, infinity
        p, q = p[both], q[both]
        position = (np.log(p) - np.log(q)) / step
        index = (np.floor(position) if upper else np.rint(position)).astype(np.int64)
        start = int(index.min())
        bins, size = index - start, int(index.max()) - start + 2
        grid = (start + np.arange(size)) * step
        shift = 2.0 * drift + 8.0 * ROUNDING * (700.0 + float(np.abs(grid).max()))
        if not upper:
            masses = np.bincount(bins, q, size).astype(np.float64)
            means = np.bincount(bins, p, size).astype(np.float64)
            seen = masses > 0.0
            ratio = np.where(seen, means, 1.0), np.where(seen, masses, 1.0)
            offset = np.where(seen, np.log(ratio[0]) - np.log(ratio[1]) - grid, 0.0)
            drift += p.size * ROUNDING
            shift += 2.0 * p.size * ROUNDING
            return cls(side, step, start, masses, means, offset, drift=drift, shift=shift)
        share = up_weight((position - index) * step, step)
        stretch = 1.0 + share * math.expm1(step)
        masses = np.bincount(bins, q * (1.0 - share), size).astype(np.float64)
        masses += np.bincount(bins + 1, q * share, size)
        means = np.bincount(bins, p * (1.0 - share) / stretch, size).astype(np.float64)
        means += np.bincount(bins + 1, p * share * math.exp(step) / stretch, size)
        drift += (p.size + 8) * ROUNDING
        cells = Spread(masses, means, zero, infinity)
        return cls.of_cells(step, start, cells, drift, shift).flush()

    def averages(self, counts: Sequence[int], steps: Sequence[float]) -> list[LikelihoodRatio]:
        """Returns (X_1 + ... + X_k)/k of independent copies for several counts k.

        Args:
          counts: Numbers k of copies, each >= 1.
          steps: Grid step after 0, 1, 2, ... doublings, each the one before divided by a power of
            2. As sums concentrate, finer grids cost no more.
        """
        totals: list[tuple[LikelihoodRatio, int] | None] = [None] * len(counts)
        doubled, doubled_count, largest = self, 1, max(counts)
        for level in range(largest.bit_length()):
            if level:
                doubled = mean_of_two(doubled, doubled_count, doubled, doubled_count)
                doubled_count *= 2
            doubled = doubled.refined(round(doubled.step / steps[level]))
            for i, count in enumerate(counts):
                if not count & doubled_count:
                    continue
                if (before := totals[i]) is None:
                    totals[i] = doubled, doubled_count
                    continue
                total = before[0].refined(round(before[0].step / doubled.step))
                total = mean_of_two(total, before[1], doubled, doubled_count)
                totals[i] = total, before[1] + doubled_count
        return [total[0] for total in totals if total is not None]

    def average(self, count: int, steps: Sequence[float] | None = None) -> LikelihoodRatio:
        """Returns (X_1 + ... + X_count)/count of independent copies: one of `count` at random.

        Args:
          count: The number of copies, >= 1.
          steps: As for `averages`; by default the step stays as it is.
        """
        return self.averages([count], steps or [self.step] * count.bit_length())[0]

    def diluted(self, count: int, others: int, step: float) -> LikelihoodRatio:
        """Returns (count X + others) / (count + others), spread or contracted to another grid.

        Args:
          count: Weight of X, >= 1.
          others: Weight of the constant 1, >= 1.
          step: Grid step of the result, in log X.
        """
        rest = others / (count + others)
        q, p = np.append(self.q, self.zero), np.append(self.p, 0.0)
        p = (1.0 - rest) * p + rest * q
        ratio = self.from_masses(p, q, step, self.side, self.drift + 8.0 * ROUNDING)
        infinity = ratio.infinity + (1.0 - rest) * self.infinity
        shift, tail = ratio.shift + self.shift, self.tail
        return replace(ratio, infinity=infinity, shift=shift, tail=tail).trim()

    def product(self, other: LikelihoodRatio) -> LikelihoodRatio:
        """Returns X Y of independent X, Y on grids of one step: the composition of two releases.

        A direct convolution over the indices, not by FFT, so that tails keep their relative
        accuracy.

        Raises:
          ValueError: If the two are of different sides or steps.
        """
        if self.side != other.side or not math.isclose(self.step, other.step, rel_tol=1e-12):
            raise ValueError(
                "a product needs two ratios of one side and one step, got "
                f"({self.side}, {self.step}) and ({other.side}, {other.step})"
            )
        x, y = self._scaled(), other._scaled()
        log_scale = self.log_scale + other.log_scale
        start = self.start + other.start
        q, p = _convolve(x.q, y.q), _convolve(x.p, y.p)
        terms = min(self.q.size, other.q.size) + 8
        # P-mass is infinite where either factor is; Q-mass is at 0 where either factor is.
        infinity = self.infinity + other.infinity - self.infinity * other.infinity
        zero = self.zero + other.zero - self.zero * other.zero
        # Each pair's value carries both errors, and that of a grid point of the result.
        shift = self.shift + other.shift + 8.0 * ROUNDING * (1.0 + abs(log_scale))
        if self.side == "upper":
            infinity, zero = infinity + x.partners + y.partners, zero + x.partners + y.partners
            offset = np.zeros(q.size)
        else:
            p_partner, q_partner = _convolve(x.s, y.s), _convolve(x.t, y.t)
            grid = _grid(log_scale, start, q.size, self.step)
            q, p, offset = _contracted(grid, (q, q_partner), (p, p_partner))
            shift += 4.0 * terms * ROUNDING
            # Offsets add up: their mean is left to the grid, which may lie anywhere.
            centre = float(np.dot(q, offset) / max(q.sum(), FLUSH))
            offset, log_scale = offset - centre, log_scale + centre
        drift = self.drift + other.drift + terms * ROUNDING
        ratio = replace(self, start=start, q=q, p=p, offset=offset, log_scale=log_scale, zero=zero)
        tail = max(self.tail, other.tail)
        return replace(ratio, infinity=infinity, drift=drift, shift=shift, tail=tail).trim()

    def power(self, count: int) -> LikelihoodRatio:
        """Returns the product of `count` independent copies: `count` releases, composed.

        The grid is made coarser by 2 wherever the deviation of log X has doubled.
        """
        total: LikelihoodRatio | None = None
        square, remaining = self, count
        while True:
            if remaining & 1:
                total = square if total is None else total.product(square)
            remaining >>= 1
            if not remaining:
                assert total is not None
                return total
            square = square.product(square)
            if square.q.size > max(1.8 * self.q.size, 64) and square.step < 200.0:
                square = square.coarsened()
                total = total.coarsened() if total is not None else None

    def trim(self) -> LikelihoodRatio:
        """Cuts off tails of mass <= `tail` (of Q below, of P above), keeping the bound."""
        ratio = self.flush()
        below = int(np.searchsorted(np.cumsum(ratio.q), self.tail))
        above = ratio.p.size - 1 - int(np.searchsorted(np.cumsum(ratio.p[::-1]), self.tail))
        below = min(below, ratio.q.size - 1)
        above = max(above, below)
        if below == 0 and above == ratio.q.size - 1:
            return ratio
        inside, under, over = slice(below, above + 1), slice(below), slice(above + 1, None)
        q, p, offset = ratio.q[inside].copy(), ratio.p[inside].copy(), ratio.offset[inside].copy()
        start = ratio.start + below
        values, grid = ratio.log_values, ratio.grid[inside]
        drift = ratio.drift + (ratio.q.size + 8) * ROUNDING
        if self.side == "lower":
            shift = ratio.shift + 2.0 * (ratio.q.size + 8) * ROUNDING
            if q[0] > FLUSH and grid[0] < 0.0:
                part = ratio.q[under]
                mean = q[0] * math.exp(offset[0]) + np.dot(part, np.exp(values[under] - grid[0]))
                q[0] += part.sum()
                offset[0] = math.log(mean) - math.log(q[0])
                p[0] = q[0] * math.exp(grid[0] + offset[0])
            if p[-1] > FLUSH and grid[-1] >= 0.0:
                part = ratio.p[over]
                mass = p[-1] * math.exp(-offset[-1]) + np.dot(part, np.exp(grid[-1] - values[over]))
                p[-1] += part.sum()
                offset[-1] = math.log(p[-1]) - math.log(mass)
                q[-1] = p[-1] * math.exp(-grid[-1] - offset[-1])
            return replace(ratio, start=start, q=q, p=p, offset=offset, drift=drift, shift=shift)
        steps_below = np.arange(below, 0, -1) * ratio.step
        steps_above = np.arange(1, ratio.q.size - above) * ratio.step
        q[0] += np.dot(ratio.q[under], np.exp(-steps_below))
        p[0] += ratio.p[under].sum()
        zero = ratio.zero + np.dot(ratio.q[under], -np.expm1(-steps_below))
        q[-1] += ratio.q[over].sum()
        p[-1] += np.dot(ratio.p[over], np.exp(-steps_above))
        infinity = ratio.infinity + np.dot(ratio.p[over], -np.expm1(-steps_above))
        ratio = replace(ratio, zero=float(zero), infinity=float(infinity), drift=drift)
        return replace(ratio, start=start, q=q, p=p, offset=offset)

    def flush(self) -> LikelihoodRatio:
        """Returns the ratio without masses under FLUSH, and with their bound kept."""
        few = np.where(self.grid < 0.0, self.q, self.p) < FLUSH
        few &= (self.q > 0.0) | (self.p > 0.0)
        if not few.any():
            return self
        q, p, offset = (np.where(few, 0.0, x) for x in (self.q, self.p, self.offset))
        if self.side == "lower":
            return replace(self, q=q, p=p, offset=offset)
        zero, infinity = self.zero + self.q[few].sum(), self.infinity + self.p[few].sum()
        return replace(self, q=q, p=p, zero=float(zero), infinity=float(infinity))

    def remove(self, epsilon: float) -> float:
        """Bounds H_epsilon(P || Q) = E[(X - e^epsilon)_+] + (1 - E[X]) on this ratio's side."""
        return self._hockey_stick(epsilon, self.infinity, self.p, self.log_values)

    def add(self, epsilon: float) -> float:
        """Bounds H_epsilon(Q || P) = E[(1 - e^epsilon X)_+] on this ratio's side."""
        return self._hockey_stick(epsilon, self.zero, self.q, -self.log_values)

    def delta(self, epsilon: float) -> float:
        """Bounds max(H_epsilon(P || Q), H_epsilon(Q || P)) on this ratio's side."""
        return max(self.remove(epsilon), self.add(epsilon))

    def _hockey_stick(self, epsilon: float, surely: float, mass: Array, loss: Array) -> float:
        """Bounds `surely` + sum of mass (1 - e^{epsilon - loss})_+, with all errors outward."""
        shift = self.shift + 8.0 * ROUNDING * (1.0 + float(np.abs(loss).max()))
        moved = epsilon - shift if self.side == "upper" else epsilon + shift
        above = loss > moved
        value = surely + float(np.dot(mass[above], -np.expm1(moved - loss[above])))
        # The values' errors also are factors of what is paid, and the sum's terms are rounded.
        drift = self.drift + shift + (mass.size + 8) * ROUNDING
        if self.side == "upper":
            return min(1.0, value * math.exp(2.0 * drift) + UNDERFLOW)
        return max(0.0, value * (1.0 - drift) - UNDERFLOW)

    def _scaled(self) -> _Factor:
        q, p = (np.where(x < FLUSH, 0.0, x) for x in (self.q, self.p))
        lost = float(self.q[q == 0.0].sum() + self.p[p == 0.0].sum())
        stretch = np.exp(self.offset)
        q, p = q * _UNIT, p * _UNIT
        return _Factor(q, p, p / stretch, q * stretch, 2.0 * lost)

    def coarsened(self) -> LikelihoodRatio:
        """Returns the ratio on a grid twice as coarse: odd atoms are split, or pairs contracted."""
        odd = self.start % 2
        size = (self.q.size + odd + 1) // 2 + 1
        start = (self.start - odd) // 2

        def halves(x: Array) -> tuple[Array, Array]:
            padded = np.zeros(2 * size)
            padded[odd : odd + x.size] = x
            return padded[::2], padded[1::2]

        (q_even, q_odd), (p_even, p_odd) = halves(self.q), halves(self.p)
        drift = self.drift + 4.0 * ROUNDING
        if self.side == "upper":
            share = 1.0 / (math.exp(self.step) + 1.0)
            q, p = q_even.copy(), p_even.copy()
            q += (1.0 - share) * q_odd
            p += (1.0 - share) * math.exp(-self.step) * p_odd
            q[1:] += share * q_odd[:-1]
            p[1:] += share * math.exp(self.step) * p_odd[:-1]
            coarse = replace(self, step=2 * self.step, start=start, drift=drift)
            return replace(coarse, q=q, p=p, offset=np.zeros(size))
        offset_even, offset_odd = halves(self.offset)
        offset_odd = offset_odd + self.step
        q, p = q_even + q_odd, p_even + p_odd
        s = p_even * np.exp(-offset_even) + p_odd * np.exp(-offset_odd)
        t = q_even * np.exp(offset_even) + q_odd * np.exp(offset_odd)
        grid = _grid(self.log_scale, start, size, 2.0 * self.step)
        q, p, offset = _contracted(grid, (q, t), (p, s))
        coarse = replace(self, step=2 * self.step, start=start, q=q, p=p, offset=offset)
        return replace(coarse, drift=drift, shift=self.shift + 16.0 * ROUNDING)

    def refined(self, factor: int) -> LikelihoodRatio:
        """Returns the same atoms on a grid `factor` times finer: exact."""
        if factor == 1:
            return self
        size = (self.q.size - 1) * factor + 1
        q, p, offset = np.zeros(size), np.zeros(size), np.zeros(size)
        q[::factor], p[::factor], offset[::factor] = self.q, self.p, self.offset
        fine = replace(self, step=self.step / factor, start=self.start * factor)
        return replace(fine, q=q, p=p, offset=offset)


class _Factor(NamedTuple):
    """The atoms of one factor of a product or a sum, in units of 1/_UNIT: float64[atoms] each.

    With g an atom's grid point in log X. Masses under FLUSH are 0.
    """

    q: Array
    p: Array
    s: Array
    """q e^g, as far as p is known."""
    t: Array
    """p e^{-g}, as far as q is known."""
    partners: float
    """Bounds what pairs with the masses that are taken for 0 have, under either law."""


def _grid(log_scale: float, start: int, size: int, step: float) -> Array:
    """Returns log X of the grid points from index `start` on: float64[size]."""
    return log_scale + (start + np.arange(size, dtype=np.float64)) * step


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
    kept = (mass > FLUSH) & (partner > FLUSH) & (partner < math.inf)
    offset = np.log(np.where(kept, mass, 1.0)) - np.log(np.where(kept, partner, 1.0))
    # Cells whose mean is too far from their grid point for the next partners are left out.
    kept &= np.abs(offset) < _FARTHEST
    mass = np.where(kept, mass, 0.0)
    offset = np.where(kept, np.where(high, offset, -offset), 0.0)
    with np.errstate(under="ignore"):
        other = mass * np.exp(np.where(high, -1.0, 1.0) * (grid + offset))
    return np.where(high, other, mass), np.where(high, mass, other), offset


def _convolve(x: Array, y: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # see `_contracted`
        return np.convolve(x, y) / _UNIT / _UNIT


def mean_of_two(
    a: LikelihoodRatio, a_count: int, b: LikelihoodRatio, b_count: int
) -> LikelihoodRatio:
    """Returns the mean of a_count + b_count copies; sums (value times count) have one grid."""
    count = a_count + b_count
    step = a.step
    # On the scale of sums both have the grid log_scale + log(count) + k step.
    scale = a.log_scale + math.log(a_count)
    b_start = b.start + round((b.log_scale + math.log(b_count) - scale) / step)
    log_scale = scale - math.log(count)
    x, y = a._scaled(), b._scaled()
    first = Atoms(a.start, x.q, x.p * a_count, x.s * a_count, x.t)
    second = Atoms(b_start, y.q, y.p * b_count, y.s * b_count, y.t)
    pairs = Pairs(step, symmetric=a is b)
    # An atom is summed over at most all d, twice (splits), by a running sum or one by one.
    terms = a.q.size + b.q.size + RUNNING_SUM_ROUNDINGS + 16
    drift = a.drift + b.drift + 2.0 * terms * ROUNDING
    shift = max(a.shift, b.shift) + 32.0 * ROUNDING * (1.0 + abs(scale) + math.log(count))
    if a.side == "lower":
        shift += 4.0 * terms * ROUNDING
        start, *masses = pairs.lower(first, second)
        q, p, s, t = (mass / _UNIT / _UNIT for mass in masses)
        grid = _grid(log_scale, start, q.size, step)
        q, p, offset = _contracted(grid, (q, t), (p / count, s / count))
        zero = infinity = 0.0
    else:
        start, *masses = pairs.upper(first, second)
        q, p = (mass / _UNIT / _UNIT for mass in masses)
        p /= count
        offset = np.zeros(q.size)
        zero = a.zero * b.zero + x.partners + y.partners
        infinity = (a_count * a.infinity + b_count * b.infinity) / count + x.partners + y.partners
        most = int(np.argmax(q))
        for mass, other in ((a.zero, second), (b.zero, first)):
            # Of pairs with an atom at 0, those below the window are spread to 0 and to the atom of
            # most mass: at the window's first one they would hold off its being trimmed.
            q_pairs = mass / _UNIT * other.q
            under = min(max(0, start - other.start), other.q.size)
            here = slice(other.start + under - start, max(other.stop - start, 0))
            q[here] += q_pairs[under:]
            p[here] += mass / _UNIT / count * other.p[under:]
            up = np.exp((other.start - start - most + np.arange(under)) * step)
            q[most] += np.dot(q_pairs[:under], up)
            p[most] += mass / _UNIT / count * other.p[:under].sum()
            zero += np.dot(q_pairs[:under], 1.0 - up)
    ratio = replace(a, log_scale=log_scale, start=start, q=q, p=p, offset=offset, zero=float(zero))
    tail = max(a.tail, b.tail)
    return replace(ratio, infinity=infinity, drift=drift, shift=shift, tail=tail).trim()
