r"""Composition of many equal releases: a certified convolution power by tilted FFT.

**What is computed.** A likelihood ratio on a grid gives, for each direction, a loss distribution:
masses m_k under the first law at losses base + k h (+ an offset), and partners s_k, the masses
under the second law times e^{base + k h}; s = m where offsets are 0. After T independent releases

    delta(eps) = inf_T + sum_K ( m*_K - e^{eps - (T base + K h)} s*_K )_+

with m*, s* the T-fold convolution powers: exact for an upper ratio (all offsets 0), and a lower
bound for a lower one, as the sum of the T indices is a post-processing of the releases.

**Tilting.** FFTs have absolute, not relative, errors. The masses are first multiplied by
e^{t k h}/Z, which makes the part that matters for (eps, delta) the bulk of the power; afterwards
that is undone by Z^T e^{-t K h}. Errors of the bulk are then relative errors of delta, however
small delta is, as long as the loss has exponential moments there: the tail of a sum in which one
large loss is likelier than many small ones (as under sampling with a tiny probability, at a tiny
delta) is not the bulk at any tilt. The result is then still a bound; `floor` says how much of it
is the error's.

**Errors.** Let w be the tilted masses (sum 1), N a power of two, u = 2^-53. A computed FFT of w
is off by at most a sqrt(N) |w|_2 in 2-norm, a = 8 u log2 N (Higham, "Accuracy and Stability of
Numerical Algorithms", 2002, Theorem 24.2, with twiddle factors good to u). With M the computed
modulus plus that, Cauchy-Schwarz bounds the error of each entry of the T-th power's inverse by
T a |w|_2 sqrt(sum M^{2(T-1)} / N), the rounding of the power (repeated squaring) by
8 T u (sum M^T) / N, and the inverse FFT's own by a times the 2-norm of the result. Mass outside
the window of N indices wraps around: it is at most WRAP by Chernoff's bound. Each entry is moved
by the sum of these, outward; the mass above the window goes to infinity (upper) or is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from accounting.likelihood_ratio import ROUNDING, UNDERFLOW, VALUE_DRIFT, LikelihoodRatio
from accounting.profile import Direction

Array = NDArray[np.floating]

WRAP = 1e-18
"""Bound on the tilted mass outside the window of the FFT."""
RELEASE_DRIFT = 1e-13
"""Bound on the floating-point error of one release's loss: of logarithms of its masses."""
LARGEST = 2**22
"""Largest number of indices of a window."""


