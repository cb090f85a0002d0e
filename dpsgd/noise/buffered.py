"""Gaussian noise that is correlated over all steps of a run, and keeps a few vectors of it.

Coefficients that are a sum of m decaying exponentials are those of a recursion over m buffers. The
cost is known where the order is: docs/explanation/sensitivity-in-a-known-order.md. It imports no
JAX.
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
from dpsgd.noise.toeplitz import MAX_SPREAD
from samplers.base import MAX_STEPS


@dataclass(frozen=True)
class BufferedToeplitz(Noise):
    r"""Buffered linear Toeplitz noise (BLT): every column of M is a sum of decaying exponentials.

    From the diagonal down it is

    .. math:: c_0 = \frac{1}{\gamma}, \quad
        c_j = \frac{1}{\gamma} \sum_{i=1}^m \omega_i \lambda_i^{j-1} \quad (j \ge 1)

    with gamma the norm of an endless column times c_0, so that no column has a norm above 1. With
    buffers B_i that begin as 0, a step computes

    .. math:: n_t = \gamma z_t - \sum_i \omega_i B_i, \qquad B_i \leftarrow \lambda_i B_i + n_t

    and z_t is standard normal. The buffers are kept, in float32: m times the memory of the
    parameters.

    Attributes:
      weights: omega_1, ..., omega_m, each > 0; rounded to float32, with which the program computes.
      decays: lambda_1, ..., lambda_m, each in [0, 1); rounded likewise.

    >>> noise = BufferedToeplitz(weights=(0.5, 0.25), decays=(0.75, 0.5))
    >>> print(noise, (noise.column(4) / noise.column(1)).tolist())
    BufferedToeplitz noise of 2 buffers [1.0, 0.75, 0.5, 0.34375]

    Raises:
      ValueError: If there are no buffers or not as many weights as decays, one of them is out of
        range, or the noise would grow from step to step, or beyond the largest spread.

    Source: H. B. McMahan, Z. Xu, Y. Zhang, A Hassle-free Algorithm for Strong Differential Privacy
    in Federated Learning Systems (2024); K. Dvijotham, H. B. McMahan, K. Pillutla, T. Steinke, A.
    Thakurta, Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy (2024).
    """

    weights: Sequence[float]
    decays: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("weights", "decays"):
            rounded = tuple(float(np.float32(value)) for value in getattr(self, name))
            object.__setattr__(self, name, rounded)
        if not self.weights or len(self.weights) != len(self.decays):
            raise ValueError(
                f"buffers have a weight and a decay each, got {len(self.weights)} weights and "
                f"{len(self.decays)} decays: give at least one of each, and equally many"
            )
        for name, low, high in (("weights", "> 0", math.inf), ("decays", ">= 0", 1.0)):
            for k, value in enumerate(getattr(self, name), 1):
                if not 0.0 <= value < high or (name == "weights" and value == 0.0):
                    below = "finite" if high == math.inf else "below 1"
                    raise ValueError(f"{name} must be {low} and {below}, number {k} is {value}")
        if not self.spread <= MAX_SPREAD:
            raise ValueError(
                f"noise of the weights {self.weights!s:.60} and decays {self.decays!s:.60} grows "
                f"from step to step, or to more than {MAX_SPREAD:g} times that of independent "
                "noise: take smaller weights"
            )

    def __str__(self) -> str:
        return f"BufferedToeplitz noise of {self.kept} buffers"

    @property
    def bands(self) -> int:
        """More than any run has steps: columns do not end."""
        return MAX_STEPS

    @property
    def kept(self) -> int:
        """Number m of buffers."""
        return len(self.weights)

    @property
    def gain(self) -> float:
        """gamma, which multiplies z: in 32 bits, at least the norm of an endless column."""
        return _gain(tuple(self.weights), tuple(self.decays))

    @property
    def spread(self) -> float:
        """Limit of n_t's standard deviation over that of independent noise; infinite if none."""
        weights, decays = inverted(np.array(self.weights), np.array(self.decays))
        if not decays.min() > -1.0:
            return math.inf
        terms = np.outer(weights, weights) / (1.0 - np.outer(decays, decays))
        return self.gain * math.sqrt(1.0 + float(terms.sum()))

    def column(self, num_steps: int) -> np.ndarray:
        """Returns c_0, ..., as the program has them: none is negative."""
        return exponentials(np.array(self.weights), np.array(self.decays), num_steps) / self.gain

    def inverse(self, num_steps: int) -> np.ndarray:
        """Returns the first entries of the columns of M^{-1}, Toeplitz as well: float64[steps]."""
        weights, decays = inverted(np.array(self.weights), np.array(self.decays))
        return self.gain * exponentials(-weights, decays, num_steps)

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns z = M n."""
        from scipy import signal  # slow to import, and no cost needs it

        found = np.array(noises, np.float64)
        for weight, decay in zip(self.weights, self.decays, strict=True):
            found += signal.lfilter([0.0, weight], [1.0, -decay], noises, axis=0)
        return found / self.gain

    def describe(self) -> dict[str, Any]:
        """Returns weights and decays, exact in JSON."""
        return {"weights": list(self.weights), "decays": list(self.decays)}

    def init(self, like: Any) -> Any:
        """Returns what is kept before the first step: zeros."""
        from dpsgd.noise.recursion import empty_buffers

        return empty_buffers(like, self.kept)

    def add(self, total, state, key, step, scales):
        """Returns the noised mean, and the buffers after it."""
        from dpsgd.noise.gaussian import add_gaussian_noise
        from dpsgd.noise.recursion import next_buffered_noise

        exponentials = tuple(zip(self.weights, self.decays, strict=True))
        noise, state = next_buffered_noise(total, state, key, step, self.gain, exponentials)
        divisor, stddev = scales.expected_batch_size, scales.noise_stddev
        noised = add_gaussian_noise(
            total, key, step, stddev, divisor=divisor, noise=noise, spread=self.spread
        )
        return noised, state


def exponentials(weights: np.ndarray, decays: np.ndarray, num_steps: int) -> np.ndarray:
    """Returns 1, and then the sums of weights times the powers 0, 1, ... of decays."""
    found = np.zeros(num_steps)
    found[0] = 1.0
    powers = np.arange(num_steps - 1)
    for weight, decay in zip(weights, decays, strict=True):
        found[1:] += weight * decay**powers
    return found


@functools.lru_cache(maxsize=64)
def _gain(weights: tuple[float, ...], decays: tuple[float, ...]) -> float:
    pairs = [(Fraction(w), Fraction(d)) for w, d in zip(weights, decays, strict=True)]
    square = 1 + sum(w * v / (1 - d * e) for w, d in pairs for v, e in pairs)
    found = np.float32(math.sqrt(square))
    while Fraction(float(found)) ** 2 < square:
        found = np.nextafter(found, np.float32(np.inf))
    return float(found)


def inverted(weights: np.ndarray, decays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights, of which the negatives are meant, and decays of the inverse."""
    roots = np.sqrt(weights)
    values, vectors = np.linalg.eigh(np.diag(decays) - np.outer(roots, roots))
    return (roots @ vectors) ** 2, values
