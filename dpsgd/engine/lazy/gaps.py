"""Law of a gap: how noise moves a table row that no batch reads, without JAX.

Derivation: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class GapLaw(NamedTuple):
    """Law of the change of a state of d numbers over a gap, at r = 1."""

    transition: np.ndarray
    """Transition matrix A, float64[..., d, d]."""
    covariance: np.ndarray
    """Covariance V, float64[..., d, d]."""

    @property
    def root(self) -> np.ndarray:
        """Lower triangular L with L L^T = V, float64[..., d, d].

        Each row is right to 2^-23 of its length.

        >>> GapLaw(np.eye(1), np.array([[4.0]])).root.tolist()
        [[2.0]]
        """
        v = self.covariance
        low = np.zeros_like(v)
        for j in range(v.shape[-1]):
            residual = v[..., j] - np.sum(low * low[..., j, None, :], axis=-1)
            pivot = residual[..., j]
            positive = pivot > 2.0**-46 * v[..., j, j]  # less is rounding
            divisor = np.sqrt(np.where(positive, pivot, 1.0))[..., None]
            low[..., j:, j] = np.where(positive[..., None], residual[..., j:] / divisor, 0.0)
        return low

    def then(self, later: GapLaw) -> GapLaw:
        """Returns the law of this gap and a `later` one together.

        >>> step = GapLaw(np.array([[0.5]]), np.array([[1.0]]))
        >>> step.then(step).covariance.item()  # 0.5^2 + 1
        1.25
        """
        a = later.transition
        carried = a @ self.covariance @ np.swapaxes(a, -1, -2)
        return GapLaw(a @ self.transition, carried + later.covariance)

    def select(self, places: Any) -> GapLaw:
        """Returns the laws at some indices of the leading axes."""
        return GapLaw(self.transition[places], self.covariance[places])

    def assign(self, places: Any, laws: GapLaw) -> None:
        """Overwrites the laws at some indices."""
        self.transition[places], self.covariance[places] = laws

    def followed(self, count: int, later: GapLaw) -> GapLaw:
        """Returns these laws, the first `count` of them extended by a `later` gap."""
        extended = self.select(np.s_[:count]).then(later)
        pairs = zip(extended, self.select(np.s_[count:]), strict=True)
        return GapLaw(*map(np.concatenate, pairs))


SMALLEST, LARGEST = 1e-18, 1e15
"""Range of step sizes whose summed squares have a float32; smaller ones count as 0."""


@dataclass(frozen=True)
class LinearSgd:
    """Optimizer that is linear in its gradients, so that a run's gaps have a law.

    Attributes:
      step_sizes: Step sizes a_k of all N steps of the run, from 0 to `LARGEST`.
      momentum: Factor mu in [0, 1).

    Raises:
      ValueError: If a step size or the momentum is out of range.
    """

    step_sizes: tuple[float, ...]
    momentum: float = 0.0

    def __post_init__(self) -> None:
        sizes = np.array(self.step_sizes, float)
        if not sizes.size:
            raise ValueError("step_sizes is empty; give one for each step of the run")
        if not (fine := (sizes >= 0) & (sizes <= LARGEST)).all():
            step = int(np.argmin(fine))
            raise ValueError(
                f"learning_rate must lie in [0, {LARGEST:g}], got {sizes[step]} at step {step}"
            )
        sizes[sizes < SMALLEST] = 0
        object.__setattr__(self, "step_sizes", tuple(sizes.tolist()))
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")

    @property
    def num_steps(self) -> int:
        """Number N of steps of the run."""
        return len(self.step_sizes)

    @property
    def order(self) -> int:
        """Number d of a coordinate's states: theta, and m with momentum."""
        return 2 if self.momentum else 1

    @cached_property
    def steps(self) -> GapLaw:
        """Laws of the single steps, arrays [N, d, d]."""
        a, mu = np.array(self.step_sizes), self.momentum
        ones, zeros = np.ones_like(a), np.zeros_like(a)
        transition = np.array([[mu * ones, zeros], [-a * mu, ones]])[-self.order :, -self.order :]
        noise = np.stack([ones, -a])[-self.order :]
        covariance = noise[:, None] * noise
        return GapLaw(np.moveaxis(transition, 2, 0), np.moveaxis(covariance, 2, 0))

    def _nothing(self, *shape: int) -> GapLaw:
        eye = np.broadcast_to(np.eye(self.order), (*shape, self.order, self.order))
        return GapLaw(eye.copy(), np.zeros_like(eye))


