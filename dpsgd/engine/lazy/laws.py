"""The laws of a run's gaps as arrays of a compiled program: looked up by step, once a block."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dpsgd.engine.lazy.gaps import GapLaw, Gaps, LinearSgd

Matrix = list[list[Array]]
"""Arrays of one shape: of many small matrices, all entries (i, j) in one."""


class LawTables(NamedTuple):
    """A and S of the gaps that end at a step, float32 and packed, by two look-ups: see `Gaps`.

    S is V where d is 1, and L otherwise, see `GapLaw`.
    """

    to_multiple: Any
    """[N + 1, 2 d^2], of the whole run."""
    from_multiples: Any
    """[N / K + 1, 2 d^2]."""
    from_recent: Any
    """[K, 2 d^2]."""


def packed(law: GapLaw) -> np.ndarray:
    """Returns A and S side by side: float32 [..., 2 d^2].

    Raises:
      ValueError: if they are too large for float32.
    """
    if not max(np.abs(x).max(initial=0) for x in law) <= np.finfo(np.float32).max:
        raise ValueError("noise of lazy tables grows beyond float32: take shorter steps")
    spread = law.covariance if law.covariance.shape[-1] == 1 else law.root
    flat = [x.reshape(*x.shape[:-2], -1) for x in (law.transition, spread)]
    return np.concatenate(flat, axis=-1).astype(np.float32)


def law_of(tables: LawTables, starts: Array, step: Array) -> tuple[Matrix, Matrix]:
    """Returns A and L of the gaps from `starts` to `step`: d x d numbers, float32 as `starts`."""
    tables = LawTables(*map(jnp.asarray, tables))
    spacing = tables.from_recent.shape[0]
    multiple = -(-starts // spacing)
    order = round((tables.from_recent.shape[-1] // 2) ** 0.5)
    each = range(order)

    def unpacked(rows: Array) -> tuple[Matrix, Matrix]:
        a, s = ([[rows[..., k + order * i + j] for j in each] for i in each] for k in (0, order**2))
        return a, s

    # Entry by entry: CPUs take ten times as long for arrays with axes of length 2.
    def times(x: Matrix, y: Matrix) -> Matrix:
        products = [[[x[i][k] * y[k][j] for k in each] for j in each] for i in each]
        return [[functools.reduce(operator.add, terms) for terms in row] for row in products]

    def chosen(x: Matrix, y: Matrix) -> Matrix:
        return [[jnp.where(long, x[i][j], y[i][j]) for j in each] for i in each]

    a1, s1 = unpacked(tables.to_multiple[starts])
    a2, s2 = unpacked(tables.from_multiples[multiple])
    a3, s3 = unpacked(tables.from_recent[starts % spacing])
    long = multiple * spacing <= step
    a, carried = chosen(times(a2, a1), a3), times(a2, s1)
    if order == 1:
        ((variance,),) = chosen([[times(carried, a2)[0][0] + s2[0][0]]], s3)
        return a, [[jnp.sqrt(variance)]]
    return a, chosen(_lower([x + y for x, y in zip(carried, s2, strict=True)]), s3)


def norm(row: list[Array]) -> Array:
    """Returns the Euclidean norm of numbers, of which no square is too small for float32."""
    largest = functools.reduce(jnp.maximum, map(jnp.abs, row))
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.sqrt(functools.reduce(operator.add, ((x / scale) ** 2 for x in row)))


def _lower(rows: Matrix) -> Matrix:
    """Returns L, lower triangular, with L L^T = P P^T, of the rows of P.

    By Gram and Schmidt, and not by P P^T: what differs by 2^-24 of a row differs by that in L, and
    not by the root of it, which a flush would show (docs/explanation/
    deferred-noise-for-embedding-tables.md).
    """
    first, second = rows
    length = norm(first)
    unit = [x / jnp.where(length > 0, length, 1) for x in first]
    dot = functools.reduce(operator.add, (x * y for x, y in zip(second, unit, strict=True)))
    rest = [x - dot * y for x, y in zip(second, unit, strict=True)]
    return [[length, jnp.zeros_like(length)], [dot, norm(rest)]]


class StepLaws(NamedTuple):
    """The optimizer of tables in one step, float32, and the gaps that end there.

    Of a block, step sizes, `from_multiples` and `from_recent` have a leading axis of steps.
    """

    step_size: Any
    momentum: Any
    gaps: LawTables

    def at(self, j: Any) -> StepLaws:
        """Returns those of step `j` of a block."""
        whole, *ending = self.gaps
        gaps = LawTables(whole, *(of_steps[j] for of_steps in ending))
        return self._replace(step_size=self.step_size[j], gaps=gaps)


class RunLaws:
    """The `Schedule` of lazy tables."""

    def __init__(self, optimizer: LinearSgd) -> None:
        self._optimizer = optimizer
        self._gaps = Gaps(optimizer)
        self._to_multiple = jax.device_put(packed(self._gaps.to_next_multiple))

    def block_arrays(self, steps: range, room: int) -> StepLaws:
        gaps_by_step = [self._gaps.at(step) for step in steps]
        step_sizes = np.zeros(room, np.float32)
        step_sizes[: len(steps)] = self._optimizer.step_sizes[steps.start : steps.stop]
        ends = []
        for name in ("from_multiples", "from_recent"):
            rows = np.stack([packed(getattr(gaps, name)) for gaps in gaps_by_step])
            ends.append(np.pad(rows, [(0, room - len(steps)), (0, 0), (0, 0)]))
        momentum = np.float32(self._optimizer.momentum)
        return StepLaws(step_sizes, momentum, LawTables(self._to_multiple, *ends))

    def flush_arrays(self, steps: int) -> LawTables:
        at = self._gaps.at(steps)
        return LawTables(self._to_multiple, packed(at.from_multiples), packed(at.from_recent))
