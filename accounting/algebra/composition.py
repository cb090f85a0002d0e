"""Composition of many releases: certified convolution powers by tilted FFT.

Masses are tilted, so that the FFT's absolute errors are relative to delta, and every error is
bounded and moved outward. Proof: docs/explanation/composition-by-tilted-fft.md.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from accounting.algebra.likelihood_ratio import ROUNDING, UNDERFLOW
from accounting.algebra.lower import LowerRatio
from accounting.algebra.refinement import GridError, Point
from accounting.algebra.upper import UpperRatio
from accounting.profile import Direction

Array = NDArray[np.floating]

WRAP = 1e-22
"""Bound on the tilted mass outside the window of the FFT."""
_FAR = 40.0
"""e^-_FAR is less than the rounding of 1."""
_LEAST_LOG = -650.0
LARGEST = 2**20
"""Largest number of indices of a window."""


@dataclass(frozen=True, eq=False)
class UpperLoss:
    """The law of one release's privacy loss in one direction, bounded from above.

    Attributes:
      step: Distance of losses.
      base: Loss of index 0.
      masses: Mass under the first law, float64[atoms].
      drift: Bound on the relative error of each mass.
      shift: Bound on the error of each loss, besides the rounding of its formula.
      infinity: Mass of the first law on which the second has none.
    """

    step: float
    base: float
    masses: Array
    drift: float
    shift: float = 0.0
    infinity: float = 0.0

    @classmethod
    def from_ratio(cls, ratio: UpperRatio, direction: Direction) -> UpperLoss:
        """Returns the loss law of one direction of a likelihood ratio.

        Args:
          ratio: Law of X = P/Q, bounded from above.
          direction: 'remove' for H(P || Q), 'add' for H(Q || P).
        """
        if direction == "remove":
            masses, base, infinity = ratio.p, ratio.log_values[0], ratio.infinity
        else:
            masses, base, infinity = ratio.q[::-1], -ratio.log_values[-1], ratio.zero
        return cls(ratio.step, float(base), masses, ratio.drift, ratio.shift, infinity)

    def log_moment(self) -> LogMoment:
        """Returns about log E[e^{tilt loss}], to choose a tilt by.

        Some thousands of blocks of atoms stand for all of them.
        """
        starts = _blocks(self.masses)
        loss, mass = self.base + starts * self.step, np.add.reduceat(self.masses, starts)
        return lambda tilt: _log_mean(loss, mass, tilt)


@dataclass(frozen=True, eq=False)
class LowerLoss:
    """The law of one release's privacy loss in one direction, bounded from below.

    Attributes:
      step: Distance of grid points of the loss.
      base: Grid point of index 0.
      masses: Mass under the first law, float64[atoms].
      partners: Mass under the second law times e^(base + k step), float64[atoms].
      drift: Bound on the relative error of each mass.
      shift: Bound on the error of each loss, besides the rounding of its formula.
    """

    step: float
    base: float
    masses: Array
    partners: Array
    drift: float
    shift: float = 0.0

    @classmethod
    def from_ratio(cls, ratio: LowerRatio, direction: Direction) -> LowerLoss:
        """Returns the loss law of one direction, as `UpperLoss.from_ratio`."""
        if direction == "remove":
            masses, partners, base = ratio.p, ratio.p * np.exp(-ratio.offset), ratio.grid[0]
        else:
            masses, partners = ratio.q[::-1], (ratio.q * np.exp(ratio.offset))[::-1]
            base = -ratio.grid[-1]
        return cls(ratio.step, float(base), masses, partners, ratio.drift, ratio.shift)

    def centred(self, tilt: float) -> LowerLoss:
        """Returns the law with tilted offsets of mean 0.

        So the sum of many indices is where the sum of the losses is.
        """
        weight = _tilted(self.masses, np.arange(self.masses.size) * self.step * tilt)[0]
        mean = float(np.dot(weight, self._offsets()))
        return replace(self, base=self.base + mean, partners=self.partners * math.exp(mean))

    def _offsets(self) -> Array:
        positive = (self.masses > 0.0) & (self.partners > 0.0)
        return np.log(np.where(positive, self.masses, 1.0)) - np.log(
            np.where(positive, self.partners, 1.0)
        )

    def log_moment(self) -> LogMoment:
        """Returns about log E[e^{tilt loss}], as `UpperLoss.log_moment`."""
        starts = _blocks(self.masses)
        loss, mass = self.base + starts * self.step, np.add.reduceat(self.masses, starts)
        offset = np.add.reduceat(self.masses * self._offsets(), starts) / np.maximum(mass, 1e-300)

        def centred(tilt: float) -> float:
            mean = float(np.dot(_tilted(mass, loss * tilt)[0], offset))
            return _log_mean(loss, mass, tilt) + tilt * mean

        return centred


LogMoment = Callable[[float], float]
UpperParts = Sequence[tuple[UpperLoss, int]]
LowerParts = Sequence[tuple[LowerLoss, int]]
"""Laws of releases on grids of one step, each with how many there are."""


def compose_upper(parts: UpperParts, tilt: float) -> ComposedUpper:
    """Bounds the loss of independent releases from above.

    Args:
      parts: Each loss law, on grids of one step, and the number of releases that have it.
      tilt: Exponent t > 0 of the tilt e^{t loss} under which the FFT is computed.

    Raises:
      GridError: If the composition's grid would have more than LARGEST points.
    """
    step, masses = parts[0][0].step, [(law.masses, count) for law, count in parts]
    low, size = _window([masses], step, tilt)
    undone = (np.arange(size) + float(low)) * step * tilt
    power = _power(masses, step * tilt, low, size)
    unit = np.exp(np.minimum(power.log_unit - undone, 700.0))
    finite = sum(count * math.log1p(-min(law.infinity, 1.0 - 1e-16)) for law, count in parts)
    # Above the window the tilted mass is <= WRAP, and e^{-t K h} below its last value.
    beyond = WRAP * math.exp(min(power.log_unit - float(undone[-1]), 700.0))
    base, drift, shift = _errors(parts, undone, power.log_unit, power.rounding)
    loss = base + (np.arange(size) + float(low)) * step
    errors = power.error * unit
    masses_above = power.entries * unit + errors
    return ComposedUpper(loss, masses_above, errors, drift, shift, beyond - math.expm1(finite))


def compose_lower(parts: LowerParts, tilt: float) -> ComposedLower:
    """Bounds the loss from below, as `compose_upper` from above."""
    parts, step = [(law.centred(tilt), count) for law, count in parts], parts[0][0].step
    masses = [(law.masses, count) for law, count in parts]
    partners = [(law.partners, count) for law, count in parts]
    low, size = _window([masses, partners], step, tilt)
    undone = (np.arange(size) + float(low)) * step * tilt
    first, second = (_power(x, step * tilt, low, size) for x in (masses, partners))
    # In logarithms: at high tilts the units of the two powers are many e-folds different.
    unit = np.exp(np.minimum(first.log_unit - undone, 700.0))
    log_partner_unit = second.log_unit - undone
    partner_unit = np.exp(np.minimum(log_partner_unit, 700.0))
    # Where a partner is beyond the range of floats its mass is left out.
    within, errors = log_partner_unit < 700.0, first.error * unit
    masses_below = np.where(within, np.maximum(first.entries * unit - errors, 0.0), 0.0)
    partners_above = (np.maximum(second.entries, 0.0) + second.error) * partner_unit
    rounding = max(first.rounding, second.rounding)
    base, drift, shift = _errors(parts, undone, first.log_unit, rounding)
    loss = base + (np.arange(size) + float(low)) * step
    return ComposedLower(
        loss, masses_below, errors, drift, shift, np.where(within, partners_above, 0.0)
    )


def _errors(
    parts: UpperParts | LowerParts, undone: Array, log_unit: float, rounding: float
) -> tuple[float, float, float]:
    """Returns the composition's base, and bounds on the errors of its masses and its losses."""
    largest = abs(log_unit) + max(abs(float(undone[0])), abs(float(undone[-1])))
    # What the values are off by adds up, and is an error of the masses times values as well;
    # beside it, the step, the base and what they are multiplied by are rounded.
    base = shift = drift = 0.0
    for law, count in parts:
        farthest = abs(law.base) + law.masses.size * law.step
        base += count * law.base
        shift += count * (law.shift + 8.0 * ROUNDING * (1.0 + farthest))
        drift += count * (law.drift + 64.0 * ROUNDING)
    return base, drift + shift + rounding + ROUNDING * (4.0 * largest + 8.0), shift


