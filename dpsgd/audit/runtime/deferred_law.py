r"""What a row of a table with deferred noise must hold: simulated in float64, step by step.

The optimizer moves a row by m = mu m + g + w theta, theta = theta - a_t m, with g = r z and
r = sigma C / b. Over a gap from step s to t, (m, theta) becomes A (m, theta) + r L (x, y), with L
lower triangular and L L^T = V; x and y are the normals of step t for `MOMENTUM` and `VALUE`
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

_GRID_BITS = 10  # of a flush: cells of 2^-10 to 2^-11 of the noise since the run's first step
_MOST_CELLS = 13  # binary digits of a number beyond which its own size gives the cell
_EPS = 2.0**-21  # of float32, what a few operations round


class Numbers(NamedTuple):
    """What coordinates must hold: float64[coordinates]; and how far they may be off."""

    m: np.ndarray
    theta: np.ndarray
    off_m: Any = 0.0
    off_theta: Any = 0.0

    @classmethod
    def of(cls, table: Table) -> Numbers:
        """Returns what some rows hold."""
        theta = table.values.astype(np.float64).ravel()
        m = np.zeros_like(theta) if table.momentum is None else table.momentum.ravel()
        return cls(m.astype(np.float64), theta)


class DeferredLaw:
    """The law of the rows of a run's tables.

    Attributes:
      sizes: Step sizes of the run: float64[steps].
      rule: Momentum mu and decay w.
      r: Standard deviation of the noise of a private mean gradient.
      key: Attempt -> key of its noise: uint32[4].
    """

    def __init__(
        self,
        sizes: np.ndarray,
        momentum: float,
        decay: float,
        r: float,
        key: Callable[[int], np.ndarray],
    ):
        self.r, self.sizes, self.rule, self.key = r, sizes, (momentum, decay), key
        self._paths: dict[int, list[tuple[float, ...]]] = {}

    def gap(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns how (m, theta) moves in the steps start, ..., stop - 1, at r = 1: A and V."""
        if start not in self._paths:
            self._paths[start] = self._simulated(start)
        a, b, c, d, mm, mt, tt = self._paths[start][stop - start]
        return np.array([[a, b], [c, d]]), np.array([[mm, mt], [mt, tt]])

    def _simulated(self, start: int) -> list[tuple[float, ...]]:
        mu, w = self.rule
        # (m, theta) from (1, 0) and from (0, 1), and their covariance from none.
        m1, t1, m2, t2 = 1.0, 0.0, 0.0, 1.0
        mm = mt = tt = 0.0
        path: list[tuple[float, ...]] = [(m1, m2, t1, t2, mm, mt, tt)]
        for a in self.sizes[start:].tolist():
            m1, m2 = mu * m1 + w * t1, mu * m2 + w * t2
            t1, t2 = t1 - a * m1, t2 - a * m2
            # m' = mu m + w theta + z, and theta' = theta - a m'.
            with_theta = mu * mt + w * tt
            mm = mu * mu * mm + 2 * mu * w * mt + w * w * tt + 1.0
            mt = with_theta - a * mm
            tt = tt - 2 * a * with_theta + a * a * mm
            path.append((m1, m2, t1, t2, mm, mt, tt))
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
        x, y = (self._normals(stop, of) for of in (reference.MOMENTUM, reference.VALUE))
        which, at = np.unique(np.append(stop, starts), return_inverse=True)
        laws = zip(*(self.law.gap(start, stop) for start in which.tolist()), strict=True)
        transitions, covariances = (np.stack(of)[at[1:]] for of in laws)
        (a, b), (c, d) = np.moveaxis(transitions, 0, -1)
        (mm, mt), (_, tt) = np.moveaxis(covariances, 0, -1)
        gap, of_m, of_theta = starts < stop, np.sqrt(mm), np.sqrt(tt)
        slope = np.where(gap, mt, 0.0) / np.where(gap, of_m, 1.0) if self.law.rule[0] else 0.0 * mt
        # What x leaves of a variance: where that is little, float32 has few digits of it.
        rest, digits = np.maximum(0.0, tt - slope**2), 2.0**-20 * tt
        own, lost = np.sqrt(rest), np.sqrt(rest + digits) - np.sqrt(np.maximum(0, rest - digits))

        def off(of_m: np.ndarray, of_theta: np.ndarray, noise: np.ndarray) -> np.ndarray:
            carried = np.abs(of_m * old.m) + np.abs(of_theta * old.theta)
            moved = np.abs(of_m) * old.off_m + np.abs(of_theta) * old.off_theta
            return moved + gap * (r * noise + _EPS * carried)

        return Numbers(
            a * old.m + b * old.theta + r * of_m * x,
            c * old.m + d * old.theta + r * (slope * x + own * y),
            off(a, b, ALLOWED * of_m),
            off(c, d, ALLOWED * of_theta + lost * np.abs(y)),
        )

    def of_step(self, step: int) -> np.ndarray:
        """Returns the noise that rows get in a step that reads them, over r."""
        return self._normals(step, reference.STEP)

    def stepped(self, old: Numbers, step: int) -> tuple[np.ndarray, Numbers]:
        """Returns the noise of a step, over r, and what coordinates hold after it."""
        (mu, w), a, r = self.law.rule, self.law.sizes[step], self.law.r
        z = self.of_step(step)
        g = r * z
        m = mu * old.m + g + w * old.theta
        size = np.abs(mu * old.m) + np.abs(g) + np.abs(w * old.theta)
        off_m = mu * old.off_m + w * old.off_theta + r * ALLOWED + _EPS * size
        theta = old.theta - a * m
        off = old.off_theta + a * off_m + _EPS * (np.abs(old.theta) + np.abs(a * m))
        return z, Numbers(m, theta, off_m, off)

    def compare_flushed(
        self, tests: Comparison, found: Table, new: Numbers, stop: int, name: str
    ) -> None:
        """Compares flushed numbers with those that they were rounded from, x to ceil(x - U)."""
        r, key = self.law.r, self.law.key(self.attempt)
        spread = r * np.sqrt(np.diagonal(self.law.gap(0, stop)[1]))
        for x, values, exact, off, stddev, purpose in (
            ("theta", found.values, new.theta, new.off_theta, spread[1], reference.VALUE),
            ("m", found.momentum, new.m, new.off_m, spread[0], reference.MOMENTUM),
        ):
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
        at, numbers = self._places, Numbers.of(now)
        self._now = Numbers(numbers.m[at], numbers.theta[at], *np.zeros((2, at.size)))
        self._starts = starts(now)[at]
        self._known = np.ones(at.size, bool)

    def step(self, step: int, shown: np.ndarray, tests: Comparison) -> None:
        """Compares what a step leaves: float64[places]."""
        old, r = self._now, self._law.law.r
        _, new = self._law.stepped(self._law.caught_up(old, self._starts, step), step)
        read = self._any(shown != old.theta)
        self._known &= read | self._any(np.abs(new.theta - old.theta) > 2 * new.off_theta)
        at, name = read & self._known, f"{self._name} trained in step {step:,}"
        tests.add(shown[at] / r, new.theta[at] / r, new.off_theta[at] / r, name)
        self._now = Numbers(
            np.where(read, new.m, old.m), shown, np.where(read, new.off_m, old.off_m), 0 * shown
        )
        self._starts = np.where(read, step + 1, self._starts)

    def flush(self, stop: int, found: Table, tests: Comparison) -> None:
        """Compares what a flush leaves of the rows that are looked at."""
        known, name = self._known, f"{self._name} at step {stop:,} of training"
        new = jax.tree.map(lambda x: x[known], self._law.caught_up(self._now, self._starts, stop))
        values, m = (None if x is None else x.ravel()[self._places][known] for x in found[:2])
        law = self._law._replace(at=self._law.at[known])
        law.compare_flushed(tests, Table(values, m, None), new, stop, name)
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
