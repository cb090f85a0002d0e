"""Likelihood ratios X = dP/dQ on a grid, bounded in convex order: certified privacy profiles.

A spread of the true law of X (`UpperRatio`) bounds both directions' profile from above, a
contraction (`LowerRatio`) from below. Mixtures, averages and products keep that order.
Proof and errors: docs/explanation/likelihood-ratios-in-convex-order.md.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from accounting.algebra.cells import (
    Array,
    log_normal_cells,
    log_tilted_means,
    normal_drift,
)
from accounting.algebra.sums import RUNNING_SUM_ROUNDINGS, Pairs

ROUNDING = 2.0**-53
FLUSH = 1e-300
"""Smallest mass of an atom."""
UNDERFLOW = 1e-303
"""Bound on the digits that subnormal masses lose, in all: 1e7 copies of 1e6 atoms."""
TAIL = 1e-45
"""Default mass of a tail (of Q below, of P above) that may be cut; the cut keeps the bound."""
UNIT = 2.0**500
"""Factor of masses whose products are formed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LikelihoodRatio(abc.ABC):
    """A discrete law of X = dP/dQ that bounds a true one in convex order.

    Attributes:
      step: Distance of neighbouring grid points in log X; > 0.
      start: Index of the first atom; atom k has the grid point log X = log_scale + k step.
      q: Q-mass of each atom, float64[atoms].
      p: P-mass of each atom, = q X, float64[atoms]; both, as either may underflow.
      log_scale: log X of index 0.
      drift: Bound on the relative floating-point error of each mass.
      shift: Bound on the error of each log X, besides the rounding of `log_values`.
      tail: Mass of a tail that may be cut.
    """

    step: float
    start: int
    q: Array
    p: Array
    log_scale: float = 0.0
    drift: float = 0.0
    shift: float = 0.0
    tail: float = TAIL

    centre: ClassVar[float]
    """Place of a grid point in its cell: 0 where the cell begins at it, 0.5 in its middle."""

    @property
    def grid(self) -> Array:
        """Log X of each atom's grid point, ascending."""
        return grid_points(self.log_scale, self.start, self.q.size, self.step)

    @property
    @abc.abstractmethod
    def log_values(self) -> Array:
        """Log X of each atom: float64[atoms]."""

    @classmethod
    def gaussian(
        cls: type[Ratio], noise_multiplier: float, step: float, tail: float = TAIL
    ) -> Ratio:
        """Returns the discretised ratio of one Gaussian release.

        X = exp(Y) with Y ~ N(-1/(2 s^2), 1/s^2) under Q and N(+1/(2 s^2), 1/s^2) under P, where
        s = `noise_multiplier`.

        Args:
          noise_multiplier: s, at sensitivity 1.
          step: Grid step in log X.
          tail: Largest mass of the values of Y beyond either end of the grid.
        """
        return cls.subsampled_gaussian(noise_multiplier, 1.0, step, tail)

    @classmethod
    def subsampled_gaussian(
        cls: type[Ratio],
        noise_multiplier: float,
        sampling_prob: float,
        step: float,
        tail: float = TAIL,
    ) -> Ratio:
        """Returns the discretised ratio of one step of Poisson sampling.

        X = (1 - q) + q exp(Y), q = `sampling_prob` in (0, 1]; Y, step and tail as in `gaussian`.
        """
        cells = _cells_of_release(noise_multiplier, sampling_prob, step, cls.centre, tail)
        return cls._of_release(step, cells, tail)

    @classmethod
    @abc.abstractmethod
    def _of_release(cls: type[Ratio], step: float, cells: ReleaseCells, tail: float) -> Ratio: ...

    @classmethod
    @abc.abstractmethod
    def from_masses(
        cls: type[Ratio], p: Array, q: Array, step: float, drift: float = 8.0 * ROUNDING
    ) -> Ratio:
        """Returns the law of dP/dQ of two discrete laws.

        Args:
          p: Mass of each outcome under P, >= 0, float64[outcomes].
          q: Mass of each outcome under Q, >= 0, float64[outcomes].
          step: Grid step in log X.
          drift: Bound on the relative error of the masses.
        """

    @abc.abstractmethod
    def mean_with(self: Ratio, count: int, other: Ratio, others: int) -> Ratio:
        """Returns the weighted mean of independent X and Y.

        It is (count X + others Y) / (count + others), with Y the law `other`, on the same grid.
        """

    @abc.abstractmethod
    def diluted(self: Ratio, count: int, others: int, step: float) -> Ratio:
        """Returns the weighted mean of X and 1, on another grid.

        It is (count X + others) / (count + others), count >= 1; `step` is the result's.
        """

    @abc.abstractmethod
    def trim(self: Ratio) -> Ratio:
        """Cuts off tails of mass <= `tail`, keeping the bound.

        The tail below is counted under Q, the tail above under P.
        """

    @abc.abstractmethod
    def remove(self, epsilon: float) -> float:
        """Bounds H_epsilon(P || Q) = E[(X - e^epsilon)_+] + (1 - E[X]) on this law's side."""

    @abc.abstractmethod
    def add(self, epsilon: float) -> float:
        """Bounds H_epsilon(Q || P) = E[(1 - e^epsilon X)_+] on this law's side."""

    def delta(self, epsilon: float) -> float:
        """Bounds max(H_epsilon(P || Q), H_epsilon(Q || P)) on this law's side."""
        return max(self.remove(epsilon), self.add(epsilon))

    def averages(self: Ratio, counts: Sequence[int], steps: Sequence[float]) -> list[Ratio]:
        """Returns the average of k independent copies, for several k.

        Args:
          counts: Numbers k of copies, each >= 1.
          steps: Grid step after 0, 1, ... doublings, each the one before divided by a power of 2.
        """
        totals: list[tuple[Ratio, int] | None] = [None] * len(counts)
        doubled, doubled_count = self, 1
        for level in range(max(counts).bit_length()):
            if level:
                doubled = doubled.mean_with(doubled_count, doubled, doubled_count)
                doubled_count *= 2
            doubled = doubled.refined(round(doubled.step / steps[level]))
            for i, count in enumerate(counts):
                if not count & doubled_count:
                    continue
                if (subtotal := totals[i]) is None:
                    totals[i] = doubled, doubled_count
                    continue
                total = subtotal[0].refined(round(subtotal[0].step / doubled.step))
                total = total.mean_with(subtotal[1], doubled, doubled_count)
                totals[i] = total, subtotal[1] + doubled_count
        return [total[0] for total in totals if total is not None]

    def average(self: Ratio, count: int, steps: Sequence[float] | None = None) -> Ratio:
        """Returns the average of `count` independent copies of X.

        It is the ratio of one release at random among `count`; `steps` as in `averages`, by
        default unchanged.
        """
        return self.averages([count], steps or [self.step] * count.bit_length())[0]

    def refined(self: Ratio, factor: int) -> Ratio:
        """Returns the same atoms on a grid `factor` times finer, exactly."""
        if factor == 1:
            return self
        q, p = (_spaced(x, factor) for x in (self.q, self.p))
        return replace(self, step=self.step / factor, start=self.start * factor, q=q, p=p)

    def kept_range(self) -> tuple[int, int]:
        """Returns the first and last atom between tails of mass <= `tail`."""
        below = int(np.searchsorted(np.cumsum(self.q), self.tail))
        above = self.p.size - 1 - int(np.searchsorted(np.cumsum(self.p[::-1]), self.tail))
        below = min(below, self.q.size - 1)
        return below, max(above, below)

    def few(self) -> NDArray[np.bool_]:
        """Returns which atoms have a positive mass under FLUSH: bool[atoms]."""
        few = np.where(self.grid < 0.0, self.q, self.p) < FLUSH
        return few & ((self.q > 0.0) | (self.p > 0.0))

    def value_error(self) -> float:
        """Bounds the error of each of `log_values`, rounding included."""
        return self.shift + 8.0 * ROUNDING * (1.0 + float(np.abs(self.log_values).max()))

    def sum_grid(self: Ratio, count: int, other: Ratio, others: int) -> SumGrid:
        """Returns the grid of `mean_with`'s weighted sum, and its errors."""
        total, scale = count + others, self.log_scale + math.log(count)
        offset = round((other.log_scale + math.log(others) - scale) / self.step)
        # An atom is summed over at most all distances, twice, by a running sum or one by one.
        terms = self.q.size + other.q.size + RUNNING_SUM_ROUNDINGS + 16
        return SumGrid(
            pairs=Pairs(self.step, self is other, math.ceil((math.log(total) - scale) / self.step)),
            starts=(self.start, other.start + offset),
            log_scale=scale - math.log(total),
            terms=terms,
            drift=self.drift + other.drift + 2.0 * terms * ROUNDING,
            shift=max(self.shift, other.shift)
            + 32.0 * ROUNDING * (1.0 + abs(scale) + math.log(total)),
        )


