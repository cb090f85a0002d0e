"""Composition of many releases: certified convolution powers by tilted FFT.

Masses are tilted, so that the FFT's absolute errors are relative to delta, and every error is
bounded and moved outward. Proof: docs/explanation/composition-by-tilted-fft.md.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy
from numpy.typing import NDArray

from accounting.algebra.likelihood_ratio import ROUNDING
from accounting.algebra.moments import log1p
from accounting.algebra.refinement import GridError, Part, Point
from accounting.algebra.tilts import log_peak
from accounting.profile import Direction

Floats = NDArray[np.floating]

WRAP = 1e-22
"""Bound on the tilted mass outside the window of the FFT."""
FAR = 40.0
"""Exponent beyond which e^-FAR is below the unit roundoff."""
_LEAST_LOG = -650.0
LARGEST = 2**20
"""Largest number of indices of a window."""
DIRECTIONS: tuple[Direction, ...] = "remove", "add"


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(abc.ABC):
    """The law of one release's privacy loss in one direction, bounded from one side.

    Attributes:
      step: Distance of losses.
      base: Loss of index 0.
      masses: Mass under the first law, float64[atoms].
      drift: Bound on the relative error of each mass.
      shift: Bound on the error of each loss, besides the rounding of its formula.
    """

    step: float
    base: float
    masses: Floats
    drift: float
    shift: float = 0.0

    @staticmethod
    @abc.abstractmethod
    def compose(parts: Any, tilt: float) -> Part:
        """Bounds the loss of independent releases.

        Args:
          parts: Each loss law, on grids of one step, and the number of releases that have it.
          tilt: Exponent t > 0 of the tilt e^{t loss} under which the FFT is computed.

        Raises:
          GridError: If the composition's grid would have more than LARGEST points.
        """

    def offsets(self) -> Floats | None:
        """Returns the distance of each loss from its grid point, float64[atoms]; None if 0."""
        return None

    def log_moment(self) -> Callable[[float], float]:
        """Approximates log E[e^{tilt loss}], for the choice of a tilt.

        The atoms are grouped into a few hundred blocks.
        """
        starts = _blocks(self.masses)
        loss, mass = self.base + starts * self.step, np.add.reduceat(self.masses, starts)
        if (offsets := self.offsets()) is None:
            return lambda tilt: _log_mean(loss, mass, tilt)
        offset = np.add.reduceat(self.masses * offsets, starts) / np.maximum(mass, 1e-300)

        def centred(tilt: float) -> float:
            mean = float(np.dot(tilted(mass, loss * tilt)[0], offset))
            return _log_mean(loss, mass, tilt) + tilt * mean

        return centred


@runtime_checkable
class Ratio(Protocol):
    """A likelihood ratio with a loss law in each direction."""

    @property
    def step(self) -> float:
        """Grid step in log X."""
        ...

    def loss(self, direction: Direction) -> Loss:
        """Returns the loss law of one direction."""
        ...


Parts = Sequence[tuple[Loss, int]]
"""Loss laws on grids of equal step, each with its number of releases."""


def composed(ratios: Sequence[tuple[Ratio, int]], point: Point) -> tuple[Part, Part]:
    """Composes the loss bounds of independent releases, in both directions.

    Args:
      ratios: Likelihood ratios on grids of equal step, each with its number of releases.
      point: Point at which the bounds should be tight.

    Raises:
      GridError: If the composition's grid would have more than LARGEST points.
    """
    if len({ratio.step for ratio, _ in ratios}) > 1:
        raise ValueError("composed releases need grids of equal step")
    remove, add = (
        [(ratio.loss(direction), count) for ratio, count in ratios] for direction in DIRECTIONS
    )
    return _composed(remove, point), _composed(add, point)


def _composed(parts: Parts, point: Point) -> Part:
    """Composes with the tilt t > 0 that minimises Chernoff's bound.

    The bound is on delta if the point has an epsilon, else on epsilon.
    """
    log_moments = [(law.log_moment(), count) for law, count in parts]

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        power = sum(count * log_moment(tilt) for log_moment, count in log_moments)
        power += float(log_peak(-tilt))
        if point.epsilon is not None:
            # Of tilts at which delta is beyond floats the least one: others' units are, too.
            return max(power - tilt * point.epsilon, _LEAST_LOG)
        return (power - math.log(point.delta)) / tilt

    return type(parts[0][0]).compose(parts, math.exp(_minimiser(bound)))


def _blocks(masses: Floats) -> NDArray[np.int64]:
    """Returns where blocks of atoms begin; the atoms around the largest mass are blocks."""
    block, most = max(1, masses.size // 1024), int(np.argmax(masses))
    near = np.arange(max(0, most - 256), min(masses.size, most + 256))
    return np.union1d(np.arange(0, masses.size, block), near)


Masses = Sequence[tuple[Floats, int]]
"""Each law's masses, by index, and how many releases have it."""


