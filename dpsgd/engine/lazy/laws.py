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
"""d x d arrays of one shape: of many small matrices, all entries (i, j) in one."""


class LawTables(NamedTuple):
    """A and V of the gaps that end at a step, float32 and packed, by two look-ups: see `Gaps`."""

    to_multiple: Any
    """[N + 1, 2 d^2], of the whole run."""
    from_multiples: Any
    """[N / K + 1, 2 d^2]."""
    from_recent: Any
    """[K, 2 d^2]."""


def packed(law: GapLaw) -> np.ndarray:
    """Returns A and V side by side: float32 [..., 2 d^2].

    Raises:
      ValueError: if they are too large for float32.
    """
    flat = np.concatenate([x.reshape(*x.shape[:-2], -1) for x in law], axis=-1)
    if not np.abs(flat).max(initial=0) <= np.finfo(np.float32).max:
        raise ValueError("noise of lazy tables grows beyond float32: take shorter steps")
    return flat.astype(np.float32)


def law_of(tables: LawTables, starts: Array, step: Array) -> tuple[Matrix, Matrix]:
    """Returns A and V of the gaps from `starts` to `step`: d x d numbers, float32 as `starts`."""
    tables = LawTables(*map(jnp.asarray, tables))
    spacing = tables.from_recent.shape[0]
    multiple = -(-starts // spacing)
    order = round((tables.from_recent.shape[-1] // 2) ** 0.5)
    each = range(order)

    def unpacked(rows: Array) -> tuple[Matrix, Matrix]:
        a, v = ([[rows[..., k + order * i + j] for j in each] for i in each] for k in (0, order**2))
        return a, v

    # Entry by entry: CPUs take ten times as long for arrays with axes of length 2.
    def times(x: Matrix, y: Matrix) -> Matrix:
        products = [[[x[i][k] * y[k][j] for k in each] for j in each] for i in each]
        return [[functools.reduce(operator.add, terms) for terms in row] for row in products]

    def transposed(x: Matrix) -> Matrix:
        return [[x[j][i] for j in each] for i in each]

    def chosen(x: Matrix, y: Matrix) -> Matrix:
        return [[jnp.where(long, x[i][j], y[i][j]) for j in each] for i in each]

    a1, v1 = unpacked(tables.to_multiple[starts])
    a2, v2 = unpacked(tables.from_multiples[multiple])
    a3, v3 = unpacked(tables.from_recent[starts % spacing])
    long = multiple * spacing <= step
    carried = times(times(a2, v1), transposed(a2))
    both = [[carried[i][j] + v2[i][j] for j in each] for i in each]
    return chosen(times(a2, a1), a3), chosen(both, v3)


class StepLaws(NamedTuple):
    """The optimizer of tables in one step, float32, and the gaps that end there.

    Of a block, step sizes, `from_multiples` and `from_recent` have a leading axis of steps.
    """

    step_size: Any
    momentum: Any
    weight_decay: Any
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

    def of(self, steps: range, room: int) -> StepLaws:
        found = [self._gaps.at(step) for step in steps]
        sizes = np.zeros(room, np.float32)
        sizes[: len(steps)] = self._optimizer.step_sizes[steps.start : steps.stop]
        gaps = []
        for name in ("from_multiples", "from_recent"):
            rows = np.stack([packed(getattr(at, name)) for at in found])
            gaps.append(np.pad(rows, [(0, room - len(steps)), (0, 0), (0, 0)]))
        numbers = np.float32(self._optimizer.momentum), np.float32(self._optimizer.weight_decay)
        return StepLaws(sizes, *numbers, LawTables(self._to_multiple, *gaps))

    def after(self, steps: int) -> LawTables:
        at = self._gaps.at(steps)
        return LawTables(self._to_multiple, packed(at.from_multiples), packed(at.from_recent))
