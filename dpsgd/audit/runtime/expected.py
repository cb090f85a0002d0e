"""The noise that a program must add, computed again, and its comparison with what is found.

The audit holds the key, so to it noise is no random number. Releases hold M^-1 z, where the noise
states M (`Noise.whiten`), and z is that of `dpsgd.audit.reference`.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import linalg

from dpsgd.audit import reference
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult

ALLOWED = 2.0**-16
"""Standard deviations by which noise may be off: float32 errs by some 2^-20, its grid by 2^-18."""

_MATRIX = 256  # steps of which M is looked at
PADDED = 2**14
"""First steps in which a matrix may be any, and not Toeplitz alone."""


class ExpectedNoise:
    """The noise that a program must add, in standard deviations.

    Attributes:
      probe: Of the program.
      allowed: How far it may be off, in standard deviations.
      singular: Whether the matrix that the noise states has no inverse: then it is no noise's.
    """

    def __init__(self, probe: Probe):
        self.probe, self._noise = probe, probe.mechanism.noise
        self._end = probe.mechanism.sampler.num_steps
        dense = [
            k for k in range(len(probe.sizes)) if k not in probe.tables and k not in probe.frozen
        ]
        self._number = {k: number for number, k in enumerate(dense)}
        self.start = self._noise.whiten(np.eye(min(self._end, _MATRIX)))
        toeplitz = np.tril(linalg.toeplitz(self.start[:, 0]))
        self._toeplitz = np.allclose(self.start, toeplitz, rtol=1e-6, atol=1e-12)
        self.singular = not np.all(np.abs(np.diagonal(self.start)) > 2.0**-20)
        if not self.singular:
            inverse = linalg.solve_triangular(self.start, np.eye(len(self.start)), lower=True)
            spread = float(np.sqrt(np.max(np.sum(np.square(inverse), axis=1))))
            self.allowed = ALLOWED * max(1.0, spread)

    def knows(self, steps: range) -> bool:
        """Whether M is known in these steps, where they begin without history."""
        return self._toeplitz or steps.start <= PADDED

    def places(self, leaf: int, most: int) -> np.ndarray:
        """Returns coordinates of a release: both ends, those around 2^k, and one of each stretch.

        Args:
          leaf: Number of the leaf.
          most: How many, at most.
        """
        size = self.probe.sizes[leaf]
        if size <= most:
            return np.arange(size)
        powers = 2 ** np.arange(size.bit_length() - 1)
        ends = np.arange(max(1, most // 16))
        some = np.concatenate([ends, size - 1 - ends, powers - 1, powers])[: most // 2]
        rest = most - some.size  # a random one of each stretch of equal length
        inside = np.random.default_rng(0).random(rest)
        return np.concatenate([some, ((np.arange(rest) + inside) * size / rest).astype(np.int64)])

    def of(
        self,
        steps: range,
        leaf: int,
        places: np.ndarray,
        attempt: int = 0,
    ) -> np.ndarray:
        """Returns the noise of steps that begin without history: float64[steps, places]."""
        z = self._fresh(steps, leaf, places, attempt)
        if self._toeplitz:
            column = self._noise.whiten(np.eye(len(steps), 1))[:, 0]
            matrix = np.tril(linalg.toeplitz(column))
        else:
            unit = np.eye(steps.stop, len(steps), -steps.start)
            matrix = self._noise.whiten(unit)[steps.start :]
        return linalg.solve_triangular(matrix, z, lower=True)

    def _fresh(self, steps: range, leaf: int, places: np.ndarray, attempt: int) -> np.ndarray:
        probe, key = self.probe, self.probe.root.noise_key(attempt)
        if leaf in probe.tables:
            assert probe.snapshot is not None
            width = math.prod(probe.shapes[leaf][1:])
            places = probe.snapshot.rows[leaf][places // width].astype(np.int64) * width + (
                places % width
            )
            number, purpose = leaf, reference.STEP
        else:
            number, purpose = self._number[leaf], 0
        return reference.normals(key, np.array(steps)[:, None], number, places, purpose)


class Comparison:
    """Noise that was found, compared with what was expected; the first difference is told."""

    def __init__(self, name: str):
        self.wrong, self.compared, self._name = "", 0, name
        self._resolved: dict[int, float] = {}

    def add(
        self,
        found: np.ndarray,
        expected: np.ndarray,
        allowed: Any,
        where: str,
        leaf: int = 0,
    ) -> None:
        """Compares arrays of one shape.

        Args:
          found: In standard deviations.
          expected: Likewise.
          allowed: By how much they may differ, an array or a number.
          where: Which noise it is, in words.
          leaf: Number of the leaf.
        """
        self.compared += expected.size
        # A part that is missing everywhere shows where it is the largest beside what is allowed.
        part = np.min(allowed / np.maximum(np.abs(expected), 2.0**-60), initial=1.0)
        self._resolved[leaf] = min(float(part), self._resolved.get(leaf, 1.0))
        with np.errstate(invalid="ignore", over="ignore"):
            off = ~(np.abs(found - expected) <= allowed) | ~np.isfinite(found)
            if off.any() and not self.wrong:
                gain = float(np.vdot(found, expected) / np.vdot(expected, expected))
                share = f"{np.count_nonzero(off):,} of {off.size:,} coordinates"
                self.wrong = f"{where}: {share} are others, {gain:.4g} times the noise in the mean"

    def check(self, detail: str = "") -> CheckResult:
        """Returns the check."""
        worst = max(self._resolved.values(), default=0.0)
        return CheckResult(self._name, not self.wrong, self.wrong or detail, resolution=worst)


def cast_of(dtype: np.dtype) -> float:
    """Returns how far casting moves a number, relative to it, beyond what float32 does."""
    unit = float(jnp.finfo(dtype).eps)
    return unit / 2 if unit > 2.0**-20 else 2.0**-22
