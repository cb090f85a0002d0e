"""Sums of two independent atoms on one geometric grid, for averages of likelihood ratios.

The math is in docs/explanation/likelihood-ratios-in-convex-order.md.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accounting.algebra.cells import Array, up_weight

RUNNING_SUM_ROUNDINGS = 128
"""Roundings, besides one for each atom, of a running sum whose terms decay geometrically."""
_BLOCK = 30.0
"""Length, in log X, of the blocks of such a sum: e^30 is no large number."""


class Atoms(NamedTuple):
    """Atoms of a law of X, as far as sums of them are on one grid, g = k step for atom k.

    Below X = 1 q is exact, and t; above it p and s, where the others may have underflowed to 0.
    """

    start: int
    """Index of the first atom."""
    q: Array
    """Mass under Q: float64[atoms]."""
    p: Array
    """Mass times X: float64[atoms]."""
    s: Array
    """q e^g, in terms of p: float64[atoms]."""
    t: Array
    """p e^{-g}, in terms of q: float64[atoms]."""

    @property
    def stop(self) -> int:
        """Index after the last atom."""
        return self.start + self.q.size


class _Near(NamedTuple):
    """Distances d = i - j of pairs whose sum lies well above the larger atom.

    The sum of atoms i and j has the index i + height, height = log1p(e^{-d h}) / h.
    """

    begin: int
    """First distance."""
    level: NDArray[np.int64]
    """Grid point below or nearest the sum, minus i: int64[distances], in steps of 0 or -1."""
    above: Array
    """Distance of the sum from the grid point i + level, in log X: float64[distances]."""
    weights: Array
    """Multiplicities of the pairs: float64[distances]."""
    beyond: int
    """First distance that is not near."""

    def cuts(self) -> list[int]:
        """Returns the first index of each level, ascending, and the end of the last."""
        inner = np.flatnonzero(np.diff(self.level)) + 1
        return [0, *inner.tolist(), self.level.size] if self.level.size else []

    def larger_atoms(self, x: Atoms, y: Atoms, i: int, j: int) -> tuple[int, int]:
        """Returns begin and end of x's atoms that have a pair at places i to j."""
        begin = y.start + self.begin
        return max(x.start, begin + i), min(x.stop, y.stop - y.start + begin + j - 1)


