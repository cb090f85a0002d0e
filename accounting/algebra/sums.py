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


@dataclass(frozen=True)
class Pairs:
    """The sums of two atoms on one grid of log X, by their distance d = i - j >= 0.

    Attributes:
      step: Distance of grid points in log X.
      symmetric: Both laws are one: pairs d >= 1 count twice, and once suffices to visit them.
    """

    step: float
    symmetric: bool

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
        """Gathers all pairs at the grid point nearest their sum."""
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

    def _runs(
        self, x: Atoms, y: Atoms, first: int, least: float, shift: float
    ) -> tuple[Array, list[tuple[int, int, int]], int]:
        """Returns heights, runs (d0, d1, level) of one level = floor(height + shift), and D + 1.

        height = log1p(e^{-d h}) / h. Only distances >= `first` that occur between the supports of
        `x` and `y` are listed, and none beyond the last, D, at which the height is above `least`.
        """
        beyond = math.ceil(-math.log(math.expm1(least * self.step)) / self.step) + 1
        begin = max(first, x.start - y.stop + 1)
        end = min(x.stop - y.start, beyond)
        if begin >= end:
            return np.zeros(0), [], beyond
        height = np.log1p(np.exp(-np.arange(begin, end) * self.step)) / self.step
        level = np.floor(height + shift).astype(np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(level)) + 1).tolist(), level.size]
        runs = [(begin + i, begin + j, int(level[i])) for i, j in itertools.pairwise(cuts)]
        return height, runs, beyond

    def _add_upper(self, out: Atoms, x: Atoms, y: Atoms, first: int) -> None:
        height, runs, beyond = self._runs(x, y, first, 1.0, 0.0)
        base = runs[0][0] if runs else 0
        grown = math.exp(self.step)
        for begin, end, level in runs:
            low = max(x.start, y.start + begin)
            high = min(x.stop, y.stop + end - 1)
            above = (height[begin - base : end - base] - level) * self.step
            up_share = up_weight(above, self.step)
            weight = self._weights(begin, end)
            of = y.start + begin, low, high
            down = _shifted_sums(y.q, weight * (1.0 - up_share), *of)
            up = _shifted_sums(y.q, weight * up_share, *of)
            left = slice(low - x.start, high - x.start)
            at = low + level - out.start
            here, there = slice(at, at + high - low), slice(at + 1, at + high - low + 1)
            out.q[here] += x.q[left] * down
            out.q[there] += x.q[left] * up
            # A grid point's value is that of x's atom, times e^{level step}.
            p = x.p[left] * math.exp(level * self.step)
            out.p[here] += p * down
            out.p[there] += (grown * p) * up
        low = max(x.start, y.start + max(beyond, first))
        if low < x.stop:
            # Here the sum lies below the next grid point, at a split e^{-d step}/(e^step - 1).
            j, decay = self._far(x, y, low, max(beyond, first))
            total = np.cumsum(y.q)[j]
            up = np.minimum(self._decayed(y.q)[j] * decay / math.expm1(self.step), total)
            here, there = slice(low - out.start, x.stop - out.start), slice(low - x.start, None)
            next_up = slice(here.start + 1, here.stop + 1)
            weight = self._weights(1, 2)
            out.q[here] += weight * x.q[there] * (total - up)
            out.q[next_up] += weight * x.q[there] * up
            out.p[here] += weight * x.p[there] * (total - up)
            out.p[next_up] += (weight * grown) * x.p[there] * up

    def _add_lower(self, out: Atoms, x: Atoms, y: Atoms, first: int) -> None:
        _, runs, beyond = self._runs(x, y, first, 0.5, 0.5)
        for begin, end, level in runs:
            low = max(x.start, y.start + begin)
            high = min(x.stop, y.stop + end - 1)
            weight = self._weights(begin, end)
            smaller = weight * np.exp(-np.arange(begin, end) * self.step)
            of = y.start + begin, low, high
            sum_q = _shifted_sums(y.q, weight, *of)
            sum_t = _shifted_sums(y.t, smaller, *of)
            at = low + level - out.start
            here, there = slice(at, at + high - low), slice(low - x.start, high - x.start)
            self._gather(out, here, x, there, sum_q, sum_t, math.exp(level * self.step))
        low = max(x.start, y.start + max(beyond, first))
        if low < x.stop:
            j, decay = self._far(x, y, low, max(beyond, first))
            weight = self._weights(1, 2)
            sum_q = weight * np.cumsum(y.q)[j]
            sum_t = weight * self._decayed(y.t)[j] * decay
            here = slice(low - out.start, x.stop - out.start)
            self._gather(out, here, x, slice(low - x.start, None), sum_q, sum_t, 1.0)

    @staticmethod
    def _gather(
        out: Atoms, here: slice, x: Atoms, there: slice, sum_q: Array, sum_t: Array, up: float
    ) -> None:
        """Adds pairs with x's atoms i = `there`, g_out = g_i + log `up`, to those of `out` `here`.

        `sum_q` has, for each i, its partners' masses q_j, and `sum_t` e^{g_j - g_i} t_j.
        """
        out.q[here] += x.q[there] * sum_q
        out.s[here] += up * x.s[there] * sum_q
        out.p[here] += x.p[there] * sum_q + x.s[there] * sum_t
        out.t[here] += (x.t[there] * sum_q + x.q[there] * sum_t) / up

    def _far(self, x: Atoms, y: Atoms, low: int, distance: int) -> tuple[NDArray[np.int64], Array]:
        """For x's atoms i from `low` on: y's last one j <= i - `distance`, and e^{(j - i) step}."""
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

    Every i has a term; those beyond the ends of `mass` are left out.
    """
    first = max(0, low - start - weights.size + 1)
    last = min(mass.size, high - start)
    sums = np.convolve(mass[first:last], weights)
    return sums[low - start - first : high - start - first]