class CompositionSizeError(MemoryError):
    """The grid of a composition would have more points than are computed."""


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """The law of the privacy loss of one release, in one direction.

    Attributes:
      upper: Whether it bounds the true one from above (partners = masses) or from below.
      step: Distance of losses.
      base: Loss of index 0.
      masses: Mass under the first law, float64 [atoms].
      partners: Mass under the second law times e^(base + k step), float64 [atoms].
      infinity: Mass of the first law on which the second has none.
      drift: Bound on the relative error of each mass.
    """

    upper: bool
    step: float
    base: float
    masses: Array
    partners: Array
    infinity: float
    drift: float

    @classmethod
    def of(cls, ratio: LikelihoodRatio, direction: Direction) -> LossDistribution:
        """Reads H(P || Q) ('remove') or H(Q || P) ('add') off a likelihood ratio."""
        upper = ratio.side == "upper"
        if direction == "remove":
            masses, partners = ratio.p, ratio.p * np.exp(-ratio.offset)
            base, infinity = ratio.log_scale + ratio.start * ratio.step, ratio.infinity
        else:
            masses, partners = ratio.q[::-1], (ratio.q * np.exp(ratio.offset))[::-1]
            last = ratio.start + ratio.q.size - 1
            base, infinity = -(ratio.log_scale + last * ratio.step), ratio.zero
        return cls(upper, ratio.step, base, masses, partners, infinity, ratio.drift)

    def tilt_for_delta(self, count: int, delta: float) -> float:
        """Returns the tilt t > 0 at which Chernoff's bound on epsilon at `delta` is least."""
        loss, mass = self._coarse()

        def bound(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            return (count * _log_mean(loss, mass, tilt) - math.log(delta)) / tilt

        return _minimise(bound)

    def tilt_for_epsilon(self, count: int, epsilon: float) -> float:
        """Returns the tilt t > 0 at which Chernoff's bound on delta at `epsilon` is least."""
        loss, mass = self._coarse()

        def bound(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            return count * _log_mean(loss, mass, tilt) - tilt * epsilon

        return _minimise(bound)

    def compose(self, count: int, tilt: float) -> ComposedLoss:
        """Returns the loss of `count` independent releases, computed at one `tilt`."""
        index = np.arange(self.masses.size)
        low, size = self._window(count, tilt)
        masses, scale, error = _power(self.masses, index * self.step * tilt, count, low, size)
        if self.upper:
            partners, partner_error = masses, error
            masses = masses + error
        else:
            partners, partner_scale, partner_error = _power(
                self.partners, index * self.step * tilt, count, low, size
            )
            # Both powers are read in the units of the first.
            ratio = math.exp(partner_scale - scale)
            masses = np.maximum(masses - error, 0.0)
            partners = (np.maximum(partners, 0.0) + partner_error) * ratio
        offsets = np.arange(size) + float(low)
        log_unit = scale - offsets * self.step * tilt
        infinity = -math.expm1(count * math.log1p(-min(self.infinity, 1.0 - 1e-16)))
        if self.upper:
            # Above the window the tilted mass is <= WRAP, and e^{-t K h} below its last value.
            infinity += WRAP * math.exp(min(float(log_unit[-1]), 700.0))
        drift = count * (self.drift + 64.0 * ROUNDING) + 1e-12
        loss = count * self.base + offsets * self.step
        unit = np.exp(np.minimum(log_unit, 700.0))
        return ComposedLoss(
            self.upper,
            loss,
            masses * unit,
            partners * unit,
            error * unit,
            infinity,
            drift,
            VALUE_DRIFT + count * RELEASE_DRIFT,
        )

    def _coarse(self) -> tuple[Array, Array]:
        """Returns some thousands of atoms with about the same law: to choose a tilt by."""
        block = max(1, self.masses.size // 4096)
        starts = np.arange(0, self.masses.size, block)
        return self.base + starts * self.step, np.add.reduceat(self.masses, starts)

    def _window(self, count: int, tilt: float) -> tuple[int, int]:
        """Returns the first index and the size, a power of two, of the FFT's window.

        The tilted sum of `count` indices is outside with probability <= WRAP, by Chernoff's bound
        at a few tilts a > 0, b < 0 on top of `tilt`.
        """
        loss = np.arange(self.masses.size) * self.step
        weight = _tilted(self.masses, loss * tilt)[0]
        mean = float(np.dot(weight, loss))
        deviation = math.sqrt(max(float(np.dot(weight, (loss - mean) ** 2)), self.step**2))
        reach = []
        for sign in (-1.0, 1.0):
            centred = sign * (loss - mean)
            farthest = count * max(centred[0], centred[-1])
            best = farthest
            for multiple in 2.0 ** np.arange(-8.0, 4.5, 0.5):
                extra = multiple * 9.0 / (math.sqrt(count) * deviation)
                log_mean = _log_mean(centred, weight, extra)
                best = min(best, (count * log_mean - math.log(WRAP / 4.0)) / extra)
            reach.append(best)
        low = math.floor((count * mean - reach[0]) / self.step) - 1
        high = math.ceil((count * mean + reach[1]) / self.step) + 1
        low, high = max(low, 0), min(high, count * (self.masses.size - 1))
        size = 1 << max(4, (high - low).bit_length())
        if size > LARGEST:
            raise CompositionSizeError(
                f"a composition needs {size} grid points, more than {LARGEST}"
            )
        return low, size


def compose_both(
    ratio: LikelihoodRatio, count: int, *, delta: float | None = None, epsilon: float | None = None
) -> tuple[ComposedLoss, ComposedLoss]:
    """Returns the losses, in both directions, of `count` releases, sharp near `delta` or `epsilon`.

    Raises:
      CompositionSizeError: If the composition's grid would have more than LARGEST points.
    """
    parts = []
    directions: tuple[Direction, Direction] = ("remove", "add")
    for direction in directions:
        loss = LossDistribution.of(ratio, direction)
        if delta is not None:
            tilt = loss.tilt_for_delta(count, delta)
        elif epsilon is not None:
            tilt = loss.tilt_for_epsilon(count, epsilon)
        else:
            raise ValueError("give delta or epsilon: the point at which the result is to be sharp")
        parts.append(loss.compose(count, tilt))
    return parts[0], parts[1]


@dataclass(frozen=True, eq=False)
class ComposedLoss:
    """The loss of a whole composition, in one direction, with its errors already outward.

    Attributes:
      upper: Whether it bounds the true one from above or from below.
      loss: Losses, ascending, float64 [atoms].
      masses: Mass under the first law (a bound, on this side), float64 [atoms].
      partners: Mass under the second law times e^loss (a bound, on the other side).
      errors: What the FFT may have put wrong in each mass, float64 [atoms].
      infinity: Mass at infinity.
      drift: Bound on the relative error of each mass.
      shift: Bound on the floating-point error of each loss (besides its own rounding).
    """

    upper: bool
    loss: Array
    masses: Array
    partners: Array
    errors: Array
    infinity: float
    drift: float
    shift: float

    def floor(self, epsilon: float) -> float:
        """Returns how much the FFT's certified error may contribute to delta at `epsilon`."""
        above = self.loss > epsilon
        return float(np.dot(self.errors[above], -np.expm1(epsilon - self.loss[above])))

    def delta(self, epsilon: float) -> float:
        """Bounds the hockey-stick divergence at `epsilon`."""
        if self.upper:
            moved = epsilon - self.shift * max(1.0, epsilon)
            if moved < self.loss[0]:
                return 1.0  # the window was laid for a larger epsilon
            first = int(np.searchsorted(self.loss, moved, side="right"))
            parts = -np.expm1(moved - self.loss[first:])
            value = self.infinity + float(np.dot(self.masses[first:], parts))
            return min(1.0, value * math.exp(2.0 * self.drift) + UNDERFLOW)
        moved = epsilon + self.shift * max(1.0, epsilon)
        first = int(np.searchsorted(self.loss, moved - 1.0))
        factor = np.exp(np.minimum(moved - self.loss[first:], 2.0)) * (1.0 + 2.0 * self.drift)
        value = np.maximum(self.masses[first:] - factor * self.partners[first:], 0.0).sum()
        return max(0.0, float(value) * (1.0 - 2.0 * self.drift) - UNDERFLOW)


def _minimise(bound: Callable[[float], float]) -> float:
    """Returns exp of the minimiser of a quasi-convex function of the logarithm of a tilt.

    By bisection on the side to which it falls: SciPy's optimizers would double our import time.
    """
    grid = np.linspace(math.log(1e-3), math.log(1e6), 60)
    values = [bound(x) for x in grid]
    best = int(np.nanargmin(values))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, grid.size - 1)])
    while high - low > 1e-4:
        middle = (low + high) / 2
        falls = bound(middle - 1e-5) > bound(middle + 1e-5)
        low, high = (middle, high) if falls else (low, middle)
    return math.exp((low + high) / 2)


