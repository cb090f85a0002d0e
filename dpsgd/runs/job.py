"""The job of a run of a task: made from the task and its resolved spec alone."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine import programs
from dpsgd.engine.algorithm import dpsgd
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.lazy.group import LazyTables
from dpsgd.engine.placement import Placement, hosted
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.queries import Refinement
from dpsgd.gradients.frozen import RunLoss, leaf_names
from dpsgd.noise.keys import RootKey
from dpsgd.runs.fingerprint import fingerprint, task_code_digest
from dpsgd.runs.initial import earlier_guarantees, initial_params
from dpsgd.runs.optimizer import (
    Constant,
    Cosine,
    hyperparameters,
    optimizer,
    with_hyperparameters,
)
from dpsgd.runs.resolve import ResolvedRun
from dpsgd.runs.spec import SGD, Lazy, RunSpec
from dpsgd.runs.task import Task, arrays_digest, calibration_of, data_digest, identity, task_record
from dpsgd.runs.terms import Terms
from dpsgd.runs.training import Training, first_state
from samplers import Population, UnitData

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Job(Training):
    """The job of a run of a task, made from the task and its resolved spec alone.

    Attributes:
      task: What is trained.
      spec: How.
      population: What is public of the training rows.
      taken: Which arrays of a file the run starts from, as JSON values.
    """

    task: Task
    spec: RunSpec
    population: Population
    taken: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        task: Task,
        run: ResolvedRun,
        *,
        rows: tuple[PyTree, Population] | None = None,
        placement: Placement | None = None,
    ) -> Job:
        """Returns the job of a run of `task`.

        Args:
          task: What is trained.
          run: How.
          rows: Of the task, if they are at hand.
          placement: On which devices; by default one. Where it does not say what is sharded, large
            tables are if the state would take more than half of a device.
        """
        data, population = rows or rows_of(task)
        spec, chosen = run.spec, run.mechanism
        chosen.check_data_release(population)
        unit = chosen.sampler.protected_unit(population)
        algorithm = dpsgd(
            RunLoss.of(_loss(task), spec.train, spec.compute),
            _optimizer(spec),
            clipping=spec.clipping,
            microbatch_size=spec.microbatch_size,
            tables=_lazy_tables(spec, chosen.sampler.num_steps),
        )
        known = getattr(task, "init_map", ())
        params, taken = initial_params(
            task.init(spec.init_seed), spec.init_from, spec.init_map, known, spec.init_sha256
        )
        refinement = refinement_of(task, chosen)
        if placement is not None:
            state = jax.eval_shape(
                lambda params: first_state(algorithm, params, chosen, data), params
            )
            if chosen.scales().grid is None:  # exact sums are never sharded
                placement = placement.fitting(state, placement.memory)
            if placement.shards_rows(state):
                params = hosted(params)  # a device that keeps them whole has room for little else
        return cls(
            data=data,
            unit=unit,
            params=params,
            algorithm=algorithm,
            mechanism=chosen,
            delta=run.delta,
            refinement=refinement,
            placement=placement,
            query_placement=None,
            synthetic=task.generated,
            audited=spec.audit,
            data_on=spec.data_on,
            block_steps=BLOCK_STEPS,
            task=task,
            spec=spec,
            population=population,
            taken=taken,
        )

    @property
    def same_audit(self) -> Task:
        """The task, which makes equal synthetic rows for equal runs."""
        return self.task

    def digest(self) -> str:
        """Returns a text that names the training rows: a secret, as they are."""
        tree = self.population.tree
        return data_digest(self.task, self.data, tree.shape.digest if tree else "")

    def scheduled(self, state: TrainState) -> TrainState:
        """Returns a state, made now or read back, with the step sizes of this job."""
        chosen = self.spec.optimizer
        assert chosen.learning_rate is not None, "`resolve` leaves nothing open"
        hyperparams = hyperparameters(
            chosen.learning_rate,
            self.mechanism.sampler.num_steps,
            chosen.momentum if isinstance(chosen, SGD) else None,
            **vars(self.spec.average),
        )
        return state._replace(opt_state=with_hyperparameters(state.opt_state, hyperparams))

    def check_rows(self) -> None:
        """Raises ValueError if rows that this process is to read lie on other hosts alone."""
        sampler = self.mechanism.sampler
        held = self.layout.held(sampler)
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

    def program_digest(self) -> str:
        """Returns the digest of the programs that train, which are compiled by this."""
        return " ".join(map(programs.digest, self.programs()))

    @functools.cached_property
    def earlier(self) -> tuple[str, ...]:
        """What is guaranteed to the rows of models that the run starts from."""
        return earlier_guarantees(self.spec.init_from)

    def terms(self, record: Mapping[str, Any], digest: str, root: RootKey) -> Terms:
        """Returns what an attempt of this job is declared under.

        Args:
          record: The configuration of the run.
          digest: What names its data.
          root: Its secret.
        """
        name = record["task"]["name"]
        same = identity(self.task, name)
        code = task_code_digest(self.task, name, self.mechanism.sampler, identity=same)
        stated = fingerprint(record, digest, root, code, self.program_digest())
        if self.placement is not None:
            stated["devices"] = [device.device_kind for device in self.placement.devices]
            stated["placement"] = self.placement.describe()
        if self.algorithm.tables is not None:
            stated["tables"] = "lazy"
        example = shapes_of_rows(self.data, *self.mechanism.sampler.clipped_shape)
        if frozen := self.algorithm.frozen(self.params, example):
            names = leaf_names(self.params)
            stated["trained"] = [name for k, name in enumerate(names) if k not in frozen]
        # Public, and a task's own: another start under one noise would show both without it.
        stated["initial_params"] = arrays_digest(self.params)
        return Terms(self.mechanism, self.delta, root.insecure, stated, self.unit, self.earlier)


def rows_of(task: Task) -> tuple[PyTree, Population]:
    """Returns the training rows of a task, and what is public of them.

    Raises:
      ValueError: if there are none, or columns have different numbers of them.
    """
    data = task.columns()
    columns = data.columns if isinstance(data, UnitData) else data
    rows = {len(leaf) if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(columns)}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(
            f"columns() of the task must be arrays with equally many rows, one an example; they "
            f"have {', '.join(map(str, sorted(rows))) or 'none'}"
        )
    return columns, data.population if isinstance(data, UnitData) else Population(rows.pop())


def refinement_of(task: Any, mechanism: Mechanism) -> Refinement | None:
    """Returns what a task makes of the sums that its run ends in, if there are any.

    Raises:
      ValueError: if it makes nothing of them.
    """
    if mechanism.full_sums is None:
        return None
    if (made := calibration_of(task)) is None:
        raise ValueError(
            f"the run ends in {mechanism.full_sums}, of which its task, a {type(task).__name__}, "
            "makes nothing: it has no calibration() (see dpsgd.runs.task.Task)"
        )
    return made


def _optimizer(spec: RunSpec) -> optax.GradientTransformation:
    kind, average = spec.optimizer, next(iter(vars(spec.average)), None)
    return optimizer("sgd" if isinstance(kind, SGD) else "adam", kind.schedule, average)


def _lazy_tables(spec: RunSpec, num_steps: int) -> LazyTables | None:
    """Returns how tables with deferred noise are trained; None where there are none."""
    if not isinstance(tables := spec.tables, Lazy):
        return None
    assert tables.learning_rate is not None, "`resolve` leaves nothing open"
    assert tables.momentum is not None, "`resolve` leaves nothing open"
    rate, constant = tables.learning_rate, spec.optimizer.schedule == "constant"
    sizes = Constant(rate) if constant else Cosine(rate, num_steps)
    return LazyTables(sizes, tables.momentum, tables.weight_decay)


def _loss(task: Task) -> Callable[..., Any]:
    """Returns the loss of a task: that of the first of equal tasks, which share programs so."""
    loss = task.loss
    if not isinstance(loss, types.MethodType):
        return loss
    try:
        hash(task)
    except TypeError:
        return loss
    same: Any = task
    return _first(same, json.dumps(task_record(task), sort_keys=True)).loss


@functools.lru_cache(maxsize=16)
def _first(task: Task, record: str) -> Task:
    del record  # what is described otherwise, or has other settings, is not equal
    return task
