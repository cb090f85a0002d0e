"""Recomputes the noise that a program must add, from the audit's key."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import linalg

from dpsgd.audit import reference
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES

ALLOWED = 2.0**-16
"""Tolerance in standard deviations of noise: float32 errs by some 2^-20, the grid by 2^-18."""

MATRIX = "the noise matrix has the priced bands and column norms"

_MATRIX = 256  # first steps, for which the entries of a built-in noise's M are checked
_PADDED = 2**14  # first steps in which M may be any lower triangular matrix, not only Toeplitz


class ExpectedNoise:
    """Expected noise M^-1 z of a program, in standard deviations.

    M is the matrix that the noise states (`whiten`), and z are standard normals of key and step.

    Attributes:
      probe: Probe of the program.
      allowed: Tolerance in standard deviations.
      singular: True if M has no inverse.
    """

    def __init__(self, probe: Probe):
        self.probe, self._noise = probe, probe.mechanism.noise
        dense = [
            k for k in range(len(probe.sizes)) if k not in probe.tables and k not in probe.frozen
        ]
        self._number = {k: number for number, k in enumerate(dense)}
        steps = probe.mechanism.sampler.num_steps
        size = min(steps, _MATRIX)
        self._columns = _read_columns(self._noise, steps if NOISES.is_own(self._noise) else size)
        self._toeplitz = self._columns.alike
        self.singular = not self._columns.least > 2.0**-20
        self.allowed = ALLOWED
        if not self.singular:
            start = self._noise.whiten(np.eye(size))
            inverse = linalg.solve_triangular(start, np.eye(size), lower=True)
            self.allowed *= max(1.0, float(np.sqrt(np.max(np.sum(inverse**2, axis=1)))))

    def matrix_check(self) -> CheckResult:
        """Checks the bands and the column norms of M."""
        columns, bands = self._columns, self._noise.bands
        passed = (
            not self.singular
            and columns.longest <= 1 + 1e-9
            and columns.banded
            and bands <= self.probe.mechanism.sampler.separation
        )
        detail = f"{bands} bands, largest column norm {columns.longest:.6g} of 1 allowed"
        return CheckResult(MATRIX, bool(passed), detail)

    def knows(self, first_step: int) -> bool:
        """Returns True if M is known for an attempt from `first_step`."""
        return self._toeplitz or first_step <= _PADDED

    def values(self, steps: range, leaf: int, places: np.ndarray, attempt: int = 0) -> np.ndarray:
        """Returns the noise of an attempt's first steps: float64[steps, places].

        Args:
          steps: Steps, from the first step of an attempt on: no noise came before.
          leaf: Index of the leaf.
          places: Flat indices into the leaf of a release.
          attempt: Number of the attempt, which determines the key.
        """
        z = self._normals(steps, leaf, places, attempt)
        if self._toeplitz:
            column = self._noise.whiten(np.eye(len(steps), 1))[:, 0]
            matrix = np.tril(linalg.toeplitz(column))
        else:
            unit = np.eye(steps.stop, len(steps), -steps.start)
            matrix = self._noise.whiten(unit)[steps.start :]
        if not np.tril(matrix, -1).any():
            return z / np.diagonal(matrix)[:, None]
        return linalg.solve_triangular(matrix, z, lower=True)

    def _normals(self, steps: range, leaf: int, places: np.ndarray, attempt: int) -> np.ndarray:
        probe, key = self.probe, self.probe.root.noise_key(attempt)
        number, purpose = self._number.get(leaf, leaf), 0
        if leaf in probe.tables:
            places, purpose = probe.table_places(leaf, places), reference.STEP
        return reference.normals(key, np.array(steps)[:, None], number, places, purpose)


class _Columns(NamedTuple):
    """Properties of the columns of M.

    Attributes:
      longest: Largest norm of a column.
      least: Smallest absolute value on the diagonal.
      alike: True if each column is the one before it, a step later.
      banded: True if M is linear, and zero outside its bands.
    """

    longest: float
    least: float
    alike: bool
    banded: bool


def _read_columns(noise: Noise, steps: int) -> _Columns:
    """Returns properties of M, read from one product for each band.

    A vector with a 1 in every `bands`-th step gives the columns of these steps, without overlap.
    """
    bands, first, norms, diagonal = min(noise.bands, steps), None, [], []
    x, product, alike = np.random.default_rng(0).normal(size=steps), np.zeros(steps), True
    for begin in range(bands):
        ones = np.zeros((steps, 1))
        ones[begin::bands] = 1.0
        entries = noise.whiten(ones)[begin:, 0]
        first = entries[:bands] if first is None else first
        alike &= np.allclose(entries, np.resize(first, entries.size), rtol=1e-6, atol=1e-12)
        starts = np.arange(0, entries.size, bands)
        norms.append(np.sqrt(np.add.reduceat(np.square(entries), starts).max()))
        diagonal.append(np.abs(entries[starts]).min())
        product[begin:] += entries * np.repeat(x[begin::bands], bands)[: entries.size]
    banded = np.allclose(noise.whiten(x[:, None])[:, 0], product, rtol=1e-6, atol=1e-9)
    return _Columns(float(max(norms)), float(min(diagonal)), alike, banded)


def spread_places(size: int, most: int) -> np.ndarray:
    """Samples flat indices that are spread over an array.

    They are both ends, neighbours of powers of two, and a random index in each of several
    intervals of equal length.

    Args:
      size: Number of entries of the array.
      most: Largest number of indices.
    """
    if size <= most:
        return np.arange(size)
    powers = 2 ** np.arange(size.bit_length() - 1)
    edges = np.arange(max(1, most // 16))
    chosen = np.concatenate([edges, size - 1 - edges, powers - 1, powers])[: most // 2]
    num_random = most - chosen.size  # a random one of each stretch of equal length
    inside = np.random.default_rng(0).random(num_random)
    return np.concatenate(
        [chosen, ((np.arange(num_random) + inside) * size / num_random).astype(np.int64)]
    )


class Comparison:
    """Compares noise with expected noise, and keeps the first difference.

    Attributes:
      wrong: Description of the first difference; empty if none.
      compared: Number of compared coordinates.
    """

    def __init__(self, name: str):
        self.wrong, self.compared, self._name = "", 0, name

    def add(
        self, found: np.ndarray, expected: np.ndarray, allowed: np.ndarray | float, where: str
    ) -> None:
        """Compares arrays of one shape, in standard deviations.

        Args:
          found: Noise of the program.
          expected: Noise that the audit computes.
          allowed: Tolerance, a number or one for each entry.
          where: Name of the noise in the message.
        """
        self.compared += expected.size
        with np.errstate(invalid="ignore", over="ignore"):
            off = ~(np.abs(found - expected) <= allowed) | ~np.isfinite(found)
            if off.any():
                gain = float(np.vdot(found, expected) / np.vdot(expected, expected))
                share = f"{np.count_nonzero(off):,} of {off.size:,} coordinates differ"
                self.fail(f"{where}: {share}, {gain:.4g} times the noise on average")

    def fail(self, wrong: str) -> None:
        """Notes a difference, unless there is one already."""
        self.wrong = self.wrong or wrong

    def check(self, detail: str = "") -> CheckResult:
        """Returns the check."""
        return CheckResult(self._name, not self.wrong, self.wrong or detail)