def _tilted(mass: Array, exponent: Array) -> tuple[Array, float]:
    """Returns mass e^exponent scaled to sum 1, and the log of the sum."""
    with np.errstate(divide="ignore"):
        log_weight = np.log(mass) + exponent
    top = float(log_weight.max())
    weight = np.exp(log_weight - top)
    total = float(weight.sum())
    return weight / total, top + math.log(total)


def _log_mean(loss: Array, mass: Array, tilt: float) -> float:
    """Returns log E[e^{tilt loss}], rounded up by more than floating point may lose."""
    exponent = loss * tilt
    top = float(exponent.max())
    total = float(np.dot(mass, np.exp(exponent - top)))
    return top + math.log(max(total, 1e-300)) + 1e-14


def _power(
    mass: Array, exponent: Array, count: int, low: int, size: int
) -> tuple[Array, float, float]:
    """Returns the tilted convolution power in the window, the log of its unit, and its error.

    Entry i is the power's entry low + i, tilted and scaled; each is off by at most the error.
    """
    weight, log_sum = _tilted(mass, exponent)
    if weight.size > size:
        weight = np.concatenate([weight, np.zeros(-weight.size % size)]).reshape(-1, size).sum(0)
    norm = float(np.linalg.norm(weight))
    relative = 8.0 * ROUNDING * math.log2(size)
    spectrum = fft.rfft(weight, size)
    modulus = np.abs(spectrum) + relative * math.sqrt(size) * norm
    with np.errstate(under="ignore", divide="ignore"):
        log_modulus = np.log(modulus)
        # Each frequency of rfft but the ends stands for two.
        previous = 2.0 * float(np.exp(2.0 * (count - 1) * log_modulus).sum()) / size
        this = 2.0 * float(np.exp(count * log_modulus).sum()) / size
    power, square, remaining = np.ones_like(spectrum), spectrum, count
    while remaining:
        if remaining & 1:
            power = power * square
        square, remaining = square * square, remaining >> 1
    result = fft.irfft(power, size)
    error = count * relative * norm * math.sqrt(previous) + 8.0 * count * ROUNDING * this
    error += relative * float(np.linalg.norm(result)) + WRAP
    return np.roll(result, -(low % size)), count * log_sum, error
