"""Prepares a run that begins or resumes, before its batches and noise are drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dpsgd.core.mechanism import Mechanism
from dpsgd.engine import programs
from dpsgd.engine.placement import Placement
from dpsgd.engine.sources import arrays_digest
from dpsgd.gradients.frozen import matching_leaves
from dpsgd.processor import processor_digest
from dpsgd.runs.directory import Configuration, RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.initial import EarlierModel
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.log import MetricWriter, Stages
from dpsgd.runs.mechanism import ResolvedRun
from dpsgd.runs.processes import Processes
from dpsgd.runs.recommendation import sentence, weak_signal
from dpsgd.runs.records import checked, to_json
from dpsgd.runs.resolve import request_of, resolve
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.support import check
from dpsgd.runs.task import Task, check_task, load, settled, task_record, with_settings
from samplers import Population

Progress = Callable[[str], None]


class Execution(NamedTuple):
    """Placement, stage timer and outputs of a run."""

    placement: Placement | None
    stages: Stages
    progress: Progress
    log: MetricWriter | None = None


# --- A run that begins --------------------------------------------------------------------------


def check_data(task: Task, begun: Mapping[str, Any] | None = None) -> None:
    """Calls the task's `check`, if it has one.

    Args:
      task: Task that has the data.
      begun: Description of the task with which a run began; None for a new run.
    """
    if callable(check := getattr(task, "check", None)):
        check(begun)


def plan_run(
    spec: RunSpec, task: Task, name: str | None, execution: Execution, *, dry: bool = False
) -> Job:
    """Resolves, accounts for and compiles a new run.

    Args:
      spec: Settings of the run.
      task: Task to train.
      name: "module:object" of the task; None if unknown.
      execution: Devices, timer and outputs.
      dry: True to read the shapes of the rows alone, and to compile nothing.

    Raises:
      ValueError: if the run is refused, or has no finite epsilon.
    """
    placement, stages, progress, _ = execution
    check(spec)
    check_task(task, name or "the task")
    rows = rows_of(task)
    check(spec, rows[1].num_examples)
    earlier = EarlierModel.read(spec.init_from)
    task, choices = settled(task, request_of(spec, rows[1]), name, earlier.task if earlier else {})
    if choices:
        progress(sentence({"task": choices}))
    if spec.train is not None:
        matching_leaves(jax.eval_shape(lambda: task.init(spec.init_seed)), spec.train)
    if not dry:
        progress("checking the data")
        check_data(task)
        progress(
            "note: accounting, compiling and the audit take about half a minute for a small model; "
            "then training starts, and shows its remaining time"
        )
    stages.begin("accounting")
    run = resolve(spec, task, rows, progress)
    record = {"task": task_record(task, name), **run.spec.record(), "requested": spec.record()}
    if chosen := {**({"task": choices} if choices else {}), **run.chosen}:
        record["chosen"] = chosen
    job = Job.of_task(task, run, rows=rows, placement=placement, earlier=earlier, record=record)
    epsilon = job.guarantee.epsilon
    if epsilon is not None and math.isinf(epsilon.upper):
        raise ValueError(
            f"no finite epsilon is certified for this run ({epsilon.note or 'no reason'}): add "
            "noise; if batches are truncated, raise max_batch_size or set overflow to accumulate"
        )
    if dry:
        return job
    if weak := weak_signal(job.mechanism.signal_to_noise, rows[1].num_examples):
        progress(f"note: {weak}")
    _compile(job, execution)
    return job


def _compile(job: Job, execution: Execution) -> None:
    """Compiles a run's programs; raises ValueError naming what differs between processes."""
    digest = job.digest  # hashes the rows before compilation is timed
    execution.stages.begin("compile")
    execution.progress("compiling the program that trains")
    compiled = job.programs()
    if (processes := Processes.current()).count == 1:
        return
    facts = {**job.environment(), **job.terms.record(), "data": digest}
    del facts["platform"]  # the operating system does not affect results
    facts["program"] = " ".join(map(programs.digest, compiled))
    facts["options"] = programs.compilation()
    facts["processor"] = processor_digest()
    facts["start"] = arrays_digest(job.params)
    facts["scales"] = repr(job.mechanism.scales())  # audits of all processes must take equal steps
    processes.check_alike(facts)


# --- A run that resumes --------------------------------------------------------------------------


def _recorded_task(config: Configuration, given: Task | None, progress: Progress) -> Task:
    """Returns the task of a run, rebuilt from its record or given with equal description.

    Raises ValueError if its data cannot be trained on, or its description has changed.
    """
    record = config.task
    task = load(record, config.damage) if given is None else _as_chosen(given, config)
    progress("checking the data")
    description = record["description"]
    check_task(task, record["name"] or "the task")
    check_data(task, description)
    if (now := to_json(task.describe())) != description:
        changed = [n for n in {**description, **now} if description.get(n) != now.get(n)]
        raise ValueError(
            f"describe() of the task differs from the start of the run in "
            f"{', '.join(changed)}: restore that task, or start a new run"
        )
    return task


def _as_chosen(task: Any, config: Configuration) -> Any:
    """Returns a task with the settings that the run once chose."""
    location = f"{config.damage}: chosen"
    chosen = checked(config.record.get("chosen", {}), dict[str, Any], location)
    choices = checked(chosen.get("task", {}), dict[str, dict[str, Any]], f"{location}: task")
    values = {name: choice.get("value") for name, choice in choices.items()}
    missing = {name: x for name, x in values.items() if getattr(task, name, x) is None}
    return with_settings(task, missing, f"{location}: task") if missing else task


def recorded_job(
    folder: RunDirectory,
    config: Configuration,
    history: History,
    given: Task | None,
    execution: Execution,
) -> Job:
    """Returns the compiled job of a recorded run.

    The data must be unchanged since the start of the run.

    Args:
      folder: Run directory.
      config: Configuration of the run.
      history: Ledger of the run.
      given: Task in place of the recorded one; None to rebuild the recorded one.
      execution: Devices, timer and outputs.

    Raises:
      ValueError: if configuration, task or data differ from those at the start of the run.
    """
    config.check(history)
    task = _recorded_task(config, given, execution.progress)
    execution.stages.begin("accounting")
    rows = rows_of(task)
    run = _as_begun(history.attempts[0].terms.mechanism, folder.path, config.spec, rows[1])
    job = Job.of_task(task, run, rows=rows, placement=execution.placement, record=config.record)
    if Processes.current().first:
        folder.check_data(job.digest)
    _compile(job, execution)
    return job


def _as_begun(begun: Mechanism, out: Path, spec: RunSpec, population: Population) -> ResolvedRun:
    """Returns a resolved run with the noise recorded in its ledger.

    Calibration in another version might find slightly different noise.
    """
    sampler, rows = begun.sampler, population.num_examples
    if rows != sampler.num_examples:
        raise ValueError(
            f"the task has {rows:,} training examples, but {out} began on "
            f"{sampler.num_examples:,}: restore those rows, or start a new run"
        )
    # A ledger has only the shape of a unit tree, and drawing needs the tree.
    sampler = sampler.with_population(population)
    return ResolvedRun(spec, dataclasses.replace(begun, sampler=sampler))
