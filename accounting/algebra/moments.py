"""One release's moments M(z) = E[X^z] on a line of complex numbers, with proved errors.

X = 1 - q + q exp(Y), Y ~ N(-1/(2 s^2), 1/s^2), by the trapezoid rule; a release without sampling,
at noise r, has the moments e^{z (z - 1) / (2 r^2)}.
Proof and errors: docs/explanation/composition-by-inverting-moments.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from accounting.roots import falling_root

Real = NDArray[np.floating]
Complex = NDArray[np.complexfloating]

ROUNDING = 2.0**-53
MOST_TERMS = 2.0e7
"""Largest number of (node of z) x (node of u) that is computed."""
_FACTORIALS = [1.0 / math.factorial(k) for k in range(2, 21)]


class NotInvertibleError(ValueError):
    """The sum would have too many terms: one release's law decays too slowly for it."""


@dataclass(frozen=True)
class Releases:
    """`count` releases at `noise_multiplier`, each with the example at `sampling_prob` < 1.

    One more release has noise multiplier `release` and every example; infinity means no release.
    """

    noise_multiplier: float
    sampling_prob: float
    count: int
    release: float = math.inf

    def log_power(self, z: Any, log_moment: Any) -> Any:
        """Returns log E[X^z] of all releases from one release's `log_moment`."""
        return self.count * log_moment + self.log_beside(z)

    def log_beside(self, z: Any) -> Any:
        """Returns log E[X^z] of the further release.

        It is good to 8 roundings, and its real part falls in Im z.
        """
        mu = 1.0 / self.release
        return 0.5 * (mu * z) * (mu * (z - 1.0))

    def log_ratio(self, u: Real, height: float) -> Complex:
        """Returns log X at u + i `height`: complex128[nodes].

        Relative errors of `|X - 1|` and log X are some 40 roundings, and the part of Y's own error.

        Args:
          u: Real parts of the nodes: float64[nodes].
          height: Imaginary part, 0 <= height < pi s.
        """
        sigma, rate = self.noise_multiplier, self.sampling_prob
        y, angle = (u - 0.5 / sigma) / sigma, height / sigma
        large = y > -math.log(rate)
        out = np.empty(y.shape, np.complex128)
        power = np.exp(y[~large])
        real = np.expm1(y[~large]) * math.cos(angle) - 2.0 * math.sin(0.5 * angle) ** 2
        imaginary = rate * power * math.sin(angle)
        # Where X is near 1 - q the sum of positive parts is sharp, the difference from 1 is not.
        real_part = (1.0 - rate) + rate * power * math.cos(angle)
        modulus = np.where(
            real_part < 0.5,
            np.log(np.hypot(real_part, imaginary)),
            0.5 * np.log1p(np.maximum(rate * real * (2.0 + rate * real) + imaginary**2, -0.99)),
        )
        out[~large] = modulus + 1j * np.arctan2(imaginary, real_part)
        unsampled_share = (1.0 - rate) / rate * np.exp(-y[large] - 1j * angle)
        out[large] = math.log(rate) + y[large] + 1j * angle + log1p(unsampled_share)
        return out

    def slope(self, u: Any) -> Any:
        """Returns d log X / d Y at real `u`: in (0, 1)."""
        sigma, rate = self.noise_multiplier, self.sampling_prob
        return scipy.special.expit((u - 0.5 / sigma) / sigma + math.log(rate) - math.log1p(-rate))

    def height(self, tilt: float) -> float:
        """Returns the height of the line of u for Re z = `tilt`: <= 1, and Im Y <= 1.5 there.

        For a negative tilt |X|^tilt grows with the height; the angle keeps it within some e^2.
        """
        angle = 1.5 if tilt >= -1.0 else 2.0 / math.sqrt(-tilt)
        return min(1.0, self.noise_multiplier * min(1.5, angle))