Ratio = TypeVar("Ratio", bound=LikelihoodRatio)


class SumGrid(NamedTuple):
    """The grid on which two laws of a mean are added up."""

    pairs: Pairs
    starts: tuple[int, int]
    """Index of the first atom of each law, on the scale of the sum."""
    log_scale: float
    """Log X of index 0, on the scale of the mean."""
    terms: int
    """Number of roundings of a sum of masses."""
    drift: float
    """Bound on the relative error of the masses."""
    shift: float
    """Bound on the error of the values."""


class ReleaseCells(NamedTuple):
    """Cells of X = (1 - q) + q e^Y of one release, without ends of no more mass than a tail."""

    first: int
    """Index of the first cell."""
    q: Array
    """Q-mass: float64[cells]."""
    p: Array
    """P-mass: float64[cells]."""
    offset: Array
    """Log of the mean of X less the grid point's: float64[cells]."""
    drifts: Array
    """Bounds on the relative errors of the masses: float64[cells]."""
    shift: float
    """Bound on the errors of the means' logarithms."""
    zero: float
    """Q-mass of the ends that were left out."""
    infinity: float
    """P-mass of the ends that were left out."""
    bounded: bool
    """True if all of the first cell lies above its grid point; else it begins at X = 0."""


def _cells_of_release(
    sigma: float, rate: float, step: float, centre: float, tail: float
) -> ReleaseCells:
    reach = -scipy.special.ndtri(tail) / sigma
    low, high = -0.5 / sigma**2 - reach, 0.5 / sigma**2 + reach
    log_rest = math.log1p(-rate) if rate < 1.0 else -math.inf

    def log_ratio(y: float) -> float:
        return float(np.logaddexp(log_rest, math.log(rate) + y))

    first = math.floor(log_ratio(low) / step) - 1
    last = math.ceil(log_ratio(high) / step) + 1
    # Cell k is [edge_k, edge_{k+1}) in log X; the first begins at X = 0, the last never ends.
    edges = (np.arange(first + 1, last + 1) - centre) * step
    y = _log_likelihoods(edges.astype(np.float64), rate)
    y = np.concatenate([[-math.inf], y, [math.inf]])
    half, deviation = 0.5 / sigma**2, 1.0 / sigma
    log_q, log_g = (log_normal_cells(y, mean, deviation) for mean in (-half, half))
    log_y, errors = log_tilted_means(y, log_q, log_g, deviation)
    drifts = np.maximum(*(normal_drift(y, mean, deviation) for mean in (-half, half)))
    log_p, log_mean = log_g, log_y
    if rate < 1.0:
        log_mean = np.logaddexp(log_rest, math.log(rate) + log_y)
        log_p = np.logaddexp(log_rest + log_q, math.log(rate) + log_g)
        errors *= np.exp(math.log(rate) + log_y - log_mean)
    grid = (first + np.arange(log_q.size)) * step
    # Both masses come from the better known one: q below X = 1, p above.
    q = np.exp(np.where(grid < 0.0, log_q, log_p - log_mean))
    p = np.exp(np.where(grid < 0.0, log_q + log_mean, log_p))
    kept = np.ones(q.size, bool)
    kept[0], kept[-1] = q[0] > 2.0 * tail, p[-1] > 2.0 * tail
    errors[np.isneginf(log_q)] = 0.0
    first += int(not kept[0])
    return ReleaseCells(
        first=first,
        q=q[kept],
        p=p[kept],
        offset=(log_mean - grid)[kept],
        drifts=drifts[kept],
        # Edges and grid points are rounded.
        shift=float(errors[kept].max())
        + 16.0 * ROUNDING * (float(np.abs(y[np.isfinite(y)]).max()) + 8.0),
        zero=float(q[~kept].sum()),
        infinity=float(p[~kept].sum()),
        bounded=not kept[0] or log_rest >= first * step,
    )


