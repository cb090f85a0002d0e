"""What a run computes with: `Training`, the one loop that trains; and `Job`, that of a task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from dpsgd.audit.audit import audit_queries
from dpsgd.audit.probe import held
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.cost import cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Initial, Segment
from dpsgd.core.state import TrainState
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.feed import BLOCK_STEPS, Layout
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.placement import Placement, hosted, on_one_device
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.queries import Refinement, refine, sums_run
from dpsgd.gradients.frozen import leaf_names
from dpsgd.noise.keys import Keys, RootKey, Seeds
from dpsgd.runs.audit import NOT_MADE, audit_synthetic, once, probe_rows, verdict
from dpsgd.runs.environment import code_digest, environment
from dpsgd.runs.initial import EarlierModel
from dpsgd.runs.optimizer import (
    algorithm_of,
    hyperparameters,
    step_sizes,
    with_hyperparameters,
)
from dpsgd.runs.resolve import ResolvedRun
from dpsgd.runs.spec import RunSpec, config_digest
from dpsgd.runs.task import (
    Task,
    data_digest,
    exceptions_of,
    refinement_of,
    rows_of,
)
from dpsgd.runs.terms import Terms
from samplers import Population

PyTree = Any


class Journal:
    """What a run writes down, and where: nowhere, unless a subclass knows a place.

    Attributes:
      flush_every: Of lazy tables, steps between flushes, see `train_blocks`.
      batches: Opens the batches that were drawn ahead, if any were.
    """

    flush_every: int | None = None
    batches: Callable[[Seeds], BatchFiles] | None = None

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
      synthetic: Makes so many rows like those of the data, for an audit.
      refinement: What is made of the full-batch queries that the mechanism ends in, if any.
      placement: On which devices it is trained; None is one.
      query_placement: On which devices the queries are computed.
      audited: Whether the run is audited before it begins.
      data_on: Where the data lie, see `train_blocks`.
      block_steps: Steps per dispatch.
      step_sizes: Arguments of `hyperparameters` for a state, if its optimizer is of `optimizer`.
      initial: Trained model that the run starts from; None for fresh parameters.
      not_covered: Sentences of the task about what its guarantee does not cover.
      same_audit: What is equal for jobs of equal synthetic rows, whose audits are one; None for
        none.
    """

    data: PyTree
    unit: str
    params: PyTree
    algorithm: Algorithm
    mechanism: Mechanism
    delta: float
    synthetic: Callable[[int], PyTree]
    refinement: Refinement | None
    placement: Placement | None
    query_placement: Placement | None = None
    audited: bool
    data_on: Literal["device", "host"] | None
    block_steps: int = BLOCK_STEPS
    step_sizes: Mapping[str, Any] | None = None
    initial: Initial | None = None
    not_covered: tuple[str, ...] = ()
    same_audit: Any = None

    @functools.cached_property
    def layout(self) -> Layout:
        """How the blocks are laid out, found once: all that runs is of one program."""
        return Layout.choose(
            self.mechanism.sampler,
            self.data,
            block_steps=self.block_steps,
            data_on=self.data_on,
            placement=self.placement,
        )

    def plan(self, *, reproducible_noise: bool = False) -> Segment:
        """Returns all steps of the run, as they are accounted for."""
        return Segment(
            self.mechanism,
            unit=self.unit,
            reproducible_noise=reproducible_noise,
            lazy_tables=self.algorithm.tables is not None,
            initial=self.initial,
            not_covered=self.not_covered,
        )

    def guarantee(self, *, reproducible_noise: bool = False) -> Guarantee:
        """Returns the guarantee of the whole run, or raises ValueError where it is not proved."""
        found = cost([self.plan(reproducible_noise=reproducible_noise)], self.delta)
        return dataclasses.replace(found, foreign_calls=self.algorithm.foreign_calls)

    def start(self) -> TrainState:
        """Returns the state before the first step."""
        if self.placement is None:
            return self._from(self.params)
        shapes = jax.eval_shape(self._from, self.params)
        if not self.placement.shards_rows(shapes):
            return self._from(self.params)
        where = self.placement.state(shapes)
        params = self.placement.put_whole(self.params, where.params)
        return jax.jit(self._from, out_shardings=where)(params)  # no device makes the whole

    def _from(self, params: PyTree) -> TrainState:
        return self.scheduled(self.algorithm.init(params, self.mechanism, self.data))

    def scheduled(self, state: TrainState) -> TrainState:
        """Returns a state, made now or read back, with the step sizes of this training."""
        if self.step_sizes is None:
            return state
        numbers = hyperparameters(**self.step_sizes)  # made anew: buffers of a state are given away
        return state._replace(opt_state=with_hyperparameters(state.opt_state, numbers))

    def shapes(self) -> TrainState:
        """Returns the shapes of a state without pending noise."""
        return jax.eval_shape(self._from, self.params)  # no table of the run's size is filled

    def programs(self) -> list[Any]:
        """Returns the compiled programs of steps and queries; refuses one that mixes examples."""
        found = [self.layout.program(self.algorithm, self.mechanism, self.shapes(), self.data)]
        if self.refinement is not None:
            of, rows = self.mechanism.sums_mechanism(), self.synthetic(1)
            sums = sums_run(self.refinement, of, self.params, rows, self.query_placement)
            found.append(sums.program())
        return found

    def audit(
        self, state: TrainState | None = None, progress: Callable[[str], None] = lambda line: None
    ) -> str:
        """Audits what is left of a run, its program, sampler and queries; says what was checked.

        All is the run's own, the compiled program included, but rows and keys: the audit tells
        nothing about anybody. A process audits equal runs once, and the draws of equal samplers.

        Args:
          state: With which the run resumes, if it does not begin. Of one with lazy tables its step
            alone is looked at, and the rest is that of the first state, so that no pending noise
            shows.
          progress: Called with one line of text.

        Raises:
          ValueError: if the run is not what its guarantee assumes; it must not be trained.
        """
        mechanism, refinement, same = self.mechanism, self.refinement, self.same_audit
        if not mechanism.noise_multiplier:
            return "not made: there is no noise"
        if not self.audited:
            return NOT_MADE
        if state is None or state.tables:
            first = held(self.start(), self.params)
            state = first if state is None else first._replace(step=state.step)
        if "__dataclass_params__" not in vars(type(mechanism.sampler)):
            same = None  # samplers of such a class are equal whatever they hold
        checks: tuple[CheckResult, ...] = ()
        parts: list[str] = []
        if int(state.step) < mechanism.sampler.num_steps:
            progress("auditing the program and the sampler")
            run = self.algorithm, mechanism, state, self.layout, self.synthetic
            key: tuple[Any, ...] = same, self.algorithm, mechanism, self.layout
            found = once(lambda: audit_synthetic(*run), state, key)
            checks += found.checks
            parts += ["the compiled program", *["the draws"] * found.sampler_audited]
        if refinement is not None:
            progress("auditing the sums over all rows")
            where: dict[str, Any] = {"placement": self.query_placement}

            def queries() -> AuditReport:
                rows, root = self.synthetic(probe_rows(mechanism)), RootKey.shared()
                return audit_queries(refinement, mechanism, state.params, rows, root=root, **where)

            key = same, refinement, mechanism.sums_mechanism(), self.query_placement
            checks += once(queries, state.params, key).checks
            parts.append("the sums over all rows")
        return verdict(AuditReport(checks), parts)

    def train(self, state: TrainState, keys: Keys, journal: Journal) -> TrainState:
        """Takes the steps that are left, then the queries; returns the state after the last one.

        Where the journal asks to stop, that is the state of this step. The buffers of the state
        with which the run begins or resumes are given away.
        """
        if int(state.step) < self.mechanism.sampler.num_steps:
            with closing(self._blocks(state, journal, keys)) as blocks:
                for block in blocks:
                    state = block.state
                    if journal.keep(block):
                        return state
        if self.refinement is not None and int(state.step) < self.mechanism.num_steps:
            one = self.query_placement is None
            refined = refine(
                self.refinement,
                self.mechanism,
                on_one_device(state.params) if one else state.params,
                self.data,
                declare=journal.declare,
                placement=self.query_placement,
                keys=keys,
            )
            step = np.int32(self.mechanism.num_steps)
            state = state._replace(step=step, raw_params=refined.params)
            journal.keep_refined(state, refined.summary)
        return state

    def _blocks(self, state: TrainState, journal: Journal, keys: Keys) -> Generator[Block]:
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
            keys=keys,
        )