@dataclass(frozen=True)
class Pairs:
    """The sums of two atoms on one grid of log X, by their distance d = i - j >= 0.

    Attributes:
      step: Distance of grid points in log X.
      symmetric: True if both laws are equal: pairs d >= 1 are visited once and count twice.
      middle: First grid point of the sums with X >= 1.
    """

    step: float
    symmetric: bool
    middle: int = 0

    def upper(self, x: Atoms, y: Atoms) -> tuple[int, Array, Array]:
        """Splits the sums of all pairs between grid points.

        Returns the window's first index, and the masses times 1 (under Q) and times the value (p).
        """
        out = self._window(x, y)
        self._add_upper(out, x, y, 0)
        if not self.symmetric:
            self._add_upper(out, y, x, 1)
        return out.start, out.q, out.p

    def lower(self, x: Atoms, y: Atoms) -> Atoms:
        """Gathers all pairs at the grid point nearest their sum.

        Atoms below `middle` have q and t, the others p and s.
        """
        out = self._window(x, y)
        self._add_lower(out, x, y, 0)
        if not self.symmetric:
            self._add_lower(out, y, x, 1)
        return out

    def _window(self, x: Atoms, y: Atoms) -> Atoms:
        start = math.floor(self._sum(x.start, y.start)) - 1
        size = math.ceil(self._sum(x.stop, y.stop)) + 2 - start
        return Atoms(start, np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size))

    def _sum(self, i: int, j: int) -> float:
        """Index of the sum of two atoms, between grid points."""
        return max(i, j) + math.log1p(math.exp(-abs(i - j) * self.step)) / self.step

    def _weights(self, begin: int, end: int) -> Array:
        """Returns how often pairs of each of these distances count: float64[end - begin]."""
        return np.where(self.symmetric & (np.arange(begin, end) > 0), 2.0, 1.0)

    def _near(self, x: Atoms, y: Atoms, first: int, least: float, shift: float) -> _Near:
        """Returns the distances d >= `first` that occur between the supports of `x` and `y`.

        None beyond the last at which the height is above `least` is among them; the level is
        floor(height + `shift`).
        """
        beyond = math.ceil(-math.log(math.expm1(least * self.step)) / self.step) + 1
        begin = max(first, x.start - y.stop + 1)
        distances = np.arange(begin, max(begin, min(x.stop - y.start, beyond)))
        height = np.log1p(np.exp(-distances * self.step)) / self.step
        level = np.floor(height + shift).astype(np.int64)
        weights = self._weights(begin, begin + level.size)
        return _Near(begin, level, (height - level) * self.step, weights, max(beyond, first))

    def _add_upper(self, out: Atoms, x: Atoms, y: Atoms, first: int) -> None:
        near, grown = self._near(x, y, first, 1.0, 0.0), math.exp(self.step)
        share, cuts = up_weight(near.above, self.step), near.cuts()
        weights_down, weights_up = near.weights * (1.0 - share), near.weights * share
        # A grid point has pairs of its own level and, at larger distances, of the level below.
        for i, j, k in zip([0, *cuts], cuts, [*cuts[1:], *cuts[-1:]], strict=False):
            low, high = near.larger_atoms(x, y, i, k)
            weights = np.concatenate([weights_down[i:j], weights_up[j:k]])
            sums = _shifted_sums(y.q, weights, y.start + near.begin + i, low, high)
            level = int(near.level[i]) + (i == j)
            x_slice, first_index = slice(low - x.start, high - x.start), low + level - out.start
            out_slice = slice(first_index, first_index + high - low)
            out.q[out_slice] += x.q[x_slice] * sums
            # A grid point's value is that of x's atom, times e^{level step}.
            out.p[out_slice] += (math.exp(level * self.step) * x.p[x_slice]) * sums
        low = max(x.start, y.start + near.beyond)
        if low < x.stop:
            # Here the sum lies below the next grid point, at a split e^{-d step}/(e^step - 1).
            last, decay = self._far(x, y, low, near.beyond)
            total = np.cumsum(y.q)[last]
            up = np.minimum(self._decayed(y.q)[last] * decay / math.expm1(self.step), total)
            out_slice, x_slice = (
                slice(low - out.start, x.stop - out.start),
                slice(low - x.start, None),
            )
            next_up = slice(out_slice.start + 1, out_slice.stop + 1)
            weight = self._weights(1, 2)
            out.q[out_slice] += weight * x.q[x_slice] * (total - up)
            out.q[next_up] += weight * x.q[x_slice] * up
            out.p[out_slice] += weight * x.p[x_slice] * (total - up)
            out.p[next_up] += (weight * grown) * x.p[x_slice] * up

    def _add_lower(self, out: Atoms, x: Atoms, y: Atoms, first: int) -> None:
        near = self._near(x, y, first, 0.5, 0.5)
        distances = near.begin + np.arange(near.level.size)
        smaller = near.weights * np.exp(-distances * self.step)
        for i, j in itertools.pairwise(near.cuts()):
            (low, high), level = near.larger_atoms(x, y, i, j), int(near.level[i])
            begin = y.start + near.begin + i
            sum_q = _shifted_sums(y.q, near.weights[i:j], begin, low, high)
            sum_t = _shifted_sums(y.t, smaller[i:j], begin, low, high)
            first_index = low + level - out.start
            out_slice = slice(first_index, first_index + high - low)
            x_slice = slice(low - x.start, high - x.start)
            self._gather(out, out_slice, x, x_slice, sum_q, sum_t, math.exp(level * self.step))
        low = max(x.start, y.start + near.beyond)
        if low < x.stop:
            last, decay = self._far(x, y, low, near.beyond)
            weight = self._weights(1, 2)
            sum_q = weight * np.cumsum(y.q)[last]
            sum_t = weight * self._decayed(y.t)[last] * decay
            out_slice = slice(low - out.start, x.stop - out.start)
            self._gather(out, out_slice, x, slice(low - x.start, None), sum_q, sum_t, 1.0)

    def _gather(
        self,
        out: Atoms,
        out_slice: slice,
        x: Atoms,
        x_slice: slice,
        sum_q: Array,
        sum_t: Array,
        up: float,
    ) -> None:
        """Adds pairs with x's atoms i, g_out = g_i + log `up`, to atoms of `out`.

        `x_slice` has the atoms i, and `out_slice` those that they are added to. For each i,
        `sum_q` has its partners' masses q_j, and `sum_t` e^{g_j - g_i} t_j.
        """
        split = min(max(self.middle - out.start - out_slice.start, 0), sum_q.size)
        below, above = slice(split), slice(split, None)
        q, t, partners = x.q[x_slice][below], x.t[x_slice][below], sum_q[below]
        out.q[out_slice][below] += q * partners
        out.t[out_slice][below] += (t * partners + q * sum_t[below]) / up
        p, s, partners = x.p[x_slice][above], x.s[x_slice][above], sum_q[above]
        out.p[out_slice][above] += p * partners + s * sum_t[above]
        out.s[out_slice][above] += up * (s * partners)

    def _far(self, x: Atoms, y: Atoms, low: int, distance: int) -> tuple[NDArray[np.int64], Array]:
        """Returns, for x's atoms i >= `low`, y's last j <= i - `distance`, and e^{(j - i) step}."""
        i = np.arange(low, x.stop)
        j = np.minimum(i - distance, y.stop - 1)
        return j - y.start, np.exp((j - i) * self.step)

    def _decayed(self, mass: Array) -> Array:
        """Returns sum_{k <= j} e^{(k - j) step} mass_k for each j, relatively accurate."""
        length = max(1, int(_BLOCK / self.step))
        result, carried = np.empty(mass.size), 0.0
        for begin in range(0, mass.size, length):
            block = slice(begin, begin + length)
            grow = np.exp(np.arange(mass[block].size) * self.step)
            result[block] = (np.cumsum(mass[block] * grow) + carried) / grow
            carried = float(result[block][-1]) * math.exp(-self.step)
        return result


def _shifted_sums(mass: Array, weights: Array, start: int, low: int, high: int) -> Array:
    """Returns sum_d weights[d] mass[i - start - d] for each i in [low, high), added directly.

    Every i has a term; terms beyond the ends of `mass` are left out.
    """
    first = max(0, low - start - weights.size + 1)
    last = min(mass.size, high - start)
    sums = np.convolve(mass[first:last], weights)
    return sums[low - start - first : high - start - first]