class Line:
    """Nodes u = x + i height for M(z), Re z = `tilt`, Im z >= 0."""

    def __init__(self, releases: Releases, tilt: float, height: float, accuracy: float) -> None:
        sigma, rate = releases.noise_multiplier, releases.sampling_prob
        self.tilt = tilt
        angle = height / sigma
        # log of max |X|^c / X_0^c on this line, and on the upper edge of the strip.
        log_line, log_edge = (
            min(tilt, 0.0) * math.log(math.cos(0.5 * k * angle)) for k in (1.0, 2.0)
        )
        accuracy += 2.0 * height**2 + log_edge
        step = 2.0 * math.pi * height / accuracy
        reach = math.sqrt(2.0 * accuracy)
        low, high = 0.0, max(tilt, 1.0) / sigma
        if tilt < 0.0:
            low, _ = falling_root(
                lambda u: tilt * float(releases.slope(u)) / sigma - u,
                0.0, lambda u: 1e-12 * max(1.0, -u), low=tilt / sigma,
            )  # fmt: skip
        if (high - low + 2.0 * reach) / step > MOST_TERMS / 8.0:
            raise NotInvertibleError("one release's moments need too many nodes")
        x = np.arange(math.floor((low - reach) / step), math.ceil((high + reach) / step) + 1) * step
        log_x = releases.log_ratio(x, height)
        log_weight = -0.5 * (x * x - height**2) + math.log(step / math.sqrt(2.0 * math.pi))
        real = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5 / sigma) / sigma)
        size = log_weight + np.maximum(np.maximum(tilt * real, real), 0.0)
        top = float(size.max())
        significant = size > top - accuracy - math.log(x.size)
        missing = float(np.exp(size[~significant] - top).sum())
        # The greatest value is at a stationary point, at most step / 2 from a node.
        between = 0.125 * step**2 * (1.0 + 0.25 * max(abs(tilt), 1.0) / sigma**2)
        log_left_out = -0.5 * reach**2 + between + math.log1p(1.0 / (reach * step))
        missing += 6.0 * math.exp(min(log_left_out, 700.0))
        x, log_x, log_weight = x[significant], log_x[significant], log_weight[significant]

        self.scale = max(0.0, float((log_weight + tilt * log_x.real).max()))
        self._log_x, self._phase = log_x, -1j * height * x
        self._log_weight = log_weight
        log_largest = log_weight + np.maximum(np.maximum(tilt * log_x.real, log_x.real), 0.0)
        y_error = 8.0 * ROUNDING * (np.abs(x) / sigma + 0.5 / sigma**2)
        modulus = np.abs(log_x)
        share = np.exp(np.minimum(math.log(rate) + (x - 0.5 / sigma) / sigma - log_x.real, 1.0))
        x_error = share * y_error + 8.0 * ROUNDING * np.where(
            log_x.real > 0.5, abs(math.log(rate)) + modulus, modulus
        )
        self._modulus, self._log_x_error = modulus, x_error + 40.0 * ROUNDING * modulus
        largest = np.exp(log_largest - self.scale)
        relative, near = (200.0 + 8.0 * x * x) * ROUNDING, modulus < 1.0
        by_second_order = relative * 0.5 * modulus**2 + modulus * x_error
        by_size = relative * (2.0 + modulus) + 2.0 * x_error
        self.rounding = (
            float((largest * by_size)[~near].sum()),
            float((largest * by_second_order)[near].sum()),
        )
        """Error of M e^{-scale} by floating point: these times 1 + |z| and |z| (|z| + 1)."""
        weight = np.exp(log_weight + self._phase - self.scale)
        self._weight = weight
        small = modulus < 1.0
        second = np.empty_like(log_x)
        second[small] = weight[small] * second_order(log_x[small])
        second[~small] = np.exp(
            log_weight[~small] + self._phase[~small] + log_x[~small] - self.scale
        ) - weight[~small] * (1.0 + log_x[~small])
        self._second_of_x = complex(second.sum())
        # |z| and 1 in the bounds are <= 2 (1 + |z|) in all; M(c) <= 1.1 (its sum + 1).
        moment = 1.1 * (
            float(np.exp(log_weight + tilt * log_x.real - self.scale).sum())
            * math.exp(0.5 * height**2)
            + math.exp(-self.scale)
        )
        edge = (1.0 + math.exp(2.0 * height**2 + log_edge)) / math.expm1(accuracy)
        self.truncation = edge * (moment + 2.0 * math.exp(-self.scale)) + 2.0 * missing * math.exp(
            min(top - self.scale + log_line, 700.0)
        )
        """Error of M e^{-scale} by the rule and by nodes left out: this times 1 + |z|."""

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self._log_x.size)

    def excess(self, z: Complex) -> Complex:
        """Returns (M(z) - 1) e^{-scale} for each z of real part `tilt`, Im z >= 0."""
        product = z[:, None] * self._log_x
        small = np.abs(product) < 1.0
        terms = np.exp((self._log_weight - self.scale) + self._phase + product)
        terms -= self._weight * (1.0 + product)
        if small.any():
            row, column = np.nonzero(small)
            terms[row, column] = self._weight[column] * second_order(product[row, column])
        return terms.sum(axis=1) - z * self._second_of_x

    def log_moment(self, z: Complex) -> tuple[Complex, Real]:
        """Returns log M(z), and a bound on the error of each."""
        excess, size = self.excess(z), np.abs(z)
        error = (self.rounding[1] * size + self.rounding[0] + self.truncation) * (1.0 + size)
        if self.scale == 0.0:
            log_moment = log1p(excess)
            modulus = np.abs(1.0 + excess)
            error = error + 30.0 * ROUNDING * np.abs(excess)
        else:
            excess_from_one = excess + math.exp(-self.scale)
            modulus = np.abs(excess_from_one)
            with np.errstate(divide="ignore"):
                log_moment = self.scale + np.log(excess_from_one)
            error = error + 30.0 * ROUNDING * (1.0 + self.scale) * modulus
        with np.errstate(divide="ignore", invalid="ignore"):
            return log_moment, np.where(error < 0.5 * modulus, 2.0 * error / modulus, math.inf)

    def log_decay(self, y: float) -> float:
        """Returns a bound on log |M(tilt + i y')| for all y' >= `y`."""
        log_terms = self._log_weight + self.tilt * self._log_x.real - y * self._log_x.imag
        exponents = np.abs(self._log_weight) + (abs(self.tilt) + y) * self._modulus + self.scale
        log_terms += (abs(self.tilt) + y) * self._log_x_error + 8.0 * ROUNDING * exponents
        total = float(np.exp(log_terms - self.scale).sum()) * (1.0 + 1e-11)
        return self.scale * (1.0 + 4.0 * ROUNDING) + math.log(total + self.truncation)


def log1p(x: Complex) -> Complex:
    """Returns log(1 + x) with a relative error of at most 40 unit roundoffs.

    A modulus |1 + x| below 1e-300 counts as 1e-300.
    """
    real, imaginary = x.real, x.imag
    square = np.maximum(real * (2.0 + real) + imaginary**2, -0.99)
    modulus = np.maximum(np.hypot(1.0 + real, imaginary), 1e-300)
    log_modulus = np.where(real < -0.5, np.log(modulus), 0.5 * np.log1p(square))
    return log_modulus + 1j * np.arctan2(imaginary, 1.0 + real)


def second_order(x: Complex) -> Complex:
    """e^x - 1 - x for |x| < 1."""
    total = np.full(x.shape, _FACTORIALS[-1], np.complex128)
    for factor in _FACTORIALS[-2::-1]:
        total *= x
        total += factor
    return total * x * x