class StepGaps(NamedTuple):
    """Laws of the gaps that end at one step t."""

    from_multiples: GapLaw
    """Law of the gap from each multiple i K <= t to t, arrays [ceil(N / K) + 1, d, d]; void beyond
    t."""
    from_recent: GapLaw
    """Law of the gap from each step s since the last multiple of K, at index s mod K, arrays
    [K, d, d]."""


class Gaps:
    """Laws of all gaps of a run, for look-up by a step, from any thread.

    Args:
      optimizer: Optimizer of the table.

    >>> Gaps(LinearSgd((1.0,) * 9)).ending_at(7).from_multiples.covariance.ravel()[:3].tolist()
    [7.0, 4.0, 1.0]
    """

    def __init__(self, optimizer: LinearSgd) -> None:
        self.optimizer = optimizer
        self.spacing = math.isqrt(optimizer.num_steps)
        blocks = -(-optimizer.num_steps // self.spacing)
        # A step; laws of gaps from multiples of K to its block, and from recent steps to it.
        self._first = 0, optimizer._nothing(blocks + 1), optimizer._nothing(self.spacing)
        # One tuple: a flush or Ctrl-C may come while the next block is prepared.
        self._latest = self._first

    @cached_property
    def _to_ends(self) -> GapLaw:
        """Law of the gap from each step to its block's end, arrays [blocks, K + 1, d, d]."""
        k, run = self.spacing, self.optimizer
        blocks = -(-run.num_steps // k)

        def in_blocks(steps: np.ndarray, nothing: np.ndarray) -> np.ndarray:
            """Returns matrices of steps and of padding, [blocks, K, d, d]."""
            padded = np.concatenate([steps, nothing])
            return padded.reshape(blocks, k, *steps.shape[1:])

        padding = run._nothing(blocks * k - run.num_steps)
        steps = GapLaw(*map(in_blocks, run.steps, padding))
        laws = run._nothing(blocks, k + 1)
        for place in range(k - 1, -1, -1):
            law = steps.select(np.s_[:, place]).then(laws.select(np.s_[:, place + 1]))
            laws.assign(np.s_[:, place], law)
        return laws

    @cached_property
    def to_next_multiple(self) -> GapLaw:
        """Law of each step's gap to the next multiple of K, arrays [N + 1, d, d]."""
        run, k = self.optimizer, self.spacing
        flat = (x[:, :k].reshape(-1, *x.shape[2:]) for x in self._to_ends)
        pairs = zip(flat, run._nothing(1), strict=True)
        laws = GapLaw(*(np.concatenate(pair)[: run.num_steps + 1] for pair in pairs))
        laws.assign(np.s_[::k], run._nothing(1))
        return laws

    def ending_at(self, step: int) -> StepGaps:
        """Returns the laws of the gaps that end at `step`.

        The bits do not depend on earlier calls, nor on calls of other threads.
        """
        latest = self._latest
        before, multiples, recent = latest if latest[0] <= step else self._first
        block = step // self.spacing
        for k in range(before // self.spacing, block):  # as a run may resume anywhere
            multiples = multiples.followed(k + 1, self._to_ends.select((k, 0)))
            before, recent = (k + 1) * self.spacing, self._first[2]
        for k in range(before, step):
            recent = recent.followed(k % self.spacing + 1, self.optimizer.steps.select(k))
        self._latest = step, multiples, recent
        return StepGaps(multiples.followed(block + 1, recent.select(0)), recent)
