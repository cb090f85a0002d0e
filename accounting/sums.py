"""Sums of two independent atoms on one geometric grid: what averaging likelihood ratios is made of.

The atoms i >= j of a sum are d = i - j apart and add up to exp(i step) (1 + exp(-d step)): between
the grid points i + f and i + f + 1 with f = floor(log1p(exp(-d step)) / step), at a split that
depends on d alone. Pairs of one f share the multiplication. Where f = 0 for all d > D, running sums
take over.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from accounting.cells import Array, up_weight


@dataclass(frozen=True)
class Pairs:
    """The sums of two atoms on one grid of log X, by their distance d = i - j >= 0.

    Attributes:
      step: Distance of grid points in log X.
      symmetric: Both laws are one: pairs d >= 1 count twice, and once suffices to visit them.
    """

    step: float
    symmetric: bool

    def add_upper(self, out: Array, x: Array, x_start: int, y: Array, y_start: int) -> None:
        """Adds the masses x_i y_j at the sums, split between grid points, to `out`."""
        self._add_upper(out, x, x_start, y, y_start, 0)
        if not self.symmetric:
            self._add_upper(out, y, y_start, x, x_start, 1)

    def add_lower(
        self,
        out_q: Array,
        out_p: Array,
        x: tuple[Array, Array],
        x_start: int,
        y: tuple[Array, Array],
        y_start: int,
    ) -> None:
        """Adds masses x_i y_j, and their means, to the grid point nearest the sum."""
        self._add_lower(out_q, out_p, x, x_start, y, y_start, 0)
        if not self.symmetric:
            self._add_lower(out_q, out_p, y, y_start, x, x_start, 1)

    def _weight(self, d: int) -> float:
        return 2.0 if self.symmetric and d > 0 else 1.0

    def _runs(
        self, x: slice, y: slice, first: int, least: float, shift: float
    ) -> tuple[Array, list[tuple[int, int, int]], int]:
        """Runs (d0, d1, level) of one level = floor(height + shift), height = log1p(e^{-d h}) / h.

        Only distances >= `first` that occur between the supports `x` and `y` are listed, and none
        beyond the last, D, at which the height is above `least`. Returns heights, runs, D + 1.
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

    def _add_upper(
        self, out: Array, x: Array, x_start: int, y: Array, y_start: int, first: int
    ) -> None:
        x_all, y_all = slice(x_start, x_start + x.size), slice(y_start, y_start + y.size)
        height, runs, beyond = self._runs(x_all, y_all, first, 1.0, 0.0)
        base = runs[0][0] if runs else 0
        for begin, end, level in runs:
            low = max(x_all.start, y_all.start + begin)
            high = min(x_all.stop, y_all.stop + end - 1)
            down, up = np.zeros(high - low), np.zeros(high - low)
            above = (height[begin - base : end - base] - level) * self.step
            shares = up_weight(above, self.step)
            for d in range(begin, end):
                here = slice(max(low, y_all.start + d), min(high, y_all.stop + d))
                share = float(shares[d - begin])
                weight = self._weight(d)
                mass = y[here.start - d - y_start : here.stop - d - y_start]
                down[here.start - low : here.stop - low] += (weight * (1.0 - share)) * mass
                up[here.start - low : here.stop - low] += (weight * share) * mass
            left = x[low - x_start : high - x_start]
            out[low + level : high + level] += left * down
            out[low + level + 1 : high + level + 1] += left * up
        low = max(x_all.start, y_all.start + max(beyond, first))
        if low < x_all.stop:
            # Here the sum lies below the next grid point, at a split e^{-d step}/(e^step - 1).
            i = np.arange(low, x_all.stop)
            j = np.minimum(i - max(beyond, first) - y_start, y.size - 1)
            centre = 0.5 * y.size
            grow = np.exp((np.arange(y.size) - centre) * self.step)
            total = np.cumsum(y)[j]
            mean = np.cumsum(y * grow)[j] * np.exp((centre + y_start - i) * self.step)
            up = np.minimum(mean / math.expm1(self.step), total)
            left = self._weight(1) * x[low - x_start :]
            out[low : x_all.stop] += left * (total - up)
            out[low + 1 : x_all.stop + 1] += left * up

    def _add_lower(
        self,
        out_q: Array,
        out_p: Array,
        x: tuple[Array, Array],
        x_start: int,
        y: tuple[Array, Array],
        y_start: int,
        first: int,
    ) -> None:
        (x_q, x_p), (y_q, y_p) = x, y
        x_all, y_all = slice(x_start, x_start + x_q.size), slice(y_start, y_start + y_q.size)
        _, runs, beyond = self._runs(x_all, y_all, first, 0.5, 0.5)
        for begin, end, level in runs:
            low = max(x_all.start, y_all.start + begin)
            high = min(x_all.stop, y_all.stop + end - 1)
            sum_q, sum_p = np.zeros(high - low), np.zeros(high - low)
            for d in range(begin, end):
                here = slice(max(low, y_all.start + d), min(high, y_all.stop + d))
                there = slice(here.start - d - y_start, here.stop - d - y_start)
                weight = self._weight(d)
                sum_q[here.start - low : here.stop - low] += weight * y_q[there]
                sum_p[here.start - low : here.stop - low] += weight * y_p[there]
            left = slice(low - x_start, high - x_start)
            out_q[low + level : high + level] += x_q[left] * sum_q
            out_p[low + level : high + level] += x_p[left] * sum_q + x_q[left] * sum_p
        low = max(x_all.start, y_all.start + max(beyond, first))
        if low < x_all.stop:
            j = np.arange(low, x_all.stop) - max(beyond, first) - y_start
            j = np.minimum(j, y_q.size - 1)
            sum_q, sum_p = np.cumsum(y_q)[j], np.cumsum(y_p)[j]
            left_q = self._weight(1) * x_q[low - x_start :]
            left_p = self._weight(1) * x_p[low - x_start :]
            out_q[low : x_all.stop] += left_q * sum_q
            out_p[low : x_all.stop] += left_p * sum_q + left_q * sum_p
