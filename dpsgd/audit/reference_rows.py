r"""Simulates the rows of a lazy table, in float64.

The simulation defines deferred noise. Step t of the optimizer moves a row by m = mu m + g, theta =
theta - a_t m, with g = r z, r = sigma C / b and normal z. Over a gap from step s to t, (m, theta)
becomes A (m, theta) + r L (x, y), with L lower triangular and L L^T = V; x and y are the normals of
step t for `MOMENTUM` and `VALUE` (`dpsgd.audit.reference`). A flush rounds a number v to
c ceil(v / c - U), with c the cell of a public grid. Sums of gradients are left out. See
docs/explanation/audit-of-deferred-noise.md.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit import reference
from dpsgd.audit.runtime.expected import ALLOWED, Comparison
from dpsgd.core.state import Table

PARTS = ("m", "theta")
"""Names of the two numbers of a coordinate, momentum and value."""

_PURPOSES = reference.MOMENTUM, reference.VALUE
_GRID_BITS = 10  # of a flush: cells of 2^-10 to 2^-11 of the noise since the run's first step
_MOST_CELLS = 13  # binary digits of a number beyond which its own size gives the cell
_EPS = 2.0**-21  # rounding of a few float32 operations


class TableLaw:
    """Law of the noise in the rows of a run's tables.

    Attributes:
      sizes: Step sizes of the run, float64[steps].
      momentum: Factor mu.
      r: Standard deviation of the noise in a private mean gradient.
    """

    def __init__(self, sizes: np.ndarray, momentum: float, r: float):
        self.sizes, self.momentum, self.r = sizes, momentum, r
        self._paths: dict[int, list[tuple[float, ...]]] = {}

    def gap(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns A and V of steps [start, stop) for unit r.

        Returns:
          Two matrices float64[2, 2].
        """
        mu = self.momentum
        # (m, theta) from (1, 0), and their covariance from none. From (0, 1) they stay.
        path = self._paths.setdefault(start, [(1.0, 0.0, 0.0, 0.0, 0.0)])
        for a in self.sizes[start + len(path) - 1 : stop].tolist():
            m, theta, mm, mt, tt = path[-1]
            # m' = mu m + z, and theta' = theta - a m'.
            m, mm, with_theta = mu * m, mu * mu * mm + 1.0, mu * mt
            tt = tt - 2 * a * with_theta + a * a * mm
            path.append((m, theta - a * m, mm, with_theta - a * mm, tt))
        m, theta, mm, mt, tt = path[stop - start]
        return np.array([[m, 0], [theta, 1]]), np.array([[mm, mt], [mt, tt]])

    def factors(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a gap's A and L, zero for absent momentum."""
        has = np.array([self.momentum > 0, True])
        transition, v = (x * np.outer(has, has) for x in self.gap(start, stop))
        low = np.zeros((2, 2))
        for i in range(2):
            for j in range(i + 1):
                residual = v[i, j] - low[i] @ low[j]
                if i == j:
                    low[i, i] = math.sqrt(residual) if residual > 1e-14 * v[i, i] else 0.0
                elif low[j, j]:
                    low[i, j] = residual / low[j, j]
        return transition, low


class ReferenceRows:
    """Simulated rows of a table, with the noise of their steps.

    Attributes:
      x: Momentum and value of each coordinate, float64[2, coordinates]; without momentum, 0.
      off: Bound on the program's rounding errors in `x`, float64[2, coordinates].
      steps: Number of steps whose noise each coordinate has, int[coordinates].
    """

    def __init__(
        self, law: TableLaw, noise_key: np.ndarray, leaf: int, rows: np.ndarray, table: Table
    ):
        """Begins with rows of a table.

        Args:
          law: Law of the table.
          noise_key: Key of the noise, uint32[4].
          leaf: Index of the table among the leaves.
          rows: Row indices, int[n].
          table: Rows of the table: values and momentum, float32[n, ...], and steps, int32[n].
        """
        self._law, self._key, self._leaf = law, noise_key, leaf
        self._width = math.prod(table.values.shape[1:])
        self._index = (
            rows.astype(np.int64)[:, None] * self._width + np.arange(self._width)
        ).ravel()
        self.hold(table)

    def hold(self, table: Table) -> None:
        """Continues from rows of a table, without rounding errors."""
        none = np.zeros(self._index.size)
        columns = table.momentum, table.values
        self.x = np.stack([none if x is None else x.astype(np.float64).ravel() for x in columns])
        self.off, self.steps = np.zeros(self.x.shape), np.repeat(table.steps, self._width)

    def table(self, like: Table) -> Table:
        """Returns the rows in float32, in the shapes of `like`."""
        m, theta = (np.float32(x).reshape(like.values.shape) for x in self.x)
        steps = np.int32(self.steps[:: self._width])
        return Table(theta, None if like.momentum is None else m, steps)

    def catch_up(self, stop: int, rows: Any = slice(None)) -> None:
        """Adds the noise of gaps that end at step `stop`."""
        coordinates = self._coordinates(rows)
        if not coordinates.size:
            return
        starts, r = self.steps[coordinates], self._law.r
        gap_starts, place = np.unique(starts, return_inverse=True)
        factors = zip(
            *(self._law.factors(start, stop) for start in gap_starts.tolist()), strict=True
        )
        # A and L of each coordinate: float64[2, 2, coordinates].
        a, low = (np.moveaxis(np.stack(matrices)[place], 0, -1) for matrices in factors)
        z = np.stack([self._normals(stop, purpose, coordinates) for purpose in _PURPOSES])
        old, noise = self.x[:, coordinates], ALLOWED * np.sqrt(np.sum(low**2, axis=1))
        rounding = r * noise + _EPS * _times(np.abs(a), np.abs(old))
        self.off[:, coordinates] = (
            _times(np.abs(a), self.off[:, coordinates]) + (starts < stop) * rounding
        )
        self.x[:, coordinates], self.steps[coordinates] = _times(a, old) + r * _times(low, z), stop

    def step(self, step: int, rows: np.ndarray) -> None:
        """Simulates a step that looks up some rows.

        Args:
          step: Number of the step.
          rows: bool[n], True for rows that the batch looks up.
        """
        self.catch_up(step, rows)
        coordinates, mu = self._coordinates(rows), self._law.momentum
        a, r = self._law.sizes[step], self._law.r
        (old_m, old_theta), (off_m, off_theta) = self.x[:, coordinates], self.off[:, coordinates]
        g = r * self._normals(step, reference.STEP, coordinates)
        m = mu * old_m + g
        off_m = mu * off_m + r * ALLOWED + _EPS * (np.abs(mu * old_m) + np.abs(g))
        theta = old_theta - a * m
        off_theta = off_theta + a * off_m + _EPS * (np.abs(old_theta) + np.abs(a * m))
        self.x[:, coordinates], self.off[:, coordinates] = (m, theta), (off_m, off_theta)
        self.steps[coordinates] = step + 1

    def compare(self, tests: Comparison, rows: Table, name: str) -> None:
        """Compares rows of a table with the simulated rows."""
        r = self._law.r
        for quantity, values, x, off in self._parts(rows):
            tests.add(values / r, x / r, off / r, f"{quantity} of {name}")

    def compare_flushed(self, tests: Comparison, rows: Table, stop: int, name: str) -> None:
        """Compares rows flushed at step `stop` with rounded simulated rows."""
        self.catch_up(stop)
        r, spreads = self._law.r, self._law.r * np.sqrt(np.diagonal(self._law.gap(0, stop)[1]))
        for quantity, values, exact, off in self._parts(rows):
            purpose, stddev = _PURPOSES[PARTS.index(quantity)], spreads[PARTS.index(quantity)]
            cell, sure = _cell(stddev)
            u = reference.uniforms(self._key, stop, self._leaf, self._index, purpose)
            low, high = (_own_cell(exact + sign * off) for sign in (-1, 1))
            size = np.maximum(cell, np.maximum(low, high))
            is_exact = sure & (stddev > 0) & ((low == high) | (np.maximum(low, high) <= cell))
            least, most = (np.ceil((exact + sign * off) / size - u) for sign in (-1, 1))
            rounded = np.clip(np.rint(values / size), least, most) * size
            expected = np.where(is_exact, rounded, exact)
            allowed = np.where(is_exact, 0.0, off + 2 * size * (stddev > 0))
            tests.add(values / r, expected / r, allowed / r, f"{quantity} of {name}")

    def _parts(self, found: Table) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """Returns name, found numbers, simulated numbers and bound of each part."""
        pairs = zip(PARTS, (found.momentum, found.values), self.x, self.off, strict=True)
        return [
            (name, values.astype(np.float64).ravel(), x, off)
            for name, values, x, off in pairs
            if values is not None
        ]

    def _coordinates(self, rows: Any) -> np.ndarray:
        return np.arange(self._index.size).reshape(-1, self._width)[rows].ravel()

    def _normals(self, step: int, purpose: int, coordinates: np.ndarray) -> np.ndarray:
        if purpose == reference.MOMENTUM and not self._law.momentum:
            return np.zeros(coordinates.size)
        return reference.normals(self._key, step, self._leaf, self._index[coordinates], purpose)


def step_sizes(rate: Any, num_steps: int) -> np.ndarray:
    """Returns the configured step sizes of a run: float64[num_steps].

    Args:
      rate: Learning rate, a number or a function of the step.
      num_steps: Number of steps of the run.
    """
    if not callable(rate):
        return np.full(num_steps, float(rate))
    try:  # a schedule of JAX's, all at once
        return np.asarray(jax.vmap(rate)(jnp.arange(num_steps)), np.float64).reshape(num_steps)
    except Exception:  # or one of any other kind
        return np.array([float(rate(k)) for k in range(num_steps)])


def _times(matrices: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.einsum("ijn,jn->in", matrices, x)


def _own_cell(x: np.ndarray) -> np.ndarray:
    """Returns the cell for the power of two of each number; 0 for 0."""
    _, order = np.frexp(x)
    return np.where(x == 0, 0.0, np.ldexp(1.0, order - 1 - _MOST_CELLS))


def _cell(stddev: float) -> tuple[float, bool]:
    """Returns the grid cell for a standard deviation, and its certainty.

    It is uncertain next to a power of two, where rounding of the deviation decides about the cell.
    """
    order = math.log2(max(stddev, 2.0**-100))
    cell = 2.0 ** (math.floor(order) - _GRID_BITS)
    if 1e-5 < order % 1 < 1 - 1e-5:
        return cell, True
    return 2.0 ** (round(order) - _GRID_BITS), False