def _blocks(masses: Array) -> NDArray[np.int64]:
    """Returns where blocks of atoms begin; the atoms around the largest mass are blocks."""
    block, most = max(1, masses.size // 4096), int(np.argmax(masses))
    near = np.arange(max(0, most - 512), min(masses.size, most + 512))
    return np.union1d(np.arange(0, masses.size, block), near)


def best_tilt(parts: UpperParts | LowerParts, point: Point) -> float:
    """Returns the tilt t > 0 at which Chernoff's bound is least.

    The bound is on delta where the point has an epsilon, and on epsilon elsewhere.
    """
    log_moments = [(law.log_moment(), count) for law, count in parts]

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        power = sum(count * log_moment(tilt) for log_moment, count in log_moments)
        power += _log_peak(tilt)
        if point.epsilon is not None:
            # Of tilts at which delta is beyond floats the least one: others' units are, too.
            return max(power - tilt * point.epsilon, _LEAST_LOG)
        return (power - math.log(point.delta)) / tilt

    return _minimise(bound)


Masses = Sequence[tuple[Array, int]]
"""Each law's masses, by index, and how many releases have it."""


def _window(sums: Sequence[Masses], step: float, tilt: float) -> tuple[int, int]:
    """Returns the first index and the size, a power of two, of the FFT's window.

    Tilted sums of masses, and of partners where they differ, are outside with probability <= WRAP.
    """
    reaches = [_reach(masses, step, tilt) for masses in sums]
    low, high = min(low for low, _ in reaches), max(high for _, high in reaches)
    size = 1 << max(4, (high - low).bit_length())
    if size > LARGEST:
        raise GridError(f"no finer grid is computed: it has {size} points, more than {LARGEST}")
    return low, size


def _reach(masses: Masses, step: float, tilt: float) -> tuple[int, int]:
    """Returns indices beyond which the tilted sum has probability <= WRAP in all.

    By Chernoff's bound at a few tilts a > 0, b < 0 on top of `tilt`.
    """
    laws, total_mean, variance = [], 0.0, 0.0
    for mass, count in masses:
        loss = np.arange(mass.size) * step
        weight = _tilted(mass, loss * tilt)[0]
        mean = float(np.dot(weight, loss))
        total_mean += count * mean
        variance += count * max(float(np.dot(weight, (loss - mean) ** 2)), step**2)
        laws.append((loss - mean, weight, count))
    reach = []
    for sign in (-1.0, 1.0):
        best = sum(count * max(sign * loss[0], sign * loss[-1]) for loss, _, count in laws)
        # The bound falls, then rises, in the tilt: upwards from the normal law's, then downwards.
        for multiples in (2.0 ** np.arange(0.0, 4.5, 0.5), 2.0 ** np.arange(-0.5, -8.5, -0.5)):
            last = math.inf
            for multiple in multiples:
                extra = float(multiple) * 9.0 / math.sqrt(variance)
                log_means = sum(n * _log_mean(sign * loss, w, extra) for loss, w, n in laws)
                bound = (log_means - math.log(WRAP / 4.0)) / extra
                best = min(best, bound)
                if bound > last:
                    break
                last = bound
        reach.append(best)
    low = math.floor((total_mean - reach[0]) / step) - 1
    high = math.ceil((total_mean + reach[1]) / step) + 1
    return max(low, 0), min(high, sum(count * (mass.size - 1) for mass, count in masses))


DIRECTIONS: tuple[Direction, ...] = "remove", "add"


def composed_upper(
    ratios: Sequence[tuple[UpperRatio, int]], point: Point
) -> tuple[ComposedUpper, ComposedUpper]:
    """Bounds the losses of releases from above, in both directions.

    Args:
      ratios: Each law, on grids of one step, and the number of releases that have it.
      point: Point at which the result is to be sharp.

    Raises:
      GridError: If the composition's grid would have more than LARGEST points.
    """
    _check_one_step(ratios)
    losses_by_direction = (
        [(UpperLoss.from_ratio(law, direction), count) for law, count in ratios]
        for direction in DIRECTIONS
    )
    remove, add = (
        compose_upper(losses, best_tilt(losses, point)) for losses in losses_by_direction
    )
    return remove, add


def composed_lower(
    ratios: Sequence[tuple[LowerRatio, int]], point: Point
) -> tuple[ComposedLower, ComposedLower]:
    """Bounds the losses from below, as `composed_upper` from above."""
    _check_one_step(ratios)
    losses_by_direction = (
        [(LowerLoss.from_ratio(law, direction), count) for law, count in ratios]
        for direction in DIRECTIONS
    )
    remove, add = (
        compose_lower(losses, best_tilt(losses, point)) for losses in losses_by_direction
    )
    return remove, add


def _check_one_step(ratios: Sequence[tuple[UpperRatio | LowerRatio, int]]) -> None:
    if len({ratio.step for ratio, _ in ratios}) > 1:
        raise ValueError("releases are composed on grids of one step")


@dataclass(frozen=True, eq=False)
class Composed(abc.ABC):
    """The loss of a whole composition, in one direction, with its errors already outward.

    Attributes:
      loss: Losses, ascending, float64[atoms].
      masses: Mass under the first law (a bound, on this side), float64[atoms].
      errors: Error that the FFT may have put into each mass, float64[atoms].
      drift: Bound on the relative error of each mass.
      shift: Bound on the floating-point error of each loss (besides its own rounding).
    """

    loss: Array
    masses: Array
    errors: Array
    drift: float
    shift: float

    def floor(self, epsilon: float) -> float:
        """Returns the FFT's certified error in delta at `epsilon`."""
        above = self.loss > epsilon
        return float(np.dot(self.errors[above], -np.expm1(epsilon - self.loss[above])))

    @abc.abstractmethod
    def delta(self, epsilon: float) -> float:
        """Bounds the hockey-stick divergence at `epsilon`."""

    def _rounding(self) -> float:
        return 2.0 * (self.drift + (self.loss.size + 8.0) * ROUNDING)  # of sums of positive terms

    @functools.cached_property
    def _masses_from(self) -> Array:
        return _sums_from(self.masses)


@dataclass(frozen=True, eq=False)
class ComposedUpper(Composed):
    """An upper bound on the loss of a composition; `infinity` is its mass at infinity."""

    infinity: float

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on the hockey-stick divergence at `epsilon`."""
        moved = epsilon - self.shift * max(1.0, epsilon)
        if moved < self.loss[0]:
            return 1.0  # the window was laid for a larger epsilon
        first = int(np.searchsorted(self.loss, moved, side="right"))
        last = int(np.searchsorted(self.loss, moved + _FAR))
        shares = -np.expm1(moved - self.loss[first:last])
        value = self.infinity + float(np.dot(self.masses[first:last], shares))
        value += float(self._masses_from[last])
        return min(1.0, value * math.exp(self._rounding()) + UNDERFLOW)


@dataclass(frozen=True, eq=False)
class ComposedLower(Composed):
    """A lower bound on the loss of a composition.

    `partners` is the mass under the second law times e^loss, bounded from above: float64[atoms].
    """

    partners: Array

    def delta(self, epsilon: float) -> float:
        """Returns a lower bound on the hockey-stick divergence at `epsilon`."""
        moved, drift = epsilon + self.shift * max(1.0, epsilon), self._rounding()
        first = int(np.searchsorted(self.loss, moved - 1.0))
        last = int(np.searchsorted(self.loss, moved + _FAR))
        factor = np.exp(np.minimum(moved - self.loss[first:last], 2.0)) * (1.0 + drift)
        value = np.maximum(self.masses[first:last] - factor * self.partners[first:last], 0.0).sum()
        far = self._masses_from[last] - math.exp(1.0 - _FAR) * self._partners_from[last]
        return max(0.0, float(value + max(0.0, far)) * (1.0 - drift) - UNDERFLOW)

    @functools.cached_property
    def _partners_from(self) -> Array:
        return _sums_from(self.partners)


def _sums_from(x: Array) -> Array:
    """Returns the sum of the entries from each on, and 0 behind the last."""
    return np.append(np.cumsum(x[::-1])[::-1], 0.0)


def _minimise(bound: Callable[[float], float]) -> float:
    """Returns about exp of the minimiser of a quasi-convex function of the logarithm of a tilt."""
    low, high = math.log(1e-3), math.log(1e6)
    for points in (20, 8, 8):
        grid = np.linspace(low, high, points).tolist()
        best = int(np.nanargmin([bound(x) for x in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return math.exp(grid[best])


def _tilted(mass: Array, exponent: Array) -> tuple[Array, float]:
    """Returns mass e^exponent scaled to sum 1, and the log of the sum."""
    with np.errstate(divide="ignore"):
        log_weight = np.log(mass) + exponent
    top = float(log_weight.max())
    weight = np.exp(log_weight - top)
    total = float(weight.sum())
    return weight / total, top + math.log(total)


def _log_peak(tilt: float) -> float:
    """Returns the log of the greatest value of (1 - e^{-x}) e^{-tilt x}."""
    return tilt * math.log(tilt) - (1.0 + tilt) * math.log1p(tilt)


def _log_mean(loss: Array, mass: Array, tilt: float) -> float:
    """Returns log E[e^{tilt loss}], rounded up by more than floating point may lose."""
    exponent = loss * tilt
    top = float(exponent.max())
    total = float(np.dot(mass, np.exp(exponent - top)))
    return top + math.log(max(total, 1e-300)) + 1e-14


class _Power(NamedTuple):
    entries: Array
    """Entry i is the power's entry low + i, tilted and divided by its unit."""
    log_unit: float
    """Log of the unit."""
    error: float
    """Bound on the error of each entry by the transforms."""
    rounding: float
    """Bound on the relative error of each entry by the tilt's exponents."""


def _power(masses: Masses, tilted_step: float, low: int, size: int) -> _Power:
    """Returns the laws' convolution powers, convolved and tilted by step times tilt, by FFT."""
    relative = 8.0 * ROUNDING * math.log2(size)
    power = np.ones(size // 2 + 1, np.complex128)
    log_this = np.zeros(power.size)
    log_unit = rounding = 0.0
    log_moduli = []
    for mass, count in masses:
        exponent = np.arange(mass.size) * tilted_step
        weight, log_sum = _tilted(mass, exponent)
        log_unit += count * log_sum
        log_mass = np.abs(np.log(mass[mass > 0.0])).max(initial=0.0)
        exponents = 2.0 * log_mass + 3.0 * abs(float(exponent[-1])) + 2.0 * abs(log_sum) + 80.0
        rounding += count * ROUNDING * float(exponents)
        if weight.size > size:
            weight = np.concatenate([weight, np.zeros(-weight.size % size)])
            weight = weight.reshape(-1, size).sum(0)
        square, remaining = scipy.fft.rfft(weight, size), count
        with np.errstate(divide="ignore"):
            log_modulus = np.log(np.abs(square) * (1.0 + 4.0 * ROUNDING) + relative)
        log_this += count * log_modulus
        log_moduli.append(log_modulus)
        while remaining:
            if remaining & 1:
                power = power * square
            remaining >>= 1
            if remaining:
                square = square * square
    with np.errstate(under="ignore"):
        # Each frequency of rfft but the ends stands for two.
        this = 2.0 * float(np.exp(log_this).sum()) / size
        error = sum(
            count * relative * 2.0 * float(np.exp(log_this - log_modulus).sum()) / size
            for (_, count), log_modulus in zip(masses, log_moduli, strict=True)
        )
    result = scipy.fft.irfft(power, size)
    products = sum(count for _, count in masses) - 1
    error += 2.3 * products * ROUNDING * this + relative * this + WRAP
    return _Power(np.roll(result, -(low % size)), log_unit, error * 1.0001, rounding)
