r"""The algebra of likelihood ratios in convex order: certified two-sided privacy profiles.

**The object.** Let X = dP/dQ as a random variable under Q: X >= 0 and E[X] <= 1, where 1 - E[X] is
the mass of P on which Q has none. Both directions of the profile are expectations of convex
functions of X:

    H_eps(P || Q) = E[(X - e^eps)_+] + (1 - E[X]),        H_eps(Q || P) = E[(1 - e^eps X)_+].

Write X <= X' for the convex order: E f(X) <= E f(X') for every convex f. So a mean-preserving
*spread* of X (X' with E[X' | X] = X) bounds both directions from above, and a mean-preserving
*contraction* (X' = E[X | G]) bounds both from below, by Jensen's inequality. Mass moved to
infinity is the limit of a spread (to 0 and to a, a to infinity), so it is one, too.

**Operations.** A batch generator is made from four: `gaussian` (one release that holds the
example, X = exp(Y) with Y ~ N(-1/(2 s^2), 1/s^2) under Q), `mixture` ((1-q) + q X: the example is
in with probability q), `average` ((X_1 + ... + X_T)/T, independent: it is in exactly one of T, by
lot) and `product` (independent releases, composed). Each preserves the order X <= X':

- *mixture*: f((1-q) + q x) is convex in x if f is.
- *average*: replace one summand at a time. Given the others' sum s, f((s + x)/T) is convex in x,
  so E f((s + X)/T) <= E f((s + X')/T); take the expectation over s, which is independent.
- *product*: the same with f(s x), which is convex in x for each s (for s = 0 it is constant);
  nonnegativity keeps the result a likelihood ratio.

Hence bounds may be inserted after every operation, and the result still bounds the true curve.

**The grid.** An `upper` ratio has its finite atoms at exp(log_scale + k step), k integer, besides
an atom at 0 and the P-mass at infinity. A value between two grid points is split between them so
that mass and mean are kept. A `lower` ratio has one atom for each k, exp(log_scale + k step +
offset_k): atoms of the algebra that fall to one k are contracted to their conditional mean; *which*
atoms fall to which k affects tightness alone, never validity.

**Floating point.** Every mass is a sum of products of nonnegative numbers: no cancellation, so that
each computed mass, however small, has relative error at most (number of roundings) x 2^-53. The
worst case of that number is carried along as `drift` (a sum's or product's drift is the sum of its
factors', plus its own roundings), and upper bounds are inflated by 1 + drift, lower ones deflated.
The weights of a split carry relative errors of a few 2^-53 in the value that they keep in the
mean; together they amount to a spread (or contraction) of X (1 + e) in place of X, where |e| <=
1e-10 after all operations, and E[(X (1+e) - a)_+] is within a factor 1 +- 1e-10 and a change of a
by that factor: `epsilon` is moved by 1e-10 (outward) before it is used. Masses that are set to 0
for being under 1e-150 are less than 1e-140 in all, which is added to (taken from) the result.

Sources: Blackwell, "Equivalent comparisons of experiments", 1953 (the order); Chua, Ghazi,
Harrison, Kamath, Kumar, Leeman, Manurangsi, Sinha, Zhang, "Balls-and-Bins Sampling for DP-SGD",
AISTATS 2025 (arXiv 2412.16802), Theorem 3.1 (the pair); Doroshenko, Ghazi, Kamath, Kumar,
Manurangsi, "Connect the Dots", PoPETs 2022 (the spread of a single loss distribution).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.cells import Array, log_normal_cells, spread, up_weight
from accounting.sums import Pairs

Side = Literal["upper", "lower"]

GAUSSIAN_DRIFT = 1e-13
"""Relative error of a normal cell's mass: log_ndtr to 1e-15, of logarithms down to -100."""
ROUNDING = 2.0**-53
VALUE_DRIFT = 1e-10
UNDERFLOW = 1e-140
"""Bound on the mass that is lost, in all, by setting what is under _FLUSH to 0."""
_FLUSH = 1e-150
TAIL = 1e-45
"""Mass (of Q below, of P above) that a tail may have when it is cut; the cut keeps the bound."""


