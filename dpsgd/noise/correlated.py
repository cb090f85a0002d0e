"""Gaussian noise correlated over a band of steps, with small sums over steps.

Successive noises partly cancel, so that their running sums are smaller at the same privacy cost,
given a minimum separation of an example's steps: docs/explanation/correlated-noise.md. The module
imports no JAX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpsgd.core.noise import Noise

MAX_SPREAD = 32.0
"""Largest standard deviation of a step's noise, relative to independent noise."""


@dataclass(frozen=True)
class BandedToeplitz(Noise):
    r"""Noise n whose matrix M has the band (c_0, ..., c_{b-1}) in every column.

    .. math:: n_t = \left(z_t - c_1 n_{t-1} - \dots - c_{b-1} n_{t-b+1}\right) / c_0

    n_t is 0 before the first step. z_t is standard normal, a pure function of key, step, leaf and
    coordinate (`dpsgd.core.gaussian`). The state holds the last b - 1 noises n in float32, b - 1
    times the memory of the parameters.

    Attributes:
      coefficients: c_0, ..., c_{b-1}, up to a common factor: the constructor divides them by their
        norm, so that their squares add up to 1, or to less by at most 2^-48.

    >>> noise = BandedToeplitz((4.0, 3.0))
    >>> print(noise, [round(c, 9) for c in noise.coefficients])
    BandedToeplitz noise of 2 bands [0.8, 0.6]

    Raises:
      ValueError: If there is no coefficient, one is not finite, the first is not positive, or the
        noise would grow from step to step: c_0 + c_1 x + ... has a zero in \|x\| <= 1, or near.

    Source: C. A. Choquette-Choo et al., (Amplified) Banded Matrix Factorization (NeurIPS 2023).
    """

    NAME = "banded toeplitz"

    coefficients: Sequence[float]

    def __post_init__(self) -> None:
        coefficients = tuple(map(float, self.coefficients))
        if not coefficients or not all(map(math.isfinite, coefficients)) or not coefficients[0] > 0:
            raise ValueError(
                f"coefficients={coefficients!s:.60} must be finite numbers, at least one, and the "
                "first > 0"
            )
        object.__setattr__(self, "coefficients", _normalised(coefficients))
        if not self.spread <= MAX_SPREAD:
            raise ValueError(
                f"coefficients={coefficients!s:.60} give noise that grows beyond {MAX_SPREAD:g} "
                "times independent noise; choose c_0 + c_1 x + ... with zeros well outside "
                "|x| <= 1"
            )

    def __str__(self) -> str:
        return f"BandedToeplitz noise of {self.bands} bands"

    @property
    def bands(self) -> int:
        """Number b of coefficients."""
        return len(self.coefficients)

    @property
    def spread(self) -> float:
        """Limit of n_t's standard deviation, independent noise being 1.

        It is infinite if the noise grows without bound.
        """
        return _spread(tuple(self.coefficients))

    def least_norm(self) -> float:
        """Returns the norm of the program's float32 coefficients, rounded down."""
        return _least_norm(tuple(self.coefficients))

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns z = M n, see `Noise.whiten`."""
        whitened = self.coefficients[0] * noises
        for lag, c in enumerate(self.coefficients[1 : len(noises)], 1):
            whitened[lag:] += c * noises[:-lag]
        return whitened

    def init(self, like: Any) -> Any:
        """Returns zeros, the history of noises before the first step."""
        from dpsgd.noise.recursion import no_history

        return no_history(like, self.bands)

    def add(self, total, state, key, step, scales):
        """Returns the noised mean and the last b - 1 noises.

        Args:
          total: Sum of clipped gradients, a tree of float32 arrays.
          state: Noises of the previous steps, from `init` or the previous step.
          key: uint32[4], key of the noise stream.
          step: int32 scalar, number of the update.
          scales: Scales C, sigma C and b.
        """
        from dpsgd.core.gaussian import add_gaussian_noise
        from dpsgd.noise.recursion import next_noise

        noise, state = next_noise(total, state, key, step, *rounded(tuple(self.coefficients)))
        divisor, stddev = scales.expected_batch_size, scales.noise_stddev
        noised = add_gaussian_noise(
            total, key, step, stddev, divisor=divisor, noise=noise, spread=self.spread
        )
        return noised, state


def banded_square_root(bands: int) -> BandedToeplitz:
    """Returns noise with the first coefficients of (1 - x)^{-1/2}.

    They are c_j = binom(2j, j) / 4^j.

    >>> banded_square_root(2).coefficients[1] / banded_square_root(2).coefficients[0]
    0.5

    Args:
      bands: Number b >= 1 of coefficients.

    Raises:
      ValueError: If `bands` is less than 1.

    Source: N. Kalinin, C. Lampert, Banded Square Root Matrix Factorization for Differentially
    Private Model Training (NeurIPS 2024).
    """
    if bands < 1:
        raise ValueError(f"bands must be at least 1, got {bands}")
    j = np.arange(1, bands)
    return BandedToeplitz(np.cumprod([1.0, *((2 * j - 1) / (2 * j))]).tolist())


def error_of_sums(bands: int, num_steps: int) -> float:
    r"""Approximates running sums' RMS error under banded square roots.

    .. math:: E = \sqrt{V (V + N / (2 S^2))}, \quad
        V = \sum_{j<b} c_j^2, \quad S = \sum_{j<b} c_j

    at sigma C = 1: noise of one step moves the sum by c_k after k < b steps, and then by 1 / S.

    >>> round(error_of_sums(16, 36_000) / error_of_sums(1, 36_000), 3)
    0.312

    Args:
      bands: Number b >= 1 of bands; 1 is independent noise.
      num_steps: Number N of steps of the run.
    """
    c = np.array(banded_square_root(bands).coefficients)
    c /= c[0]
    square, total = float(c @ c), float(c.sum())
    return math.sqrt(square * (square + num_steps / (2 * total**2)))


def rounded(coefficients: tuple[float, ...]) -> tuple[np.ndarray, np.float32]:
    """Returns the float32 ratios c_j / c_0, and their gain.

    The ratios have j >= 1; the gain is a float32 upper bound on the norm of (1, ratios).

    Args:
      coefficients: c_0, ..., c_{b-1}, with squares that add up to about 1.
    """
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
def _normalised(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the coefficients scaled until their squares add up to [1 - 2^-48, 1] exactly."""
    scaled = coefficients
    while True:  # coefficients that are normalised already stay exactly
        square = sum((Fraction(c) ** 2 for c in scaled), Fraction(0))
        if 1 - Fraction(1, 2**48) <= square <= 1:
            return scaled
        near = abs(square - 1) < Fraction(1, 2**40)
        largest = max(map(abs, scaled))
        norm = largest * math.sqrt(math.fsum((c / largest) ** 2 for c in scaled))
        scaled = tuple(c * (1 - 2.0**-51) if near else c / norm for c in scaled)


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
