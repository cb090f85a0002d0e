"""One epoch of balls-and-bins by inverting a Laplace transform: many digits where delta is large.

V = (X_1 + ... + X_T) / T, X_t log-normal of mean 1, has the transform E[e^{-z V}] = L(z / T)^T, and
its put E[(b - V)_+] the transform E[e^{-z V}] / z^2.
Proof and errors: docs/explanation/averages-by-inverting-transforms.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from accounting.algebra.moments import (
    ROUNDING,
    Complex,
    NotInvertibleError,
    Real,
    log1p,
    second_order,
)

_BLOCK = 2**17
_MOST_TERMS = 6e6
"""Largest number of (node of z) x (node of u): a second or two."""
_LARGEST_EPSILON = 5.0


class Average:
    """The put of V, summed on the line Re z = `alias` / `window`, with its errors.

    Args:
      sigma: The noise multiplier, X = exp(u / sigma - 1 / (2 sigma^2)), u standard normal.
      bins: T >= 2.
      window: Above every b that is asked for.
      rule: The trapezoid rule's errors are about e^-this.
      alias: Errors by aliases are about e^-this.
      end: Errors by the sum's end are about e^-this.

    Raises:
      NotInvertibleError: If the sum would have more than _MOST_TERMS terms.
    """

    def __init__(
        self,
        sigma: float,
        bins: int,
        window: float,
        *,
        rule: float = 60.0,
        alias: float = 36.0,
        end: float = 42.0,
    ) -> None:
        self.bins, self.tilt = bins, alias / window
        variance = math.expm1(min(1.0 / sigma**2, 700.0))
        self._variance = variance / bins
        # Nodes of u = x - i height: there X turns against i z, and e^{-z X} oscillates less.
        self._height = height = min(1.0, 0.25 * math.pi * sigma)
        step, reach = 2.0 * math.pi * height / rule, math.sqrt(2.0 * rule)
        if (2.0 * reach + 1.0 / sigma) / step > _MOST_TERMS / 16.0 or 1.0 / sigma > 12.0:
            raise NotInvertibleError("one release's law is too wide")
        x = np.arange(-math.ceil(reach / step), math.ceil((reach + 1.0 / sigma) / step) + 1) * step
        y, angle = (x - 0.5 / sigma) / sigma, height / sigma
        self._sigma, self._power = sigma, np.exp(y)
        self._density = step / math.sqrt(2.0 * math.pi) * np.exp(-0.5 * x * x)
        self._weight = self._density * np.exp(0.5 * height**2 + 1j * height * x)
        real = np.expm1(y) * math.cos(angle) - 2.0 * math.sin(0.5 * angle) ** 2
        self._excess = real - 1j * self._power * math.sin(angle)

        most = math.exp(self.tilt / bins)
        """Upper bound on |e^{-w}| on the strip, w = s (X - 1)."""
        size, y_error = np.abs(self._excess), 8.0 * ROUNDING * (np.abs(x) + 0.5 / sigma) / sigma
        error = self._power * y_error
        error += 16.0 * ROUNDING * (np.abs(np.expm1(y)) + angle * (angle + self._power))
        relative = ROUNDING * (100.0 + 8.0 * (x * x + height**2) + x.size)
        weight = np.abs(self._weight)
        self._rounding = (
            float(np.dot(weight, 3.0 * most * relative * size + (1.0 + most) * error)),
            float(np.dot(weight, most * (relative * size**2 + error * size))),
        )
        missing = 2.0 * (step + 1.0 / reach) * math.exp(0.5 * height**2 - 0.5 * reach**2)
        self._rule = (1.0 + math.exp(2.0 * height**2)) / math.expm1(rule) + missing
        self._most, self._beyond = most, 128.0 * math.exp(-rule)

        mantissa, exponent = math.frexp(2.0 * math.pi / window)
        self._spacing = math.ldexp(math.floor(mantissa * 2**24) / 2**24, exponent)
        self._window = 2.0 * math.pi / self._spacing
        high = self._spacing
        goal = 0.5 * math.log(min(self._variance, 1.0)) - end
        while self._log_end(high) > goal:
            high *= 1.2
            if high / self._spacing * x.size > _MOST_TERMS:
                raise NotInvertibleError("one release's transform decays too slowly")
        terms = math.ceil(high / self._spacing)
        self._end = self._log_end(terms * self._spacing)
        self._z = self.tilt + 1j * self._spacing * np.arange(terms + 1)
        rows = max(1, _BLOCK // x.size)
        blocks = [self._log_power(self._z[i : i + rows]) for i in range(0, terms + 1, rows)]
        self._log, self._error = (np.concatenate(block) for block in zip(*blocks, strict=True))

    def _log_power(self, z: Complex) -> tuple[Complex, Real]:
        """Returns log E[e^{-z (V - 1)}], and a bound on its error; of its size, where infinite."""
        s = z / self.bins
        w = s[:, None] * self._excess
        small = np.abs(w) < 1.0
        with np.errstate(under="ignore"):
            values = np.exp(-w) - 1.0 + w
        values[small] = second_order(-w[small])
        excess = values @ self._weight
        size = np.abs(s)
        error = np.minimum(self._rounding[0] * size, self._rounding[1] * size**2)
        error += self._rule * (self._most + 1.0 + 2.0 * size) + 40.0 * ROUNDING * np.abs(excess)
        modulus = np.abs(1.0 + excess)
        lost = ~(2.0 * self.bins * error < 0.1 * modulus)
        with np.errstate(divide="ignore"):
            log = self.bins * np.where(lost, np.log(modulus + error), log1p(excess))
            log_error = 2.0 * self.bins * error / modulus
        log_error += 8.0 * ROUNDING * np.abs(log)
        return log, np.where(lost, math.inf, log_error)

    def _log_end(self, y: float) -> float:
        """Returns a bound on log |E[e^{-z (V - 1)}]| / (pi y), for all Im z >= `y`."""
        angles = np.geomspace(1e-7, 0.5 * math.pi, 48)
        rate = (self.tilt * np.cos(angles) + y * np.sin(angles)) / self.bins
        with np.errstate(under="ignore"):
            moments = np.exp(-rate[:, None] * self._power) @ self._density
        log = np.log(moments * (1.0 + 1e-11) + self._beyond) + 0.5 * (angles * self._sigma) ** 2
        return self.tilt + self.bins * float(log.min()) - math.log(math.pi * y)

    def bound_put(self, excess: float) -> tuple[float, float]:
        """Bounds E[(b - V)_+] for b = 1 + `excess`, below the window."""
        if not 1.0 + excess < 0.99 * self._window:
            raise NotInvertibleError("b is outside the window")
        lost = np.isinf(self._error)
        turn = self._z * excess
        with np.errstate(under="ignore"):
            terms = np.exp(self._log + turn) / self._z**2
        size = np.abs(terms) * (self._spacing / math.pi)
        error = np.where(lost, 1.0, self._error) + ROUNDING * (100.0 + 8.0 * np.abs(turn))
        error = float(np.dot(size, np.where(lost, 2.0, error)))
        terms = np.where(lost, 0.0, terms.real)
        total = (self._spacing / math.pi) * (float(terms.sum()) - 0.5 * float(terms[0]))
        error += 8.0 * ROUNDING * float(size.sum()) * math.log2(size.size + 2.0)
        error += math.exp(self._end + self.tilt * excess) * (1.0 + 1e-9)
        fall = math.exp(-self.tilt * self._window)
        alias = excess * fall / (1.0 - fall) + self._window * fall / (1.0 - fall) ** 2
        beyond = min(1.0, 0.25 * self._variance / (excess + self._window))
        error += 1e-9 * abs(alias)
        return total - alias - error - 1.001 * fall * beyond, total - alias + error


@lru_cache(maxsize=32)
def _average(sigma: float, bins: int, window: float) -> Average:
    return Average(sigma, bins, window)


def average_delta(sigma: float, bins: int, epsilon: float) -> tuple[float, float]:
    """Bounds the larger of both directions' delta of one epoch.

    Args:
      sigma: Noise multiplier.
      bins: T >= 2, number of bins.
      epsilon: Epsilon >= 0 at which delta is bounded.

    Raises:
      NotInvertibleError: If the sum would have too many terms, or `epsilon` is too large for it.
    """
    if epsilon > _LARGEST_EPSILON:
        raise NotInvertibleError("epsilon is so large that nothing is left of the digits")
    average = _average(sigma, bins, 4.0 * 2.0 ** max(0, math.ceil((epsilon - 0.5) / math.log(2.0))))
    above, below = math.expm1(epsilon), math.expm1(-epsilon)
    bounds = [
        (factor * low - paid - slack, factor * high - paid + slack)
        for factor, paid, (low, high) in (
            (1.0, above, average.bound_put(above)),
            (math.exp(epsilon), 0.0, average.bound_put(below)),
        )
        for slack in [8.0 * ROUNDING * factor * (1.0 + epsilon) * (abs(high) + above)]
    ]
    return max(0.0, *(low for low, _ in bounds)), min(1.0, max(high for _, high in bounds))
