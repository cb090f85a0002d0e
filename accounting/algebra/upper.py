"""Upper bounds: spreads of a likelihood ratio's law to grid points, 0 and infinity."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from accounting.algebra.cells import Array, Spread, spread, up_weight
from accounting.algebra.composition import FAR, WRAP, Floats, Loss, Window, sum_rounding, sums_from
from accounting.algebra.likelihood_ratio import (
    FLUSH,
    ROUNDING,
    UNDERFLOW,
    UNIT,
    LikelihoodRatio,
    ReleaseCells,
    lost_mass,
    scaled,
)
from accounting.algebra.sums import Atoms
from accounting.profile import Direction


@dataclass(frozen=True, eq=False, kw_only=True)
class UpperRatio(LikelihoodRatio):
    """A spread of the law of X to grid points, 0 and infinity: its profile is an upper bound.

    >>> one = UpperRatio.gaussian(1.0, 0.01)
    >>> f"{one.delta(1.0):.6f}"  # 0.126936 is exact
    '0.126937'

    Attributes:
      zero: Q-mass at X = 0.
      infinity: P-mass at X = infinity, where Q has none.
    """

    zero: float = 0.0
    infinity: float = 0.0

    centre: ClassVar[float] = 0.0

    @property
    def log_values(self) -> Array:
        """Log X of each atom: its grid point."""
        return self.grid

    @classmethod
    def of_spread(
        cls, step: float, first: int, cells: Spread, drift: float, shift: float
    ) -> UpperRatio:
        """Returns the law of cells spread to grid points."""
        return cls(
            step=step, start=first, q=cells.q, p=cells.p, drift=drift, shift=shift,
            zero=cells.zero, infinity=cells.infinity,
        )  # fmt: skip

    @classmethod
    def _of_release(cls, step: float, cells: ReleaseCells, tail: float) -> UpperRatio:
        up = 1.0 + cells.drifts
        cells_split = spread(step, up * cells.p, up * cells.q, cells.offset, bounded=cells.bounded)
        cells_split = cells_split._replace(
            zero=cells.zero + cells_split.zero, infinity=cells.infinity + cells_split.infinity
        )
        ratio = cls.of_spread(step, cells.first, cells_split, 8.0 * ROUNDING, cells.shift)
        return replace(ratio, tail=tail).flush()

    @classmethod
    def from_masses(
        cls, p: Array, q: Array, step: float, drift: float = 8.0 * ROUNDING
    ) -> UpperRatio:
        """Splits each outcome between the grid points beside its ratio."""
        positive = (p > FLUSH) & (q > FLUSH)
        zero, infinity = float(q[~positive].sum()), float(p[~positive].sum())
        if not positive.any():  # an atom at X = 1 adds to no delta
            positive, p, q = np.ones(1, bool), *np.full((2, 1), FLUSH)
        p, q = p[positive], q[positive]
        position = (np.log(p) - np.log(q)) / step
        index = np.floor(position).astype(np.int64)
        start, stop = int(index.min()), int(index.max()) + 2
        bins, size = index - start, stop - start
        share = up_weight((position - index) * step, step)
        stretch = 1.0 + share * math.expm1(step)
        masses = np.bincount(bins, q * (1.0 - share), size).astype(np.float64)
        masses += np.bincount(bins + 1, q * share, size)
        means = np.bincount(bins, p * (1.0 - share) / stretch, size).astype(np.float64)
        means += np.bincount(bins + 1, p * share * math.exp(step) / stretch, size)
        shift = 2.0 * drift + 8.0 * ROUNDING * (700.0 + step * max(abs(start), abs(stop)))
        cells = Spread(masses, means, zero, infinity)
        return cls.of_spread(step, start, cells, drift + (p.size + 8) * ROUNDING, shift).flush()

    def mean_with(self, count: int, other: UpperRatio, others: int) -> UpperRatio:
        """Returns the weighted mean of X and Y, bounded from above.

        It is (count X + others Y) / (count + others); sums are split between grid points.
        """
        total, grid = count + others, self.sum_grid(count, other, others)
        weights = count / total, others / total  # not the counts, which may overflow
        first, second = (
            Atoms(start, q, weight * p, weight * p, q)
            for law, weight, start in zip((self, other), weights, grid.starts, strict=True)
            for q, p in [(scaled(law.q), scaled(law.p))]
        )
        start, q, p = grid.pairs.upper(first, second)
        q, p = q / UNIT / UNIT, p / UNIT / UNIT
        lost = lost_mass(self) + lost_mass(other)
        zero = self.zero * other.zero + lost
        most = int(np.argmax(q))
        for mass, atoms in ((self.zero, second), (other.zero, first)):
            # Pairs with an atom at 0 have the other one's value. Pairs below the window are spread
            # to 0 and the atom of most mass: its first atom could not be trimmed any more.
            q_pairs, p_pairs = mass / UNIT * atoms.q, mass / UNIT * atoms.p
            under = min(max(0, start - atoms.start), atoms.q.size)
            window = slice(atoms.start + under - start, max(atoms.stop - start, 0))
            q[window] += q_pairs[under:]
            p[window] += p_pairs[under:]
            up = np.exp((atoms.start - start - most + np.arange(under)) * self.step)
            q[most] += np.dot(q_pairs[:under], up)
            p[most] += p_pairs[:under].sum()
            zero += np.dot(q_pairs[:under], 1.0 - up)
        return replace(
            self, start=start, q=q, p=p, log_scale=grid.log_scale, zero=float(zero),
            infinity=(count * self.infinity + others * other.infinity) / total + lost,
            drift=grid.drift, shift=grid.shift, tail=max(self.tail, other.tail),
        ).trim()  # fmt: skip

    def diluted(self, count: int, others: int, step: float) -> UpperRatio:
        """Returns the weighted mean of X and 1, on another grid.

        It is (count X + others) / (count + others): X = 0 becomes a positive value, infinity stays.
        """
        constant_share = others / (count + others)
        q, p = np.append(self.q, self.zero), np.append(self.p, 0.0)
        p = (1.0 - constant_share) * p + constant_share * q
        ratio = self.from_masses(p, q, step, self.drift + 8.0 * ROUNDING)
        infinity = ratio.infinity + (1.0 - constant_share) * self.infinity
        shift = ratio.shift + self.shift
        return replace(ratio, infinity=infinity, shift=shift, tail=self.tail).trim()

    def trim(self) -> UpperRatio:
        """Spreads the tails to the last atoms, 0 and infinity."""
        ratio = self.flush()
        below, above = ratio.kept_range()
        if below == 0 and above == ratio.q.size - 1:
            return ratio
        q, p = ratio.q[below : above + 1].copy(), ratio.p[below : above + 1].copy()
        steps_below = np.arange(below, 0, -1) * ratio.step
        steps_above = np.arange(1, ratio.q.size - above) * ratio.step
        q[0] += np.dot(ratio.q[:below], np.exp(-steps_below))
        p[0] += ratio.p[:below].sum()
        zero = ratio.zero + np.dot(ratio.q[:below], -np.expm1(-steps_below))
        q[-1] += ratio.q[above + 1 :].sum()
        p[-1] += np.dot(ratio.p[above + 1 :], np.exp(-steps_above))
        infinity = ratio.infinity + np.dot(ratio.p[above + 1 :], -np.expm1(-steps_above))
        drift = ratio.drift + (ratio.q.size + 8) * ROUNDING
        end_masses = {"zero": float(zero), "infinity": float(infinity)}
        return replace(ratio, start=ratio.start + below, q=q, p=p, drift=drift, **end_masses)

    def flush(self) -> UpperRatio:
        """Moves masses under FLUSH to 0 and infinity."""
        few = self.few()
        if not few.any():
            return self
        zero, infinity = self.zero + self.q[few].sum(), self.infinity + self.p[few].sum()
        q, p = (np.where(few, 0.0, x) for x in (self.q, self.p))
        return replace(self, q=q, p=p, zero=float(zero), infinity=float(infinity))

    def loss(self, direction: Direction) -> UpperLoss:
        """Returns the loss law of one direction.

        >>> UpperRatio.gaussian(1.0, 0.5).loss("add").step
        0.5

        Args:
          direction: 'remove' for H(P || Q), 'add' for H(Q || P).
        """
        if direction == "remove":
            masses, base, infinity = self.p, self.log_values[0], self.infinity
        else:
            masses, base, infinity = self.q[::-1], -self.log_values[-1], self.zero
        return UpperLoss(
            step=self.step, base=float(base), masses=masses, drift=self.drift, shift=self.shift,
            infinity=infinity,
        )  # fmt: skip

    def remove(self, epsilon: float) -> float:
        """Returns an upper bound on H_epsilon(P || Q)."""
        return self._hockey_stick(epsilon, self.infinity, self.p, self.log_values)

    def add(self, epsilon: float) -> float:
        """Returns an upper bound on H_epsilon(Q || P)."""
        return self._hockey_stick(epsilon, self.zero, self.q, -self.log_values)

    def _hockey_stick(self, epsilon: float, surely: float, mass: Array, loss: Array) -> float:
        error = self.value_error()
        above = loss > epsilon - error
        value = surely + float(np.dot(mass[above], -np.expm1(epsilon - error - loss[above])))
        # The values' errors also are factors of the terms, and their sum is rounded.
        drift = self.drift + error + (mass.size + 8) * ROUNDING
        return min(1.0, value * math.exp(2.0 * drift) + UNDERFLOW)


@dataclass(frozen=True, eq=False, kw_only=True)
class UpperLoss(Loss):
    """An upper bound on the loss; `infinity` is the mass where the second law has no mass."""

    infinity: float = 0.0

    @staticmethod
    def compose(parts: Sequence[tuple[UpperLoss, int]], tilt: float) -> ComposedUpper:
        """Bounds the loss of independent releases from above (see `Loss.compose`)."""
        masses = [(law.masses, count) for law, count in parts]
        window = Window.of_sums([masses], parts[0][0].step, tilt)
        power = window.power(masses)
        unit = np.exp(np.minimum(power.log_unit - window.undone, 700.0))
        finite = sum(count * math.log1p(-min(law.infinity, 1.0 - 1e-16)) for law, count in parts)
        # Above the window the tilted mass is <= WRAP, and e^{-t K h} below its last value.
        beyond = WRAP * math.exp(min(power.log_unit - float(window.undone[-1]), 700.0))
        return ComposedUpper(
            *window.losses(parts, power.log_unit, power.rounding),
            masses=power.entries * unit + power.error * unit,
            infinity=beyond - math.expm1(finite),
        )


@dataclass(frozen=True, eq=False)
class ComposedUpper:
    """An upper bound on the loss of a whole composition, in one direction.

    Attributes:
      loss: Losses, ascending, float64[atoms].
      drift: Bound on the relative error of each mass.
      shift: Bound on the floating-point error of each loss (besides its own rounding).
      masses: Upper bound on the mass under the first law, float64[atoms].
      infinity: Mass at infinity.
    """

    loss: Floats
    drift: float
    shift: float
    masses: Floats
    infinity: float

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on the hockey-stick divergence at `epsilon`."""
        moved = epsilon - self.shift * max(1.0, epsilon)
        if moved < self.loss[0]:
            return 1.0  # the window was laid for a larger epsilon
        first = int(np.searchsorted(self.loss, moved, side="right"))
        last = int(np.searchsorted(self.loss, moved + FAR))
        shares = -np.expm1(moved - self.loss[first:last])
        value = self.infinity + float(np.dot(self.masses[first:last], shares))
        value += float(self._masses_from[last])
        return min(1.0, value * math.exp(sum_rounding(self.drift, self.loss.size)) + UNDERFLOW)

    @functools.cached_property
    def _masses_from(self) -> Floats:
        return sums_from(self.masses)
