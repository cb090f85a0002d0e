"""Audits and trains runs (`Training`), in particular of tasks (`Job`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from dpsgd.audit.audit import audit_program, audit_queries
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.core.cost import cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.copies import host_copy, hosted
from dpsgd.engine.feed import BLOCK_STEPS, Layout
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.queries import Refinement, refine, refinement_of, sums_run
from dpsgd.gradients.frozen import leaf_names
from dpsgd.noise.keys import Keys
from dpsgd.runs.audit import NOT_MADE, conformance, once, probe_rows, verdict
from dpsgd.runs.drawing import drawing_digest
from dpsgd.runs.initial import EarlierModel
from dpsgd.runs.mechanism import ResolvedRun
from dpsgd.runs.optimizer import algorithm_of, hyperparameters, with_hyperparameters
from dpsgd.runs.result import code_digest, environment
from dpsgd.runs.spec import RunSpec, config_digest
from dpsgd.runs.task import Task, calibration_of, data_digest, exceptions_of, rows_of
from dpsgd.runs.terms import Terms
from samplers import Population

PyTree = Any


class Journal:
    """Record of a run in progress, which only subclasses store.

    Attributes:
      flush_every: Number of steps between flushes of lazy tables, see `train_blocks`.
      batches: Batches drawn ahead; None to draw them.
    """

    flush_every: int | None = None
    batches: BatchFiles | None = None

    def declare(self, steps: range) -> None:
        """Records `steps` before their noise is drawn, durably on return."""

    def keep(self, block: Block) -> bool:
        """Records a block; returns True to stop the run."""
        return False

    def keep_refined(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Records the result of the full-batch queries.

        Args:
          state: State with the refined parameters.
          summary: Numbers that describe the refinement, by name.
        """