def _log_likelihoods(log_x: Array, rate: float) -> Array:
    """Returns y of each X = (1 - rate) + rate e^y, or -inf where X is smaller: float64[points]."""
    if rate == 1.0:
        return log_x
    y = np.full(log_x.shape, -math.inf)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        inside = np.expm1(log_x) / rate + 1.0
        np.copyto(y, np.log(inside), where=inside > 0.0)
        # Where e^log_x is large, (e^log_x - (1 - q))/q is e^log_x/q to all digits.
        np.copyto(y, log_x - math.log(rate), where=log_x > 40.0)
    return y


def scaled(mass: Array) -> Array:
    """Returns masses times UNIT; those under FLUSH are 0: float64[atoms]."""
    return np.where(mass < FLUSH, 0.0, mass) * UNIT


def lost_mass(ratio: LikelihoodRatio) -> float:
    """Bounds the mass of pairs that `scaled` rounds to 0, under either law."""
    return 2.0 * sum(float(mass[mass < FLUSH].sum()) for mass in (ratio.q, ratio.p))


def grid_points(log_scale: float, start: int, size: int, step: float) -> Array:
    """Returns log X of successive grid points: float64[size].

    Args:
      log_scale: Log X of the grid point of index 0.
      start: Index of the first grid point.
      size: Number of grid points.
      step: Grid step in log X.
    """
    return log_scale + (start + np.arange(size, dtype=np.float64)) * step


def _spaced(x: Array, factor: int) -> Array:
    fine = np.zeros((x.size - 1) * factor + 1)
    fine[::factor] = x
    return fine
