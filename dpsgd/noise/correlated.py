"""Gaussian noise that is correlated over a band of steps, so that its sums over steps are small.

Noise whose increments cancel adds up to less, at the same cost with minimum separation of an
example's steps: docs/explanation/correlated-noise.md. It imports no JAX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpsgd.noise.base import Noise

MAX_SPREAD = 32.0
"""Most standard deviations of independent noise that correlated noise may have in a step."""


@dataclass(frozen=True)
class BandedToeplitz(Noise):
    r"""Noise n of which every column of M is (c_0, ..., c_{b-1}), from the diagonal down.

    .. math:: n_t = \left(z_t - c_1 n_{t-1} - \dots - c_{b-1} n_{t-b+1}\right) / c_0

    with n of steps before the first 0, and z_t standard normal, a pure function of key, step, leaf
    and coordinate (`dpsgd.noise.gaussian`). The last b - 1 of the n are kept, in float32: b - 1
    times the memory of the parameters.

    Attributes:
      coefficients: c_0, ..., c_{b-1}, by any factor: they are divided by their norm, so that the
        squares add up to 1, or to less by 2^-48 at most.

    >>> noise = BandedToeplitz((4.0, 3.0))
    >>> print(noise, [round(c, 9) for c in noise.coefficients])
    BandedToeplitz noise of 2 bands [0.8, 0.6]

    Raises:
      ValueError: If there is no coefficient, one is not finite, the first is not positive, or the
        noise would grow from step to step: c_0 + c_1 x + ... has a zero in \|x\| <= 1, or near.

    Source: C. A. Choquette-Choo et al., (Amplified) Banded Matrix Factorization (NeurIPS 2023).
    """

    coefficients: Sequence[float]

    def __post_init__(self) -> None:
        given = tuple(map(float, self.coefficients))
        if not given or not all(map(math.isfinite, given)) or not given[0] > 0:
            raise ValueError(
                "coefficients must be finite numbers, at least one, and the first > 0, got "
                f"{given!s:.60}"
            )
        object.__setattr__(self, "coefficients", _normalised(given))
        if not self.spread <= MAX_SPREAD:
            raise ValueError(
                f"noise of the coefficients {given!s:.60} grows from step to step, or to "
                f"more than {MAX_SPREAD:g} times that of independent noise: c_0 + c_1 x + ... must "
                "have its zeros well outside |x| <= 1"
            )

    def __str__(self) -> str:
        return f"BandedToeplitz noise of {self.bands} bands"

    @property
    def bands(self) -> int:
        """Number b of coefficients."""
        return len(self.coefficients)

    @property
    def spread(self) -> float:
        """Limit of n_t's standard deviation over that of independent noise; infinite if none."""
        return _spread(tuple(self.coefficients))

    def least_norm(self) -> float:
        """Returns the norm of the coefficients that the program computes with, rounded down."""
        return _least_norm(tuple(self.coefficients))

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns z = M n."""
        found = self.coefficients[0] * noises
        for lag, c in enumerate(self.coefficients[1 : len(noises)], 1):
            found[lag:] += c * noises[:-lag]
        return found

    def describe(self) -> dict[str, Any]:
        """Returns the coefficients, exact in JSON."""
        return {"coefficients": list(self.coefficients)}

    def init(self, like: Any) -> Any:
        """Returns what is kept before the first step: zeros."""
        from dpsgd.noise.recursion import no_history

        return no_history(like, self.bands)

    def add(self, total, state, key, step, scales):
        """Returns the noised mean, and the last b - 1 of the n, among them that of this step."""
        from dpsgd.noise.gaussian import add_gaussian_noise
        from dpsgd.noise.recursion import next_noise

        noise, state = next_noise(total, state, key, step, *rounded(tuple(self.coefficients)))
        divisor, stddev = scales.expected_batch_size, scales.noise_stddev
        noised = add_gaussian_noise(
            total, key, step, stddev, divisor=divisor, noise=noise, spread=self.spread
        )
        return noised, state


def banded_square_root(bands: int) -> BandedToeplitz:
    """Returns the noise of the first coefficients of (1 - x)^{-1/2}, c_j = binom(2j, j) / 4^j.

    >>> banded_square_root(2).coefficients[1] / banded_square_root(2).coefficients[0]
    0.5

    Args:
      bands: b >= 1.

    Raises:
      ValueError: If `bands` is less.

    Source: N. Kalinin, C. Lampert, Banded Square Root Matrix Factorization for Differentially
    Private Model Training (NeurIPS 2024).
    """
    if bands < 1:
        raise ValueError(f"bands must be at least 1, got {bands}")
    j = np.arange(1, bands)
    return BandedToeplitz(np.cumprod([1.0, *((2 * j - 1) / (2 * j))]).tolist())


def error_of_sums(bands: int, num_steps: int) -> float:
    r"""Returns about the root mean square error that banded square roots leave in running sums.

    .. math:: E = \sqrt{V (V + N / (2 S^2))}, \quad
        V = \sum_{j<b} c_j^2, \quad S = \sum_{j<b} c_j

    at sigma C = 1: noise of one step moves the sum by c_k after k < b steps, and then by 1 / S.

    >>> round(error_of_sums(16, 36_000) / error_of_sums(1, 36_000), 3)
    0.312

    Args:
      bands: b >= 1; 1 is independent noise.
      num_steps: N, steps of the run.
    """
    c = np.array(banded_square_root(bands).coefficients)
    c /= c[0]
    square, total = float(c @ c), float(c.sum())
    return math.sqrt(square * (square + num_steps / (2 * total**2)))


def rounded(coefficients: tuple[float, ...]) -> tuple[np.ndarray, np.float32]:
    """Returns all c_j / c_0, j >= 1, in float32, and at least the norm of these and 1."""
    ratios = np.array([c / coefficients[0] for c in coefficients[1:]], np.float32)
    square = _square(ratios)
    gain = np.float32(float(square) ** 0.5)
    while Fraction(float(gain)) ** 2 < square:
        gain = np.nextafter(gain, np.float32(np.inf))
    return ratios, gain


def _square(ratios: np.ndarray) -> Fraction:
    return 1 + sum((Fraction(float(ratio)) ** 2 for ratio in ratios), Fraction(0))


@functools.lru_cache(maxsize=64)
def _least_norm(coefficients: tuple[float, ...]) -> float:
    ratios, gain = rounded(coefficients)
    square = _square(ratios) / Fraction(float(gain)) ** 2
    norm = math.sqrt(square)
    while Fraction(norm) ** 2 > square:
        norm = math.nextafter(norm, 0.0)
    return norm


@functools.lru_cache(maxsize=64)
def _normalised(given: tuple[float, ...]) -> tuple[float, ...]:
    """Returns coefficients of which the squares add up to at least 1 - 2^-48 and at most 1.

    Exactly: they are the given ones, where these do.
    """
    found = given
    while True:
        square = sum((Fraction(c) ** 2 for c in found), Fraction(0))
        if 1 - Fraction(1, 2**48) <= square <= 1:
            return found
        near = abs(square - 1) < Fraction(1, 2**40)
        largest = max(map(abs, found))
        norm = largest * math.sqrt(math.fsum((c / largest) ** 2 for c in found))
        found = tuple(c * (1 - 2.0**-51) if near else c / norm for c in found)


@functools.lru_cache(maxsize=64)
def _spread(coefficients: tuple[float, ...]) -> float:
    a = np.array(coefficients) / coefficients[0]
    variance = 1.0 / coefficients[0] ** 2
    for order in range(len(a) - 1, 0, -1):  # Levinson's recursion downwards
        k = a[order]
        if not abs(k) < 1.0:
            return math.inf
        variance /= 1.0 - k * k
        a = (a[:order] - k * a[order:0:-1]) / (1.0 - k * k)
    return math.sqrt(variance)