@dataclass(frozen=True, eq=False)
class LikelihoodRatio:
    """A discrete law of X = dP/dQ that bounds a true one in convex order.

    Attributes:
      side: 'upper' if this law is a spread of the true one, 'lower' if it is a contraction.
      step: Distance of neighbouring atoms in log X; > 0.
      log_scale: log X of index 0.
      start: Index of the first atom; atom k has log X = log_scale + k step + offset.
      q: Q-mass of each atom, float64 [atoms].
      p: P-mass of each atom, = q X, float64 [atoms]; kept apart, as either may underflow.
      offset: Distance of each atom from its grid point in log X, float64 [atoms]; 0 for 'upper'.
      zero: Q-mass at X = 0.
      infinity: P-mass at X = infinity (on which Q has none).
      drift: Bound on the relative floating-point error of each mass.
    """

    side: Side
    step: float
    log_scale: float
    start: int
    q: Array
    p: Array
    offset: Array
    zero: float = 0.0
    infinity: float = 0.0
    drift: float = GAUSSIAN_DRIFT

    @property
    def log_values(self) -> Array:
        """Log X of each atom, ascending up to the offsets."""
        return self.log_scale + (self.start + np.arange(self.q.size)) * self.step + self.offset

    @classmethod
    def gaussian(cls, noise_multiplier: float, step: float, side: Side) -> LikelihoodRatio:
        """Discretises the ratio of one Gaussian release with sensitivity 1.

        X = exp(Y) with Y ~ N(-1/(2 s^2), 1/s^2) under Q and N(+1/(2 s^2), 1/s^2) under P, where
        s = `noise_multiplier`.
        """
        return cls.subsampled_gaussian(noise_multiplier, 1.0, step, side)

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

        Equal to `gaussian` followed by `mixture`, but discretised once, so that a small q costs
        no accuracy. Beyond the values of Y that have mass <= `tail` the grid ends.
        """
        sigma, rate = noise_multiplier, sampling_prob
        reach = -special.ndtri(tail) / sigma
        low, high = -0.5 / sigma**2 - reach, 0.5 / sigma**2 + reach

        def log_ratio(y: float) -> float:
            return float(np.logaddexp(math.log1p(-rate), math.log(rate) + y)) if rate < 1.0 else y

        shift = 0.0 if side == "upper" else 0.5
        first = math.floor(log_ratio(low) / step)
        last = math.ceil(log_ratio(high) / step)
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
        log_q = log_normal_cells(sigma * y + 0.5 / sigma)
        log_g = log_normal_cells(sigma * y - 0.5 / sigma)
        if rate < 1.0:
            with np.errstate(invalid="ignore"):
                log_p = np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_g)
        else:
            log_p = log_g
        grid = (first + np.arange(log_q.size)) * step
        q, p = np.exp(log_q), np.exp(log_p)
        with np.errstate(invalid="ignore"):
            offset = np.where(np.isfinite(log_q) & np.isfinite(log_p), log_p - log_q - grid, 0.0)
        if side == "lower":
            return cls("lower", step, 0.0, first, q, p, offset)
        # All of the first cell is above its grid point if X >= 1 - rate is; else it begins at 0.
        bounded = rate < 1.0 and math.log1p(-rate) >= first * step
        cells = spread(step, p, q, offset, bounded=bounded)
        offset = np.zeros(q.size)
        return cls("upper", step, 0.0, first, cells.q, cells.p, offset, cells.zero, cells.infinity)

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
        both = (p > UNDERFLOW) & (q > UNDERFLOW)
        zero, infinity = float(q[~both].sum()), float(p[~both].sum())
        if not both.any():
            both = np.ones(p.shape, bool)
            p, q, zero, infinity = (
                np.full(p.shape, UNDERFLOW),
                np.full(p.shape, UNDERFLOW),
                0.0,
                0.0,
            )
        p, q = p[both], q[both]
        position = (np.log(p) - np.log(q)) / step
        index = (np.floor(position) if upper else np.rint(position)).astype(np.int64)
        start = int(index.min())
        bins, size = index - start, int(index.max()) - start + 2
        if not upper:
            masses = np.bincount(bins, q, size).astype(np.float64)
            means = np.bincount(bins, p, size).astype(np.float64)
            grid = (start + np.arange(size)) * step
            offset = _offset(masses, means, grid)
            return cls(side, step, 0.0, start, masses, means, offset, 0.0, 0.0, drift)
        share = up_weight((position - index) * step, step)
        stretch = 1.0 + share * math.expm1(step)
        masses = np.bincount(bins, q * (1.0 - share), size).astype(np.float64)
        masses += np.bincount(bins + 1, q * share, size)
        means = np.bincount(bins, p * (1.0 - share) / stretch, size).astype(np.float64)
        means += np.bincount(bins + 1, p * share * math.exp(step) / stretch, size)
        offset = np.zeros(size)
        return cls(side, step, 0.0, start, masses, means, offset, zero, infinity, drift)

    def mixture(self, sampling_prob: float) -> LikelihoodRatio:
        """Returns (1 - q) + q X, on the same grid: the example is in with probability q.

        Near X = 1 the grid is coarse against a small q; the result is then valid, but loose (see
        `subsampled_gaussian`).
        """
        q = np.concatenate([self.q, [self.zero]])
        p = (1.0 - sampling_prob) * q + sampling_prob * np.concatenate([self.p, [0.0]])
        mixed = LikelihoodRatio.from_masses(p, q, self.step, self.side)
        return replace(
            mixed,
            infinity=mixed.infinity + sampling_prob * self.infinity,
            drift=self.drift + mixed.drift,
        )

    def average(self, count: int, steps: tuple[float, ...] | None = None) -> LikelihoodRatio:
        """Returns (X_1 + ... + X_count)/count of independent copies: one of `count` by lot.

        Sums are built by doubling; about 2 log2(count) of them.

        Args:
          count: The number of copies, >= 1.
          steps: Grid step after 0, 1, 2, ... doublings, each the one before divided by a power of
            2; by default the step stays as it is. As sums concentrate, they may be given finer
            grids at equal cost.
        """
        total: LikelihoodRatio | None = None
        total_count = 0
        doubled, doubled_count = self, 1
        level = 0
        while True:
            if steps is not None:
                doubled = doubled._refine(round(doubled.step / steps[level]))
            if count & doubled_count:
                if total is None:
                    total, total_count = doubled, doubled_count
                else:
                    total = total._refine(round(total.step / doubled.step))
                    total = _mean_of_two(total, total_count, doubled, doubled_count)
                    total_count += doubled_count
            if 2 * doubled_count > count:
                break
            doubled = _mean_of_two(doubled, doubled_count, doubled, doubled_count)
            doubled_count *= 2
            level += 1
        assert total is not None
        return total

    def product(self, other: LikelihoodRatio) -> LikelihoodRatio:
        """Returns X Y of independent X, Y on grids of one step: the composition of two releases.

        On the grid this is a convolution over the indices, done directly, not by FFT, so that
        tails keep their relative accuracy. A lower ratio's atoms whose indices have the same sum
        are contracted: the sum of the indices is a post-processing of the pair of them.
        """
        if self.side != other.side or not math.isclose(self.step, other.step, rel_tol=1e-12):
            raise ValueError(
                "a product needs two ratios of one side and one step, got "
                f"({self.side}, {self.step}) and ({other.side}, {other.step})"
            )
        # Products of the smallest masses would be subnormal, and slow: see UNDERFLOW.
        x_q, x_p = self.q * (self.q > _FLUSH), self.p * (self.p > _FLUSH)
        y_q, y_p = other.q * (other.q > _FLUSH), other.p * (other.p > _FLUSH)
        q, p = np.convolve(x_q, y_q), np.convolve(x_p, y_p)
        log_scale = self.log_scale + other.log_scale
        start = self.start + other.start
        offset = np.zeros(q.size)
        if self.side == "lower":
            scaled_p = np.convolve(x_p * np.exp(-self.offset), y_p * np.exp(-other.offset))
            scaled_q = np.convolve(x_q * np.exp(self.offset), y_q * np.exp(other.offset))
            offset = _mean_offset(q, p, scaled_q, scaled_p)
        # P-mass is infinite where either factor is; Q-mass is at 0 where either factor is.
        infinity = self.infinity + other.infinity - self.infinity * other.infinity
        zero = self.zero + other.zero - self.zero * other.zero
        return LikelihoodRatio(
            self.side,
            self.step,
            log_scale,
            start,
            q,
            p,
            offset,
            zero,
            infinity,
            self.drift + other.drift + (min(self.q.size, other.q.size) + 8) * ROUNDING,
        ).trim()

    def power(self, count: int) -> LikelihoodRatio:
        """Returns the product of `count` independent copies: `count` releases, composed.

        The deviation of log X grows as the square root of the number of factors; the grid is made
        coarser in proportion (by 2 with every second doubling).
        """
        total: LikelihoodRatio | None = None
        square, remaining, level = self, count, 0
        while True:
            if remaining & 1:
                total = square if total is None else total.product(square)
            remaining >>= 1
            if not remaining:
                assert total is not None
                return total
            square = square.product(square)
            level += 1
            if level % 2 == 0:
                square = square._coarsen()
                total = total._coarsen() if total is not None else None

    def trim(self, tail: float = TAIL) -> LikelihoodRatio:
        """Cuts off tails of mass <= `tail` (of Q below, of P above), keeping the bound.

        Upper: the lower tail is split between 0 and the first atom kept; the upper one keeps its
        Q-mass at the last atom kept, and the rest of its P-mass goes to infinity. Lower: a tail is
        contracted into the atom at the cut.
        """
        below = int(np.searchsorted(np.cumsum(self.q), tail))
        above = self.p.size - 1 - int(np.searchsorted(np.cumsum(self.p[::-1]), tail))
        below = min(below, self.q.size - 1)
        above = max(above, below)
        if below == 0 and above == self.q.size - 1:
            return self
        q, p = self.q[below : above + 1].copy(), self.p[below : above + 1].copy()
        offset = self.offset[below : above + 1].copy()
        start = self.start + below
        if self.side == "lower":
            q[0] += self.q[:below].sum()
            p[0] += self.p[:below].sum()
            q[-1] += self.q[above + 1 :].sum()
            p[-1] += self.p[above + 1 :].sum()
            for end in (0, -1):
                grid = self.log_scale + (start + (end % q.size)) * self.step
                if q[end] > UNDERFLOW and p[end] > UNDERFLOW:
                    offset[end] = math.log(p[end]) - math.log(q[end]) - grid
            return replace(self, start=start, q=q, p=p, offset=offset)
        steps_below = np.arange(below, 0, -1) * self.step
        steps_above = np.arange(1, self.q.size - above) * self.step
        q[0] += np.dot(self.q[:below], np.exp(-steps_below))
        p[0] += self.p[:below].sum()
        zero = self.zero + np.dot(self.q[:below], -np.expm1(-steps_below))
        q[-1] += self.q[above + 1 :].sum()
        p[-1] += np.dot(self.p[above + 1 :], np.exp(-steps_above))
        infinity = self.infinity + np.dot(self.p[above + 1 :], -np.expm1(-steps_above))
        return replace(
            self, start=start, q=q, p=p, offset=offset, zero=float(zero), infinity=float(infinity)
        )

    def remove(self, epsilon: float) -> float:
        """Bounds H_epsilon(P || Q) = E[(X - e^epsilon)_+] + (1 - E[X]) on this ratio's side."""
        upper = self.side == "upper"
        moved = epsilon - VALUE_DRIFT if upper else epsilon + VALUE_DRIFT
        loss = self.log_values
        above = loss > moved
        value = self.infinity + np.dot(self.p[above], -np.expm1(moved - loss[above]))
        return _with_drift(float(value), upper, self.drift)

    def add(self, epsilon: float) -> float:
        """Bounds H_epsilon(Q || P) = E[(1 - e^epsilon X)_+] on this ratio's side."""
        upper = self.side == "upper"
        moved = epsilon - VALUE_DRIFT if upper else epsilon + VALUE_DRIFT
        loss = -self.log_values
        above = loss > moved
        value = self.zero + np.dot(self.q[above], -np.expm1(moved - loss[above]))
        return _with_drift(float(value), upper, self.drift)

    def delta(self, epsilon: float) -> float:
        """Bounds max(H_epsilon(P || Q), H_epsilon(Q || P)) on this ratio's side."""
        return max(self.remove(epsilon), self.add(epsilon))

    def _coarsen(self) -> LikelihoodRatio:
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
            return replace(
                self, step=2 * self.step, start=start, q=q, p=p, offset=np.zeros(size), drift=drift
            )
        offset_even, offset_odd = halves(self.offset)
        offset_odd = offset_odd + self.step
        q, p = q_even + q_odd, p_even + p_odd
        scaled_p = p_even * np.exp(-offset_even) + p_odd * np.exp(-offset_odd)
        scaled_q = q_even * np.exp(offset_even) + q_odd * np.exp(offset_odd)
        return replace(
            self,
            step=2 * self.step,
            start=start,
            q=q,
            p=p,
            offset=_mean_offset(q, p, scaled_q, scaled_p),
            drift=drift,
        )

    def _refine(self, factor: int) -> LikelihoodRatio:
        """Returns the same atoms on a grid `factor` times finer: exact."""
        if factor == 1:
            return self
        size = (self.q.size - 1) * factor + 1
        q, p, offset = np.zeros(size), np.zeros(size), np.zeros(size)
        q[::factor], p[::factor], offset[::factor] = self.q, self.p, self.offset
        return replace(
            self, step=self.step / factor, start=self.start * factor, q=q, p=p, offset=offset
        )


