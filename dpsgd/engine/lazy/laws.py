"""Laws of a run's gaps as arrays of a compiled program, looked up by step."""

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
"""Many small matrices: one array of all their entries (i, j) for each i and j."""


class LawTables(NamedTuple):
    """Precomputed transition (A) and noise-scale (S) matrices of the gaps that end at a step.

    They are float32 and packed; a gap takes two look-ups, see `Gaps`. S is V if d is 1, and L
    otherwise, see `GapLaw`.
    """

    to_multiple: Any
    """Gaps to the next multiple of K, [N + 1, 2 d^2], for the whole run."""
    from_multiples: Any
    """Gaps from each multiple of K, [N / K + 1, 2 d^2]."""
    from_recent: Any
    """Gaps from recent steps, [K, 2 d^2]."""


def packed(law: GapLaw) -> np.ndarray:
    """Returns A and S joined, float32 [..., 2 d^2].

    Raises:
      ValueError: If they are too large for float32.
    """
    if not max(np.abs(x).max(initial=0) for x in law) <= np.finfo(np.float32).max:
        raise ValueError("noise of lazy tables grows beyond float32; lower learning_rate")
    spread = law.covariance if law.covariance.shape[-1] == 1 else law.root
    flat = [x.reshape(*x.shape[:-2], -1) for x in (law.transition, spread)]
    return np.concatenate(flat, axis=-1).astype(np.float32)


def law_of(tables: LawTables, starts: Array, step: Array) -> tuple[Matrix, Matrix]:
    """Returns A and L of gaps from `starts` to `step`.

    Args:
      tables: Laws of the gaps that end at `step`.
      starts: First step of each gap, int32.
      step: Step at which the gaps end.
    """
    tables = LawTables(*map(jnp.asarray, tables))
    spacing = tables.from_recent.shape[0]
    multiple = -(-starts // spacing)
    order = round((tables.from_recent.shape[-1] // 2) ** 0.5)
    axes = range(order)

    def unpacked(rows: Array) -> tuple[Matrix, Matrix]:
        """Returns the matrices A and S of packed rows."""
        a, s = ([[rows[..., k + order * i + j] for j in axes] for i in axes] for k in (0, order**2))
        return a, s

    # Entry by entry: CPUs take ten times as long for arrays with axes of length 2.
    def times(x: Matrix, y: Matrix) -> Matrix:
        """Returns the matrix products x y."""
        products = [[[x[i][k] * y[k][j] for k in axes] for j in axes] for i in axes]
        return [[functools.reduce(operator.add, terms) for terms in row] for row in products]

    def chosen(x: Matrix, y: Matrix) -> Matrix:
        """Returns x for long gaps, over a multiple of K, and y for short ones."""
        return [[jnp.where(long, x[i][j], y[i][j]) for j in axes] for i in axes]

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
    """Returns the Euclidean norm of numbers, safe from underflow.

    >>> float(norm([jnp.float32(3e-30), jnp.float32(4e-30)])) > 4.9e-30
    True
    """
    largest = functools.reduce(jnp.maximum, map(jnp.abs, row))
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.sqrt(functools.reduce(operator.add, ((x / scale) ** 2 for x in row)))


def _lower(rows: Matrix) -> Matrix:
    """Returns lower triangular L with L L^T = P P^T, from the rows of P.

    Gram and Schmidt's method changes L by 2^-24 of a row if P changes by that; by P P^T the change
    would be its root, which a flush would show
    (docs/explanation/deferred-noise-for-embedding-tables.md).
    """
    first, second = rows
    length = norm(first)
    unit = [x / jnp.where(length > 0, length, 1) for x in first]
    dot = functools.reduce(operator.add, (x * y for x, y in zip(second, unit, strict=True)))
    residual = [x - dot * y for x, y in zip(second, unit, strict=True)]
    return [[length, jnp.zeros_like(length)], [dot, norm(residual)]]


class StepLaws(NamedTuple):
    """Optimizer of tables in one step, float32, and the gaps that end there.

    For a block, step sizes, `from_multiples` and `from_recent` have a leading axis of steps.
    """

    step_size: Any
    momentum: Any
    gaps: LawTables

    def select(self, j: Any) -> StepLaws:
        """Returns the laws of step `j` of a block."""
        to_multiple, *by_step = self.gaps
        gaps = LawTables(to_multiple, *(laws[j] for laws in by_step))
        return self._replace(step_size=self.step_size[j], gaps=gaps)


class RunLaws:
    """Laws of all gaps of a run."""

    def __init__(self, optimizer: LinearSgd) -> None:
        self._optimizer = optimizer
        self._gaps = Gaps(optimizer)
        self._to_multiple = jax.device_put(packed(self._gaps.to_next_multiple))

    def block_arrays(self, steps: range, room: int) -> StepLaws:
        """Returns the laws of consecutive steps, padded to `room` steps."""
        gaps_by_step = [self._gaps.ending_at(step) for step in steps]
        step_sizes = np.zeros(room, np.float32)
        step_sizes[: len(steps)] = self._optimizer.step_sizes[steps.start : steps.stop]
        gap_laws = []
        for name in ("from_multiples", "from_recent"):
            rows = np.stack([packed(getattr(gaps, name)) for gaps in gaps_by_step])
            gap_laws.append(np.pad(rows, [(0, room - len(steps)), (0, 0), (0, 0)]))
        momentum = np.float32(self._optimizer.momentum)
        return StepLaws(step_sizes, momentum, LawTables(self._to_multiple, *gap_laws))

    def flush_arrays(self, steps: int) -> LawTables:
        """Returns the laws of a flush after `steps` steps."""
        gaps = self._gaps.ending_at(steps)
        return LawTables(self._to_multiple, packed(gaps.from_multiples), packed(gaps.from_recent))
