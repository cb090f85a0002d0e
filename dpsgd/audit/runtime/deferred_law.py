r"""What a row of a table with deferred noise must hold: simulated in float64, step by step.

The optimizer moves a row by m = mu m + g, theta = theta - a_t m, with g = r z and r = sigma C / b.
Over a gap from step s to t, (m, theta) becomes A (m, theta) + r L (x, y), with L lower triangular
and L L^T = V; x and y are the normals of step t for `MOMENTUM` and `VALUE`
(`dpsgd.audit.reference`). See docs/explanation/audit-of-deferred-noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit import reference
from dpsgd.audit.runtime.expected import ALLOWED, Comparison
from dpsgd.core.state import Table

PARTS = ("m", "theta")
"""Of the state of a coordinate, in order."""
_PURPOSES = reference.MOMENTUM, reference.VALUE
_GRID_BITS = 10  # of a flush: cells of 2^-10 to 2^-11 of the noise since the run's first step
_MOST_CELLS = 13  # binary digits of a number beyond which its own size gives the cell
_EPS = 2.0**-21  # of float32, what a few operations round


def parts(table: Table) -> tuple[Any, Any]:
    """Returns the arrays of m and theta; None where rows have no momentum."""
    return table.momentum, table.values


class Numbers(NamedTuple):
    """What coordinates must hold, of m and theta, and how far they may be off."""

    x: np.ndarray
    """float64[2, coordinates]; 0 where rows have none."""
    off: np.ndarray

    @classmethod
    def of(cls, table: Table) -> Numbers:
        """Returns what some rows hold."""
        none = np.zeros(table.values.size)
        found = [none if x is None else x.astype(np.float64).ravel() for x in parts(table)]
        return cls(np.stack(found), np.zeros((2, none.size)))

    def like(self, table: Table) -> Table:
        """Returns rows that hold these, with what `table` has."""
        found = zip(parts(table), self.x, strict=True)
        m, theta = (None if x is None else y.reshape(x.shape) for x, y in found)
        return Table(theta, m)

    def of_parts(self, keep: Callable[[np.ndarray], np.ndarray]) -> Numbers:
        """Returns some of the coordinates."""
        return Numbers(*(np.stack([keep(x) for x in both]) for both in self))


class DeferredLaw:
    """The law of the rows of a run's tables.

    Attributes:
      sizes: Step sizes of the run: float64[steps].
      momentum: mu.
      r: Standard deviation of the noise of a private mean gradient.
      key: Attempt -> key of its noise: uint32[4].
      has: Which of `PARTS` rows have.
    """

    def __init__(
        self, sizes: np.ndarray, momentum: float, r: float, key: Callable[[int], np.ndarray]
    ):
        self.r, self.sizes, self.momentum, self.key = r, sizes, momentum, key
        self.has = [momentum > 0, True]
        self._paths: dict[int, list[tuple[float, ...]]] = {}

    def gap(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns how m and theta move in the steps from start to stop - 1, at r = 1.

        That is A and V, float64[2, 2].
        """
        if start not in self._paths:
            self._paths[start] = self._simulated(start)
        m, theta, mm, mt, tt = self._paths[start][stop - start]
        return np.array([[m, 0], [theta, 1]]), np.array([[mm, mt], [mt, tt]])

    def factors(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns A and L of what rows have; 0 for the rest."""
        transition, v = (x * np.outer(self.has, self.has) for x in self.gap(start, stop))
        low = np.zeros((2, 2))
        for i in range(2):
            for j in range(i + 1):
                rest = v[i, j] - low[i] @ low[j]
                if i == j:
                    low[i, i] = math.sqrt(rest) if rest > 1e-14 * v[i, i] else 0.0
                elif low[j, j]:
                    low[i, j] = rest / low[j, j]
        return transition, low

    def _simulated(self, start: int) -> list[tuple[float, ...]]:
        mu = self.momentum
        # (m, theta) from (1, 0), and their covariance from none. From (0, 1) they stay.
        m, theta = 1.0, 0.0
        mm = mt = tt = 0.0
        path: list[tuple[float, ...]] = [(m, theta, mm, mt, tt)]
        for a in self.sizes[start:].tolist():
            m = mu * m
            theta = theta - a * m
            # m' = mu m + z, and theta' = theta - a m'.
            with_theta = mu * mt
            mm = mu * mu * mm + 1.0
            mt = with_theta - a * mm
            tt = tt - 2 * a * with_theta + a * a * mm
            path.append((m, theta, mm, mt, tt))
        return path


class RowsLaw(NamedTuple):
    """The law of some coordinates of a table in an attempt.

    Attributes:
      law: Of all tables.
      leaf: Number of the table.
      at: The coordinates, row-major.
      attempt: Of the noise.
    """

    law: DeferredLaw
    leaf: int
    at: np.ndarray
    attempt: int = 0

    def _normals(self, step: int, purpose: int) -> np.ndarray:
        key = self.law.key(self.attempt)
        return reference.normals(key, step, self.leaf, self.at, purpose)

    def caught_up(
        self, old: Numbers, starts: np.ndarray, stop: int, r: float | None = None
    ) -> Numbers:
        """Returns what coordinates hold after the gaps from `starts` to `stop`.

        Args:
          old: What they held.
          starts: Steps that were in each.
          stop: The step at which the gap ends.
          r: Another deviation.
        """
        r = r or self.law.r
        has = zip(_PURPOSES, self.law.has, strict=True)
        z = np.stack([self._normals(stop, of) if has else 0.0 * self.at for of, has in has])
        which, at = np.unique(np.append(stop, starts), return_inverse=True)
        laws = zip(*(self.law.factors(start, stop) for start in which.tolist()), strict=True)
        # A and L of each coordinate: float64[2, 2, coordinates].
        a, low = (np.moveaxis(np.stack(of)[at[1:]], 0, -1) for of in laws)
        noise = ALLOWED * np.sqrt(np.sum(low**2, axis=1))
        off = _times(np.abs(a), old.off)
        off += (starts < stop) * (r * noise + _EPS * _times(np.abs(a), np.abs(old.x)))
        return Numbers(_times(a, old.x) + r * _times(low, z), off)

    def of_step(self, step: int) -> np.ndarray:
        """Returns the noise that rows get in a step that reads them, over r."""
        return self._normals(step, reference.STEP)

    def stepped(self, old: Numbers, step: int) -> tuple[np.ndarray, Numbers]:
        """Returns the noise of a step, over r, and what coordinates hold after it."""
        mu, a, r = self.law.momentum, self.law.sizes[step], self.law.r
        (old_m, old_theta), (off_m, off_theta) = old
        z = self.of_step(step)
        g = r * z
        m = mu * old_m + g
        off_m = mu * off_m + r * ALLOWED + _EPS * (np.abs(mu * old_m) + np.abs(g))
        theta = old_theta - a * m
        off_theta = off_theta + a * off_m + _EPS * (np.abs(old_theta) + np.abs(a * m))
        return z, Numbers(np.stack([m, theta]), np.stack([off_m, off_theta]))

    def compare(self, tests: Comparison, found: Table, new: Numbers, name: str) -> None:
        """Compares rows with what they must hold."""
        r = self.law.r
        for part, x, exact, off in zip(PARTS, parts(found), *new, strict=True):
            if x is not None:
                flat = x.astype(np.float64).ravel()
                tests.add(flat / r, exact / r, off / r, f"{part} of {name}")

    def compare_flushed(
        self, tests: Comparison, found: Table, new: Numbers, stop: int, name: str
    ) -> None:
        """Compares flushed numbers with those that they were rounded from, x to ceil(x - U)."""
        r, key = self.law.r, self.law.key(self.attempt)
        spread = r * np.sqrt(np.diagonal(self.law.gap(0, stop)[1]))
        of_parts = zip(PARTS, _PURPOSES, parts(found), *new, spread, strict=True)
        for x, purpose, values, exact, off, stddev in of_parts:
            if values is None:
                continue
            cell, sure = _cell(stddev)
            flat = values.astype(np.float64).ravel()
            u = reference.uniforms(key, stop, self.leaf, self.at, purpose)
            low, high = (_own_cell(exact + sign * off) for sign in (-1, 1))
            size = np.maximum(cell, np.maximum(low, high))
            known = sure & (stddev > 0) & ((low == high) | (np.maximum(low, high) <= cell))
            least, most = (np.ceil((exact + sign * off) / size - u) for sign in (-1, 1))
            rounded = np.clip(np.rint(flat / size), least, most) * size
            expected = np.where(known, rounded, exact)
            allowed = np.where(known, 0.0, off + 2 * size * (stddev > 0))
            tests.add(flat / r, expected / r, allowed / r, f"{x} of {name}")


class WatchedRows:
    """Coordinates of a table that blocks of training show after every step.

    A row was read in a step if one of them has changed. Where a read would change none, as steps
    are too short, nothing tells whether it was, and the row is left out until it is flushed.
    """

    def __init__(self, law: RowsLaw, name: str, places: np.ndarray, now: Table):
        """Begins with rows.

        Args:
          law: Of the coordinates.
          name: Of the table, in words.
          places: Of the coordinates among those of `now`.
          now: Rows of the table.
        """
        self._law, self._name, self._places = law, name, places
        self._row = places // math.prod(now.values.shape[1:])
        self._begin(now)

    def _begin(self, now: Table) -> None:
        at = self._places
        self._now = Numbers.of(now).of_parts(lambda x: x[at])
        self._starts = starts(now)[at]
        self._known = np.ones(at.size, bool)

    def step(self, step: int, shown: np.ndarray, tests: Comparison) -> None:
        """Compares what a step leaves: float64[places]."""
        old, r = self._now, self._law.law.r
        _, new = self._law.stepped(self._law.caught_up(old, self._starts, step), step)
        theta, off = new.x[1], new.off[1]
        read = self._any(shown != old.x[1])
        self._known &= read | self._any(np.abs(theta - old.x[1]) > 2 * off)
        at, name = read & self._known, f"{self._name} trained in step {step:,}"
        tests.add(shown[at] / r, theta[at] / r, off[at] / r, name)
        self._now = Numbers(*(np.where(read, x, y) for x, y in zip(new, old, strict=True)))
        self._now.x[1], self._now.off[1] = shown, 0.0
        self._starts = np.where(read, step + 1, self._starts)

    def flush(self, stop: int, found: Table, tests: Comparison) -> None:
        """Compares what a flush leaves of the rows that are looked at."""
        known, name = self._known, f"{self._name} at step {stop:,} of training"
        new = self._law.caught_up(self._now, self._starts, stop).of_parts(lambda x: x[known])
        seen = (None if x is None else x.ravel()[self._places][known] for x in found[:2])
        law = self._law._replace(at=self._law.at[known])
        law.compare_flushed(tests, Table(*seen), new, stop, name)
        self._begin(found)

    def _any(self, coordinates: np.ndarray) -> np.ndarray:
        """Returns of which coordinates one of the same row is among these."""
        return np.isin(self._row, self._row[coordinates])


def starts(table: Table) -> np.ndarray:
    """Returns the steps that are in each coordinate of some rows."""
    return np.repeat(table.steps, math.prod(table.values.shape[1:]))


def step_sizes(rate: Any, num_steps: int) -> np.ndarray:
    """Returns the step sizes of a run, as its configuration has them: float64[num_steps]."""
    if not callable(rate):
        return np.full(num_steps, float(rate))
    try:  # a schedule of JAX's, all at once
        return np.asarray(jax.vmap(rate)(jnp.arange(num_steps)), np.float64).reshape(num_steps)
    except Exception:  # or one of any other kind
        return np.array([float(rate(k)) for k in range(num_steps)])


def _times(matrices: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.einsum("ijn,jn->in", matrices, x)


def _own_cell(x: np.ndarray) -> np.ndarray:
    """Returns the cell of a number's own power of two; 0 of 0."""
    _, order = np.frexp(x)
    return np.where(x == 0, 0.0, np.ldexp(1.0, order - 1 - _MOST_CELLS))


def _cell(stddev: float) -> tuple[float, bool]:
    """Returns the cell of the grid of noise of this deviation; whether rounding leaves no doubt."""
    order = math.log2(max(stddev, 2.0**-100))
    cell = 2.0 ** (math.floor(order) - _GRID_BITS)
    if 1e-5 < order % 1 < 1 - 1e-5:
        return cell, True
    return 2.0 ** (round(order) - _GRID_BITS), False