def _with_drift(value: float, upper: bool, drift: float) -> float:
    if upper:
        return min(1.0, value * math.exp(2.0 * drift) + UNDERFLOW)
    return max(0.0, value * (1.0 - drift) - UNDERFLOW)


def _mean_offset(q: Array, p: Array, scaled_q: Array, scaled_p: Array) -> Array:
    """Returns log X of contracted atoms, less that of their grid point g.

    That is log(p / scaled_p) = log(scaled_q / q), where scaled_p = q e^g, scaled_q = p e^{-g}. The
    first form is read where P has more mass than Q, the second elsewhere, so that numbers that
    have underflowed are not looked at.
    """
    top, bottom = np.where(p > q, p, scaled_q), np.where(p > q, scaled_p, q)
    normal = (top > 0.0) & (bottom > 0.0)
    return np.log(np.where(normal, top, 1.0) / np.where(normal, bottom, 1.0))


def _offset(q: NDArray, p: NDArray, grid: NDArray) -> Array:
    """log(p/q) - grid where both are normal numbers, else 0."""
    normal = (q > UNDERFLOW) & (p > UNDERFLOW)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(normal, np.log(p) - np.log(q) - grid, 0.0).astype(np.float64)


def _mean_of_two(
    a: LikelihoodRatio, a_count: int, b: LikelihoodRatio, b_count: int
) -> LikelihoodRatio:
    """Returns the mean of a_count + b_count copies, from the means of a_count and of b_count.

    Works on sums (value times count), so that both have one grid (see `sums`).
    """
    count = a_count + b_count
    step = a.step
    # On the scale of sums both have the grid log_scale + log(count) + k step.
    scale = a.log_scale + math.log(a_count)
    b_start = b.start + round((b.log_scale + math.log(b_count) - scale) / step)
    start = min(a.start, b_start)
    size = max(a.start + a.q.size, b_start + b.q.size) - start
    size += math.ceil(math.log(2.0) / step) + 2
    pairs = Pairs(step, symmetric=a is b)
    first, second = a.start - start, b_start - start
    q = np.zeros(size)
    log_values = scale - math.log(count) + (start + np.arange(size)) * step
    if a.side == "upper":
        pairs.add_upper(q, a.q, first, b.q, second)
        q[second : second + b.q.size] += a.zero * b.q
        q[first : first + a.q.size] += b.zero * a.q
        with np.errstate(divide="ignore"):
            p = np.exp(np.log(q) + log_values)
        offset = np.zeros(size)
    else:
        p = np.zeros(size)
        pairs.add_lower(q, p, (a.q, a.p * a_count), first, (b.q, b.p * b_count), second)
        p /= count
        offset = _offset(q, p, log_values)
    infinity = (a_count * a.infinity + b_count * b.infinity) / count
    # An atom is summed over at most all d, twice (splits), by a running sum or one by one.
    drift = a.drift + b.drift + (2 * (a.q.size + b.q.size) + 16) * ROUNDING
    return LikelihoodRatio(
        a.side,
        step,
        scale - math.log(count),
        start,
        q,
        p,
        offset,
        a.zero * b.zero,
        infinity,
        drift,
    ).trim()
