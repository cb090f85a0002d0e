"""Laws of a run's gaps as arrays of a compiled program, looked up by step."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dpsgd.engine.lazy.gaps import GapLaw, Gaps

Matrix = list[list[Array]]
"""Many small matrices: one array of all their entries (i, j) for each i and j."""


class StepLaws(NamedTuple):
    """Optimizer of tables in one step, and laws of the gaps that end there, float32.

    The laws are transition (A) and noise-scale (L) matrices, see `GapLaw`, packed; a gap takes two
    look-ups, see `Gaps`. For a block, `from_multiples`, `from_recent` and `step_size` have a
    leading axis of steps.
    """

    to_multiple: Any
    """Gaps to the next multiple of K, [N + 1, 2 d^2], for the whole run."""
    from_multiples: Any
    """Gaps from each multiple of K, [N / K + 1, 2 d^2]."""
    from_recent: Any
    """Gaps from recent steps, [K, 2 d^2]."""
    step_size: Any
    momentum: Any

    def select(self, j: Any) -> StepLaws:
        """Returns the laws of step `j` of a block."""
        multiples, recent, size = (x[j] for x in self[1:4])
        return self._replace(from_multiples=multiples, from_recent=recent, step_size=size)


def packed(law: GapLaw) -> np.ndarray:
    """Returns A and S joined, float32 [..., 2 d^2].

    Raises:
      ValueError: If they are too large for float32.
    """
    if not max(np.abs(x).max(initial=0) for x in law) <= np.finfo(np.float32).max:
        raise ValueError("noise of lazy tables grows beyond float32; lower learning_rate")
    flat = [x.reshape(*x.shape[:-2], -1) for x in (law.transition, law.root)]
    return np.concatenate(flat, axis=-1).astype(np.float32)


def law_of(laws: StepLaws, starts: Array, step: Array) -> tuple[Matrix, Matrix]:
    """Returns A and L of gaps from `starts` to `step`.

    Args:
      laws: Laws of the gaps that end at `step`.
      starts: First step of each gap, int32.
      step: Step at which the gaps end.
    """
    to_multiple, from_multiples, from_recent = map(jnp.asarray, laws[:3])
    spacing = from_recent.shape[0]
    multiple = -(-starts // spacing)
    order = round((from_recent.shape[-1] // 2) ** 0.5)
    axes = range(order)

    def unpacked(rows: Array) -> tuple[Matrix, Matrix]:
        """Returns the matrices A and L of packed rows."""
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

    a1, s1 = unpacked(to_multiple[starts])
    a2, s2 = unpacked(from_multiples[multiple])
    a3, s3 = unpacked(from_recent[starts % spacing])
    long = multiple * spacing <= step
    joined = _lower([x + y for x, y in zip(times(a2, s1), s2, strict=True)])
    return chosen(times(a2, a1), a3), chosen(joined, s3)


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
    first, *others = rows
    length = norm(first)
    if not others:
        return [[length]]
    (second,) = others
    unit = [x / jnp.where(length > 0, length, 1) for x in first]
    dot = functools.reduce(operator.add, (x * y for x, y in zip(second, unit, strict=True)))
    residual = [x - dot * y for x, y in zip(second, unit, strict=True)]
    return [[length, jnp.zeros_like(length)], [dot, norm(residual)]]


class RunLaws(Gaps):
    """Laws of all gaps of a run, as arrays of its programs."""

    @functools.cached_property
    def _to_multiple(self) -> Array:
        return jax.device_put(packed(self.to_next_multiple))

    def block_arrays(self, steps: range, room: int) -> StepLaws:
        """Returns the laws of consecutive steps, padded to `room` steps."""
        laws = [self.flush_arrays(step)[1:4] for step in steps]
        stacked = [np.stack(arrays) for arrays in zip(*laws, strict=True)]
        padding = (0, room - len(steps))
        multiples, recent, sizes = (np.pad(x, [padding, *[(0, 0)] * (x.ndim - 1)]) for x in stacked)
        momentum = np.float32(self.optimizer.momentum)
        return StepLaws(self._to_multiple, multiples, recent, sizes, momentum)

    def flush_arrays(self, steps: int) -> StepLaws:
        """Returns the laws after `steps` steps, for a flush or the next step."""
        run, gaps = self.optimizer, self.ending_at(steps)
        laws = self._to_multiple, packed(gaps.from_multiples), packed(gaps.from_recent)
        size = run.step_sizes[steps] if steps < run.num_steps else 0.0
        return StepLaws(*laws, np.float32(size), np.float32(run.momentum))
