"""The law of a gap: how noise moves a row of a table that no batch reads. It imports no JAX.

Derivation: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class GapLaw(NamedTuple):
    """How a state of d numbers moves over a gap, at r = 1."""

    transition: np.ndarray
    """A: float64[..., d, d]."""
    covariance: np.ndarray
    """V: float64[..., d, d]."""

    @property
    def root(self) -> np.ndarray:
        """L: lower triangular, with L L^T = V to 2^-23 of each row: float64[..., d, d]."""
        v = self.covariance
        low = np.zeros_like(v)
        for j in range(v.shape[-1]):
            rest = v[..., j] - np.sum(low * low[..., j, None, :], axis=-1)
            pivot = rest[..., j]
            found = pivot > 2.0**-46 * v[..., j, j]  # what is less is of roundings
            over = np.sqrt(np.where(found, pivot, 1.0))[..., None]
            low[..., j:, j] = np.where(found[..., None], rest[..., j:] / over, 0.0)
        return low

    def then(self, later: GapLaw) -> GapLaw:
        a = later.transition
        carried = a @ self.covariance @ np.swapaxes(a, -1, -2)
        return GapLaw(a @ self.transition, carried + later.covariance)

    def of(self, places: Any) -> GapLaw:
        return GapLaw(self.transition[places], self.covariance[places])

    def put(self, places: Any, laws: GapLaw) -> None:
        self.transition[places], self.covariance[places] = laws

    def copy(self) -> GapLaw:
        return GapLaw(self.transition.copy(), self.covariance.copy())


SMALLEST, LARGEST = 1e-18, 1e15
"""Step sizes whose squares, and sums of these, have a float32. Smaller ones are taken for 0."""


@dataclass(frozen=True)
class LinearSgd:
    """An optimizer that is linear in its gradients: its run's gaps have a law.

    Attributes:
      step_sizes: a_k of all N steps of the run, from 0 to `LARGEST`.
      momentum: mu in [0, 1).

    Raises:
      ValueError: If one of them is out of range.
    """

    step_sizes: tuple[float, ...]
    momentum: float = 0.0

    def __post_init__(self) -> None:
        sizes = np.array(self.step_sizes, float)
        if not sizes.size:
            raise ValueError("a run has at least one step, and step_sizes is empty")
        if not (fine := (sizes >= 0) & (sizes <= LARGEST)).all():
            step = int(np.argmin(fine))
            raise ValueError(
                f"learning_rate must lie in [0, {LARGEST:g}], and is {sizes[step]} at step {step}"
            )
        sizes[sizes < SMALLEST] = 0
        object.__setattr__(self, "step_sizes", tuple(sizes.tolist()))
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")

    @property
    def num_steps(self) -> int:
        """Steps N of the run."""
        return len(self.step_sizes)

    @property
    def order(self) -> int:
        """Numbers d of the state of a coordinate: 1 of theta alone, 2 of m and theta."""
        return 2 if self.momentum else 1

    @cached_property
    def steps(self) -> GapLaw:
        """The laws of single steps: arrays [N, d, d]."""
        a, mu = np.array(self.step_sizes), self.momentum
        one, none = np.ones_like(a), np.zeros_like(a)
        transition = np.array([[mu * one, none], [-a * mu, one]])[-self.order :, -self.order :]
        noise = np.stack([one, -a])[-self.order :]
        covariance = noise[:, None] * noise
        return GapLaw(np.moveaxis(transition, 2, 0), np.moveaxis(covariance, 2, 0))

    def law(self, start: int, stop: int) -> GapLaw:
        """Returns the law of the steps start, ..., stop - 1, one by one.

        >>> LinearSgd((1.0, 2.0, 0.5)).law(0, 2).covariance.item()  # 1 + 4
        5.0
        """
        found = self._nothing()
        for k in range(start, stop):
            found = found.then(self.steps.of(k))
        return found

    def _nothing(self, *shape: int) -> GapLaw:
        eye = np.broadcast_to(np.eye(self.order), (*shape, self.order, self.order))
        return GapLaw(eye.copy(), np.zeros_like(eye))


class StepGaps(NamedTuple):
    """The laws of the gaps that end at one step t, or at each of several."""

    from_multiples: GapLaw
    """Of the gap from each multiple of K, i K <= t, to t: arrays [..., ceil(N / K) + 1, d, d]; what
    is beyond t is of no gap."""
    from_recent: GapLaw
    """Of the gap from the steps s since the last multiple of K, in the place s mod K: arrays
    [..., K, d, d]."""


class Gaps:
    """The laws of all gaps of a run, in the form in which a step looks them up.

    Args:
      optimizer: Of the table.
      spacing: K; by default about sqrt(N).
    """

    _block: int
    _place: int
    _multiples: GapLaw
    _recent: GapLaw

    def __init__(self, optimizer: LinearSgd, spacing: int | None = None) -> None:
        self.optimizer = optimizer
        self.spacing = spacing or max(1, math.isqrt(optimizer.num_steps))
        self._begin()

    @cached_property
    def _to_ends(self) -> GapLaw:
        """Of the gap from each step to the end of its block of K: arrays [blocks, K + 1, d, d]."""
        k, run = self.spacing, self.optimizer
        blocks = -(-run.num_steps // k)

        def in_blocks(steps: np.ndarray, nothing: np.ndarray) -> np.ndarray:
            padded = np.concatenate([steps, nothing])
            return padded.reshape(blocks, k, *steps.shape[1:])

        rest = run._nothing(blocks * k - run.num_steps)
        steps = GapLaw(*map(in_blocks, run.steps, rest))
        found = run._nothing(blocks, k + 1)
        for place in range(k - 1, -1, -1):
            law = steps.of(np.s_[:, place]).then(found.of(np.s_[:, place + 1]))
            found.put(np.s_[:, place], law)
        return found

    @cached_property
    def to_next_multiple(self) -> GapLaw:
        """Of the gap from each step to the next multiple of K, or itself: arrays [N + 1, d, d]."""
        run, inside = self.optimizer, self._to_ends.copy()
        inside.put(np.s_[:, 0], run._nothing(1))
        flat = (x[:, : self.spacing].reshape(-1, *x.shape[2:]) for x in inside)
        last = run._nothing(1)
        return GapLaw(
            *(np.concatenate(both)[: run.num_steps + 1] for both in zip(flat, last, strict=True))
        )

    def at(self, step: int) -> StepGaps:
        """Returns the laws of the gaps that end at `step`: the same bits, whatever came before."""
        block, place = divmod(step, self.spacing)
        if (block, place) < (self._block, self._place):
            self._begin()
        while self._block < block:  # and not step by step, as a run may go on from any
            begun = np.s_[: self._block + 1]
            whole = self._to_ends.of((self._block, 0))
            self._multiples.put(begun, self._multiples.of(begun).then(whole))
            self._block, self._place = self._block + 1, 0
            self._recent = self.optimizer._nothing(self.spacing)
        while self._place < place:
            begun = np.s_[: self._place + 1]
            law = self.optimizer.steps.of(block * self.spacing + self._place)
            self._recent.put(begun, self._recent.of(begun).then(law))
            self._place += 1
        multiples, begun = self._multiples.copy(), np.s_[: block + 1]
        multiples.put(begun, multiples.of(begun).then(self._recent.of(0)))
        return StepGaps(multiples, self._recent.copy())

    def _begin(self) -> None:
        blocks = -(-self.optimizer.num_steps // self.spacing)
        self._block = self._place = 0
        self._multiples = self.optimizer._nothing(blocks + 1)
        """Of the gaps that end where the block begins."""
        self._recent = self.optimizer._nothing(self.spacing)