@dataclass(frozen=True, kw_only=True)
class Job(Training):
    """The job of a run of a task, made from the task and its resolved spec alone.

    Attributes:
      task: What is trained.
      spec: How.
      population: What is public of the training rows.
    """

    task: Task
    spec: RunSpec
    population: Population

    @classmethod
    def of(
        cls,
        task: Task,
        run: ResolvedRun,
        *,
        rows: tuple[PyTree, Population] | None = None,
        placement: Placement | None = None,
        earlier: EarlierModel | None = None,
    ) -> Job:
        """Returns the job of a run of `task`, whose rows and earlier model may be at hand.

        Where the placement does not say what is sharded, large tables are if the state would take
        more than half of a device.
        """
        data, population = rows or rows_of(task)
        spec, mechanism = run.spec, run.mechanism
        sampler = mechanism.sampler
        algorithm = algorithm_of(task.loss, spec, sampler.num_steps)
        params, earlier = task.init(spec.init_seed), earlier or EarlierModel.read(spec.init_from)
        params = earlier.params(params) if earlier else params
        if placement is not None:
            state = jax.eval_shape(lambda p: algorithm.init(p, mechanism, data), params)
            placement = placement.fitting(state, placement.memory)
            if placement.shards_rows(state):
                params = hosted(params)  # a device that keeps them whole has room for little else
        return cls(
            data=data,
            unit=sampler.protected_unit(population),
            params=params,
            algorithm=algorithm,
            mechanism=mechanism,
            delta=run.delta,
            synthetic=task.generated,
            refinement=refinement_of(task, mechanism, spec.calibration),
            placement=placement,
            audited=spec.audit,
            data_on=spec.data_on,
            block_steps=BLOCK_STEPS,
            step_sizes=step_sizes(spec, sampler.num_steps),
            initial=earlier.initial if earlier else None,
            not_covered=exceptions_of(task),
            same_audit=task,
            task=task,
            spec=spec,
            population=population,
        )

    def digest(self) -> str:
        """Returns a text that names the training rows: a secret, as they are."""
        return data_digest(self.task, self.data, self.population)

    def check_rows(self) -> None:
        """Raises ValueError if rows that this process is to read lie on other hosts alone."""
        sampler = self.mechanism.sampler
        held = self.layout.process_shards(sampler)
        own = range(sampler.shard_range(held[0]).start, sampler.shard_range(held[-1]).stop)
        if why := self._lacks(own):
            raise ValueError(
                f"{why}, and this process trains on rows {own.start:,} to {own.stop - 1:,}: bring "
                "it here; or give the sampler as many data shards as processes, and each its own's "
                "rows"
            )
        if self.refinement is not None and (why := self._lacks(range(sampler.num_examples))):
            raise ValueError(
                f"{why}, and the run ends in sums over all rows, which every process needs: begin "
                "it with --calibration none, or bring the file here"
            )

    def _lacks(self, rows: range) -> str:
        found = (leaf.lacks(rows) for leaf in jax.tree.leaves(self.data) if hasattr(leaf, "lacks"))
        return next(filter(None, found), "")

    def terms(self, record: Mapping[str, Any]) -> Terms:
        """Returns the terms of a run of this job and configuration."""
        trained: tuple[str, ...] = ()
        example = shapes_of_rows(self.data, *self.mechanism.sampler.clipped_shape)
        if frozen := self.algorithm.frozen(self.params, example):
            names = enumerate(leaf_names(self.params))
            trained = tuple(name for k, name in names if k not in frozen)
        plan = self.plan(reproducible_noise=self.spec.insecure_seed is not None)
        return Terms(plan, self.delta, config_digest(record), trained)

    def environment(self) -> dict[str, Any]:
        """Returns where the job runs, for readers of its records."""
        found = {**environment(), "code": code_digest()}
        if self.placement is not None:
            found["devices"] = [device.device_kind for device in self.placement.devices]
            found["placement"] = self.placement.describe()
        return found
