"""What a run computes with: `Training`, and the one loop that trains."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from dpsgd.core.algorithm import Algorithm
from dpsgd.core.cost import cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.core.state import TrainState, opened
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.feed import BLOCK_STEPS, Layout
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.placement import Placement, on_one_device
from dpsgd.engine.queries import Refinement, refine, sums_run
from dpsgd.noise.keys import RootKey
from dpsgd.runs.audit import NOT_MADE, audit_run

PyTree = Any


class Journal:
    """What a run writes down, and where: nowhere, unless a subclass knows a place.

    Attributes:
      name: Names the run, which claims its root secret by it.
      attempt: The number by which the root derives the keys of this attempt.
      flush_every: Of lazy tables, steps between flushes, see `train_blocks`.
      batches: Opens the batches that were drawn ahead, if any were.
    """

    name: str
    attempt: int = 0
    flush_every: int | None = None
    batches: Callable[[int], BatchFiles] | None = None

    def declare(self, steps: range) -> None:
        """Writes down that noise of these steps is about to be drawn; it is when this returns."""

    def keep(self, block: Block) -> bool:
        """Writes down what a block has made; returns whether the run is to stop there."""
        return False

    def keep_refined(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Writes down what was made of the full-batch queries."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that a run computes with.

    Attributes:
      data: Its training rows, equally many in each column.
      unit: What is protected.
      params: Initial parameters.
      algorithm: Loss, clipping and optimizer.
      mechanism: Sampler, sigma and C.
      delta: At which the guarantee is given.
      refinement: What is made of the full-batch queries that the mechanism ends in, if any.
      placement: On which devices it is trained; None is one.
      query_placement: On which devices the queries are computed.
      synthetic: Makes so many rows like those of the data, for an audit.
      audited: Whether the run is audited before it begins.
      data_on: Where the data lie, see `train_blocks`.
      block_steps: Steps per dispatch.
    """

    data: PyTree
    unit: str
    params: PyTree
    algorithm: Algorithm
    mechanism: Mechanism
    delta: float
    refinement: Refinement | None
    placement: Placement | None
    query_placement: Placement | None
    synthetic: Callable[[int], PyTree]
    audited: bool
    data_on: Literal["device", "host"] | None
    block_steps: int = BLOCK_STEPS

    @functools.cached_property
    def layout(self) -> Layout:
        """How the blocks are laid out, found once: all that runs is of one program."""
        return Layout.of(
            self.mechanism.sampler,
            self.data,
            block_steps=self.block_steps,
            data_on=self.data_on,
            placement=self.placement,
        )

    @property
    def same_audit(self) -> Any:
        """What is equal for jobs of equal synthetic rows, whose audits are one; None for none."""
        return None

    @property
    def earlier(self) -> tuple[str, ...]:
        """What is guaranteed to the rows of models that the run starts from."""
        return ()

    def guarantee(self, *, reproducible_noise: bool = False) -> Guarantee:
        """Returns the guarantee of the whole run, or raises ValueError where it is not proved."""
        lazy = self.algorithm.tables is not None
        segment = Segment(
            self.mechanism,
            unit=self.unit,
            reproducible_noise=reproducible_noise,
            lazy_tables=lazy,
            earlier=self.earlier,
        )
        found = cost([segment], self.delta)
        return dataclasses.replace(found, foreign_calls=self.algorithm.foreign_calls)

    def start(self) -> TrainState:
        """Returns the state before the first step."""
        if self.placement is None:
            return self._from(self.params)
        shapes = jax.eval_shape(self._from, self.params)
        if not self.placement.shards_rows(shapes):
            return self._from(self.params)
        where = self.placement.state(shapes)
        params = self.placement.put(self.params, where.params)
        return jax.jit(self._from, out_shardings=where)(params)  # no device makes the whole

    def _from(self, params: PyTree) -> TrainState:
        return self.scheduled(first_state(self.algorithm, params, self.mechanism, self.data))

    def scheduled(self, state: TrainState) -> TrainState:
        """Returns a state, made now or read back, with the step sizes of this training."""
        return state

    def shapes(self) -> tuple[TrainState, TrainState]:
        """Returns the shapes of a state: without pending noise, and as blocks leave it."""
        shapes = jax.eval_shape(self._from, self.params)  # no table of the run's size is filled
        return shapes, jax.eval_shape(opened, shapes)

    def programs(self) -> list[Any]:
        """Returns the compiled programs of the steps and of the queries, or refuses the run.

        Raises:
          ValueError: if the loss or a statistic could see other examples than its own.
        """
        found = [self.layout.program(self.algorithm, self.mechanism, self.shapes()[0], self.data)]
        if self.refinement is not None:
            of, rows = self.mechanism.of_sums(), self.synthetic(1)
            sums = sums_run(self.refinement, of, self.params, rows, self.query_placement)
            found.append(sums.program())
        return found

    def audit(self, state: TrainState, progress: Callable[[str], None] = lambda line: None) -> str:
        """Returns what the audit of the program and the sampler says, or refuses the run.

        Args:
          state: With which the run begins, or resumes. Of one with lazy tables its step alone is
            looked at, and the rest is that of the first state, so that no pending noise shows.
          progress: Called with one line of text.
        """
        if not self.mechanism.noise_multiplier:
            return "not made: there is no noise"
        if not self.audited:
            return NOT_MADE
        if state.tables:
            state = self.start()._replace(step=state.step)
        return audit_run(
            self.algorithm,
            self.mechanism,
            state,
            self.layout,
            self.synthetic,
            refinement=self.refinement,
            query_placement=self.query_placement,
            same=self.same_audit,
            progress=progress,
        )

    def train(self, state: TrainState, root: RootKey, journal: Journal) -> TrainState:
        """Takes the steps that are left, then the queries; returns the state after the last one.

        Where the journal asks to stop, that is the state of this step.

        Args:
          state: With which the run begins, or resumes; its buffers are given away.
          root: Secret of the run.
          journal: What is declared before any noise exists, and written down as it is made.
        """
        how: dict[str, Any] = {"root": root, "attempt": journal.attempt, "run": journal.name}
        if state.step < self.mechanism.sampler.num_steps:
            with closing(self._blocks(state, journal, how)) as blocks:
                for block in blocks:
                    state = block.state
                    if journal.keep(block):
                        return state
        if self.refinement is not None and state.step < self.mechanism.num_steps:
            one = self.query_placement is None
            refined = refine(
                self.refinement,
                self.mechanism,
                on_one_device(state.params) if one else state.params,
                self.data,
                declare=journal.declare,
                placement=self.query_placement,
                **how,
            )
            step = np.int32(self.mechanism.num_steps)
            state = state._replace(step=step, raw_params=refined.params)
            journal.keep_refined(state, refined.summary)
        return state

    def _blocks(
        self, state: TrainState, journal: Journal, how: Mapping[str, Any]
    ) -> Generator[Block]:
        return train_blocks(
            self.algorithm,
            self.mechanism,
            state,
            self.data,
            layout=self.layout,
            declare=journal.declare,
            donate=True,
            flush_every=journal.flush_every,
            batches=journal.batches,
            **how,
        )


def first_state(
    algorithm: Algorithm, params: PyTree, mechanism: Mechanism, data: PyTree
) -> TrainState:
    return algorithm.init(params, mechanism, data)