@dataclass(frozen=True, kw_only=True, repr=False)  # errors of JAX print a method's object
class Training:
    """Data, parameters, algorithm and plan of a run, with its placement.

    Attributes:
      data: Pytree of training rows, [num_examples, ...] each.
      params: Pytree of initial parameters.
      algorithm: Loss, clipping and optimizer.
      plan: Segment of all steps, for accounting.
      delta: Delta of the guarantee.
      synthetic: Function that returns synthetic rows, given their number, for an audit.
      refinement: Refinement by the mechanism's full-batch queries; None without queries.
      placement: Devices that train; None for one device.
      query_placement: Devices that compute the queries; None for one device.
      audited: True to audit the run before it begins or resumes.
      data_on: Location of the data, see `train_blocks`.
      block_steps: Number of steps per dispatch.
      hyperparameters: Numbers in the optimizer's state; None to leave it unchanged.
      audit_key: Origin of `synthetic`: jobs of equal keys share audit reports; None to share none.
    """

    data: PyTree
    params: PyTree
    algorithm: Algorithm
    plan: Segment
    delta: float
    synthetic: Callable[[int], PyTree]
    refinement: Refinement | None
    placement: Placement | None
    query_placement: Placement | None = None
    audited: bool
    data_on: Literal["device", "host"] | None
    block_steps: int = BLOCK_STEPS
    hyperparameters: Mapping[str, float] | None = None
    audit_key: Any = None

    @property
    def mechanism(self) -> Mechanism:
        """Sampler, sigma and C."""
        return self.plan.mechanism

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of the blocks, the same for all steps."""
        return Layout.choose(
            self.mechanism.sampler,
            self.data,
            block_steps=self.block_steps,
            data_on=self.data_on,
            placement=self.placement,
        )

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """Guarantee of all steps; raises ValueError if no cost is proved."""
        return cost([self.plan], self.delta)

    def start(self) -> TrainState:
        """Returns the state before the first step."""
        if self.placement is None or not self.placement.shards_rows(shapes := self.shapes):
            return self._from(self.params)
        shardings = self.placement.state(shapes)
        params = self.placement.put_whole(self.params, shardings.params)
        return jax.jit(self._from, out_shardings=shardings)(params)  # each device makes its shards

    def _from(self, params: PyTree) -> TrainState:
        return self.scheduled(self.algorithm.init(params, self.mechanism, self.data))

    def scheduled(self, state: TrainState) -> TrainState:
        """Returns `state` with the step sizes of this training."""
        if self.hyperparameters is None:
            return state
        return with_hyperparameters(state, self.hyperparameters)

    @functools.cached_property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of a state without pending noise."""
        return jax.eval_shape(self._from, self.params)  # allocates no table

    def programs(self) -> list[Any]:
        """Compiles all programs; raises ValueError if one mixes examples."""
        compiled = [self.layout.program(self.algorithm, self.mechanism, self.shapes, self.data)]
        if self.refinement is not None:
            sums_mechanism, rows = self.mechanism.sums_mechanism(), self.synthetic(1)
            sums = sums_run(
                self.refinement, sums_mechanism, self.params, rows, self.query_placement
            )
            compiled.append(sums.program())
        return compiled

    def audit(
        self, state: TrainState | None = None, progress: Callable[[str], None] = lambda line: None
    ) -> str:
        """Audits the remaining steps; returns the verdict.

        The audit runs the run's compiled program on synthetic rows under separate keys, so that it
        reveals nothing about a person. A process audits runs that differ only in the values of
        their states once (`once`).

        Args:
          state: State with which the run resumes; None for its first state. With lazy tables the
            audit uses the first state at the step of `state`, so that it shows no pending noise.
          progress: Function that is called with each line of progress text.

        Raises:
          ValueError: if a check fails: the guarantee does not hold, and the run must not train.
        """
        mechanism, refinement, key = self.mechanism, self.refinement, self.audit_key
        if not mechanism.noise_multiplier:
            return "not made: there is no noise"
        if not self.audited:
            return NOT_MADE
        if state is None or state.tables:
            first = host_copy(self.start(), self.params)
            state = first if state is None else first._replace(step=state.step)
        if "__dataclass_params__" not in vars(type(mechanism.sampler)):
            key = None  # without @dataclass, a class compares inherited fields alone
        checks: tuple[CheckResult, ...] = ()
        audited_parts: list[str] = []
        block, *sums = self.programs()
        layout, place = self.layout, self.query_placement
        root = Keys.of(None, layout.placement.processes).root

        def rows() -> PyTree:
            return self.synthetic(probe_rows(mechanism))

        def program() -> AuditReport:
            progress("auditing the program and the sampler")
            run = self.algorithm, mechanism, state.params, rows()
            return audit_program(*run, state=state, layout=layout, root=root, delta=self.delta)

        if (step := int(state.step)) < mechanism.sampler.num_steps:
            claims = mechanism, layout, self.delta, step
            report = once(program, state, block, (key, self.algorithm, *claims))
            checks += report.checks
            audited_parts += ["the compiled program", *["the draws"] * report.sampler_audited]
        if refinement is not None:

            def queries() -> AuditReport:
                progress("auditing the sums over all rows")
                run = refinement, mechanism, state.params, rows()
                return audit_queries(*run, placement=place, root=root)

            sums_key = key, refinement, mechanism.sums_mechanism(), place
            checks += once(queries, state.params, sums[0], sums_key).checks
            audited_parts.append("the sums over all rows")
        return verdict(AuditReport(checks), audited_parts)

    def train(self, state: TrainState, keys: Keys, journal: Journal) -> TrainState:
        """Runs the remaining steps and queries.

        It returns earlier if `journal.keep` returns True. The buffers of `state` are donated.

        Args:
          state: State with which the run begins or resumes.
          keys: Keys of the attempt.
          journal: Journal that records steps and blocks.
        """
        if int(state.step) < self.mechanism.sampler.num_steps:
            blocks = train_blocks(
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
            with closing(blocks):
                for block in blocks:
                    state = block.state
                    if journal.keep(block):
                        return state
        if self.refinement is not None and int(state.step) < self.mechanism.num_steps:
            refined = refine(
                self.refinement,
                self.mechanism,
                state.params,
                self.data,
                declare=journal.declare,
                placement=self.query_placement,
                keys=keys,
            )
            step = np.int32(self.mechanism.num_steps)
            state = state._replace(step=step, raw_params=refined.params)
            journal.keep_refined(state, refined.summary)
        return state


@dataclass(frozen=True, kw_only=True, repr=False)
class Job(Training):
    """Training of a task, determined by the task and its resolved spec.

    Attributes:
      task: Task that is trained.
      spec: Configuration of the run.
      population: Public facts about the training rows.
      record: Content of `config.json`; empty without a run directory.
    """

    task: Task
    spec: RunSpec
    population: Population
    record: Mapping[str, Any]

    @classmethod
    def of_task(
        cls,
        task: Task,
        run: ResolvedRun,
        *,
        rows: tuple[PyTree, Population] | None = None,
        placement: Placement | None = None,
        earlier: EarlierModel | None = None,
        record: Mapping[str, Any] = {},
    ) -> Job:
        """Makes the job of a run.

        Args:
          task: Task that is trained.
          run: Resolved spec, with mechanism and delta.
          rows: Training rows and their population; by default read from the task.
          placement: Devices; by default one. Unless it states which tables are sharded, large ones
            are if the state would take more than half of a device's memory.
          earlier: Model that the run starts from; by default read from `spec.init_from`.
          record: Content of `config.json`.
        """
        data, population = rows or rows_of(task)
        spec, mechanism = run.spec, run.mechanism
        sampler = mechanism.sampler
        algorithm = algorithm_of(task.loss, spec, sampler.num_steps)
        params, earlier = task.init(spec.init_seed), earlier or EarlierModel.read(spec.init_from)
        params = earlier.params(params, task) if earlier else params
        if placement is not None:
            state = jax.eval_shape(lambda p: algorithm.init(p, mechanism, data), params)
            placement = placement.fitting(state, placement.memory)
            if placement.shards_rows(state):
                params = hosted(params)  # unsharded, they would fill most of a device's memory
        return cls(
            data=data,
            params=params,
            algorithm=algorithm,
            plan=Segment(
                mechanism,
                unit=sampler.protected_unit(population),
                reproducible_noise=spec.insecure_seed is not None,
                lazy_tables=algorithm.tables is not None,
                initial=earlier.initial if earlier else None,
                not_covered=exceptions_of(task),
            ),
            delta=run.delta,
            synthetic=task.generated,
            refinement=refinement_of(calibration_of(task), mechanism, spec.calibration),
            placement=placement,
            audited=spec.audit,
            data_on=spec.data_on,
            block_steps=BLOCK_STEPS,
            hyperparameters=hyperparameters(spec, sampler.num_steps),
            audit_key=task,
            task=task,
            spec=spec,
            population=population,
            record=record,
        )

    def audit(
        self, state: TrainState | None = None, progress: Callable[[str], None] = lambda line: None
    ) -> str:
        """Audits the remaining steps, and own parts apart from them (`conformance`)."""
        if self.audited and self.mechanism.noise_multiplier:
            conformance(self.spec, self.params, progress).require_passed()
        return super().audit(state, progress)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the training rows, itself private."""
        return data_digest(self.task, self.data, self.population)

    @functools.cached_property
    def terms(self) -> Terms:
        """Terms of the run."""
        trained: tuple[str, ...] = ()
        example = shapes_of_rows(self.data, *self.mechanism.sampler.clipped_shape)
        if frozen := self.algorithm.frozen(self.params, example):
            names = enumerate(leaf_names(self.params))
            trained = tuple(name for k, name in names if k not in frozen)
        return Terms(self.plan, self.delta, config_digest(self.record), trained)

    @functools.cached_property
    def drawing(self) -> str:
        """The mechanism's `drawing_digest`."""
        return drawing_digest(self.mechanism)

    def environment(self) -> dict[str, Any]:
        """Returns versions, devices, code digest and placement."""
        facts = {**environment(), "code": code_digest()}
        if self.placement is not None:
            facts["devices"] = [device.device_kind for device in self.placement.devices]
            facts["placement"] = self.placement.describe()
        return facts