class Power(NamedTuple):
    entries: Floats
    """Entry i is the power's entry low + i, tilted and divided by its unit."""
    log_unit: float
    """Log of the unit."""
    error: float
    """Bound on the error of each entry by the transforms."""
    rounding: float
    """Bound on the relative error of each entry by the tilt's exponents."""


class Window(NamedTuple):
    """The indices low, ..., low + size - 1 that an FFT computes; size is a power of two."""

    low: int
    size: int
    step: float
    tilt: float

    @classmethod
    def of_sums(cls, sums: Sequence[Masses], step: float, tilt: float) -> Window:
        """Returns a window outside which each tilted sum has probability <= WRAP.

        Args:
          sums: Laws in each sum, each with its number of releases.
          step: Distance of losses.
          tilt: Exponent of the tilt.

        Raises:
          GridError: If the window would have more than LARGEST indices.
        """
        reaches = [_reach(masses, step, tilt) for masses in sums]
        low, high = min(low for low, _ in reaches), max(high for _, high in reaches)
        size = 1 << max(4, (high - low).bit_length())
        if size > LARGEST:
            raise GridError(f"no finer grid is computed: it has {size} points, more than {LARGEST}")
        return cls(low, size, step, tilt)

    @property
    def undone(self) -> Floats:
        """Exponents of the tilt at each index."""
        return (np.arange(self.size) + float(self.low)) * self.step * self.tilt

    def losses(self, parts: Parts, log_unit: float, rounding: float) -> tuple[Floats, float, float]:
        """Returns the composition's losses, and bounds on the errors of its masses and losses.

        Args:
          parts: Each loss law, and the number of releases that have it.
          log_unit: Log of the unit of the composition's masses.
          rounding: Bound on the relative error of a mass by the tilt's exponents.
        """
        undone = self.undone
        largest = abs(log_unit) + max(abs(float(undone[0])), abs(float(undone[-1])))
        # Errors of the losses add up, and count as errors of the masses times the values, too.
        # The step, the base and their multiples are also rounded.
        base = shift = drift = 0.0
        for law, count in parts:
            farthest = abs(law.base) + law.masses.size * law.step
            base += count * law.base
            shift += count * (law.shift + 8.0 * ROUNDING * (1.0 + farthest))
            drift += count * (law.drift + 64.0 * ROUNDING)
        loss = base + (np.arange(self.size) + float(self.low)) * self.step
        return loss, drift + shift + rounding + ROUNDING * (4.0 * largest + 8.0), shift

    def power(self, masses: Masses) -> Power:
        """Returns the laws' convolution powers, convolved and tilted, by FFT.

        An atom with more than half of a law's mass is factored out: the transform is atom (1 + z).
        Only z, of the other atoms, has FFT errors; the power's atom is added without one.
        """
        size, tilted_step = self.size, self.step * self.tilt
        fft_error = 8.0 * ROUNDING * math.log2(size)
        log_power = np.zeros(size // 2 + 1, np.complex128)
        log_sizes, log_bound = np.zeros(log_power.size), np.zeros(log_power.size)
        log_unit = log_atom = rounding = 0.0
        atom_index, all_apart, law_errors = 0, True, list[tuple[float, Floats]]()
        for mass, count in masses:
            tilts = np.arange(mass.size) * tilted_step
            weight, log_sum = tilted(mass, tilts)
            log_unit += count * log_sum
            log_mass = np.abs(np.log(mass[mass > 0.0])).max(initial=0.0)
            roundings = 2.0 * log_mass + 3.0 * abs(float(tilts[-1])) + 2.0 * abs(log_sum) + 80.0
            rounding += count * ROUNDING * float(roundings)
            largest = int(np.argmax(weight))
            largest_weight = float(weight[largest])
            apart = largest_weight > 0.5
            if apart:
                weight[largest] = 0.0
                log_atom += count * math.log(largest_weight)
            atom_index, all_apart = atom_index + count * largest, all_apart and apart
            weight = np.roll(np.append(weight, np.zeros(-weight.size % size)), -largest)
            weight /= largest_weight if apart else 1.0
            z = scipy.fft.rfft(weight.reshape(-1, size).sum(0), size) - float(not apart)
            law_error = (fft_error + 4.0 * ROUNDING) * float(weight.sum())
            log = log1p(z)
            log_modulus = np.log(np.abs(1.0 + z) * (1.0 + 4.0 * ROUNDING) + law_error)
            log_power += count * log
            log_sizes += count * np.abs(log)
            log_bound += count * log_modulus
            law_errors.append((count * law_error, log_modulus))
        atom = math.exp(log_atom) if all_apart and log_atom > -FAR else 0.0
        angle = log_power.imag
        with np.errstate(under="ignore"):
            # The transform of the power without its atom, whose own transform is constant.
            excess = atom * np.expm1(log_power.real) if atom else np.exp(log_power.real + log_atom)
            power = excess * np.cos(angle) - 2.0 * atom * np.sin(0.5 * angle) ** 2
            power = power + 1j * ((excess + atom) * np.sin(angle))
            errors = 48.0 * ROUNDING * log_sizes * np.exp(log_bound + log_atom)
            errors += (fft_error + 40.0 * ROUNDING) * np.abs(power)
            for law_error, log_modulus in law_errors:
                errors += law_error * np.exp(log_bound + log_atom - log_modulus)
        entries = scipy.fft.irfft(power, size)
        entries[0] += atom
        # Each frequency of rfft except the first and last counts twice.
        mean_error = 1.0001 * (2.0 * float(errors.sum()) / size + WRAP)
        return Power(
            np.roll(entries, (atom_index - self.low) % size), log_unit, mean_error, rounding
        )


def _reach(masses: Masses, step: float, tilt: float) -> tuple[int, int]:
    """Returns indices outside which the tilted sum has total probability <= WRAP.

    It uses Chernoff's bound at a few tilts a > 0 and b < 0, added to `tilt`.
    """
    laws, total_mean, variance = [], 0.0, 0.0
    for mass, count in masses:
        loss = np.arange(mass.size) * step
        weight = tilted(mass, loss * tilt)[0]
        mean = float(np.dot(weight, loss))
        total_mean += count * mean
        variance += count * max(float(np.dot(weight, (loss - mean) ** 2)), step**2)
        laws.append((loss - mean, weight, count))
    reach = []
    for sign in (-1.0, 1.0):
        best = sum(count * max(sign * loss[0], sign * loss[-1]) for loss, _, count in laws)
        # The bound is quasi-convex in the tilt: search up from the normal law's tilt, then down.
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


def sums_from(x: Floats) -> Floats:
    """Returns x[k] + x[k + 1] + ... for each k, followed by 0."""
    return np.append(np.cumsum(x[::-1])[::-1], 0.0)


def sum_rounding(drift: float, terms: int) -> float:
    """Bounds the relative error of a sum of positive terms.

    Args:
      drift: Bound on the relative error of each term.
      terms: Number of terms.
    """
    return 2.0 * (drift + (terms + 8.0) * ROUNDING)


def _minimiser(bound: Callable[[float], float]) -> float:
    """Estimates the minimiser of a quasi-convex function of the logarithm of a tilt."""
    low, high = math.log(1e-3), math.log(1e6)
    for points in (16, 6, 6):
        grid = np.linspace(low, high, points).tolist()
        best = int(np.nanargmin([bound(x) for x in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return float(grid[best])


def tilted(mass: Floats, exponent: Floats) -> tuple[Floats, float]:
    """Returns mass e^exponent scaled to sum 1, and the log of the sum.

    Args:
      mass: Masses: float64[atoms].
      exponent: Exponents of the tilt: float64[atoms].
    """
    with np.errstate(divide="ignore"):
        log_weight = np.log(mass) + exponent
    top = float(log_weight.max())
    weight = np.exp(log_weight - top)
    total = float(weight.sum())
    return weight / total, top + math.log(total)


def _log_mean(loss: Floats, mass: Floats, tilt: float) -> float:
    """Returns log E[e^{tilt loss}], rounded up by more than floating point may lose."""
    exponent = loss * tilt
    top = float(exponent.max())
    total = float(np.dot(mass, np.exp(exponent - top)))
    return top + math.log(max(total, 1e-300)) + 1e-14
