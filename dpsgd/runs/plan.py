"""Prepares a run that begins or resumes, before its batches and noise are drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dpsgd.core.guarantee import Guarantee
from dpsgd.engine import programs
from dpsgd.engine.placement import Placement
from dpsgd.gradients.frozen import matching_leaves
from dpsgd.noise.keys import Keys
from dpsgd.processor import processor_digest
from dpsgd.runs import report
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.decision import Continue, NewAttempt, Refuse, Saved, decide
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.draws import drawing_digest, keys_of, read_stop
from dpsgd.runs.history import History, LedgerError
from dpsgd.runs.initial import EarlierModel, with_absolute_path
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import MetricWriter, Stages
from dpsgd.runs.processes import Processes
from dpsgd.runs.recommendation import sentence
from dpsgd.runs.records import checked, to_json
from dpsgd.runs.resolve import ResolvedRun, request_of, resolve
from dpsgd.runs.spec import RunSpec, check_version, sampler_name
from dpsgd.runs.support import check
from dpsgd.runs.task import (
    Task,
    arrays_digest,
    check_task,
    like_earlier,
    load,
    settled,
    task_record,
    with_settings,
)
from dpsgd.runs.terms import Terms
from samplers import Population

PyTree = Any
Progress = Callable[[str], None]
Rows = tuple[PyTree, Population]


class Plan(NamedTuple):
    """A resolved and audited run that is about to begin."""

    job: Job
    guarantee: Guarantee
    record: dict[str, Any]
    """Content of `config.json`."""
    digest: str
    """Digest of the training rows, as secret as the rows."""
    audit: str
    """Result of the audit, in words."""


class Execution(NamedTuple):
    """Placement, stage timer and outputs of a run."""

    placement: Placement | None
    stages: Stages
    progress: Progress
    log: MetricWriter | None = None


class Start(NamedTuple):
    """Job, checkpoint and keys with which a run begins or resumes."""

    job: Job
    checkpoint: Checkpoint | None
    """Latest checkpoint; None at the first step."""
    keys: Keys


# --- A run that begins --------------------------------------------------------------------------


class Settled(NamedTuple):
    """A run whose task settings are chosen and whose rows are unread."""

    task: Task
    task_choices: dict[str, Any]
    """Chosen settings of the task, as {name: {"value": ..., "why": reason}}."""
    spec: RunSpec
    rows: Rows
    earlier: EarlierModel | None
    """Trained model that the run starts from."""

    def job(self, run: ResolvedRun, placement: Placement | None) -> Job:
        """Returns the job of the resolved run.

        Args:
          run: Resolved settings, with mechanism and delta.
          placement: Devices; None for one device.
        """
        options: dict[str, Any] = {"placement": placement, "earlier": self.earlier}
        return Job.of_task(self.task, run, rows=self.rows, **options)


def settled_task(spec: RunSpec, task: Task, name: str | None, progress: Progress) -> Settled:
    """Returns a run whose open task settings are chosen.

    It reads the shapes of the rows, but no values.

    Args:
      spec: Settings of the run.
      task: Task to train.
      name: "module:object" of the task, for error messages; None if unknown.
      progress: Function of one line of text.

    Raises:
      ValueError: if spec and task cannot be run together.
    """
    spec = with_absolute_path(spec)
    check(spec)
    check_task(task, name or "the task")
    rows = rows_of(task)
    check(spec, rows[1].num_examples)
    earlier = EarlierModel.read(spec.init_from)
    task, taken = like_earlier(task, name, earlier.task if earlier else {})
    task, why = settled(task, request_of(spec, rows[1]))
    why = taken | why
    task_choices = {
        key: {"value": getattr(task, key), "why": reason} for key, reason in why.items()
    }
    if task_choices:
        progress(sentence({"task": task_choices}))
    if spec.train is not None:
        matching_leaves(jax.eval_shape(lambda: task.init(spec.init_seed)), spec.train)
    return Settled(task, task_choices, spec, rows, earlier)


def check_data(task: Task, begun: Mapping[str, Any] | None = None) -> None:
    """Calls the task's `check`, if it has one.

    Args:
      task: Task that has the data.
      begun: Description of the task with which a run began; None for a new run.
    """
    if callable(check := getattr(task, "check", None)):
        check(begun)


def plan_run(spec: RunSpec, task: Task, name: str | None, execution: Execution) -> Plan:
    """Resolves, accounts for, compiles and audits a new run.

    Args:
      spec: Settings of the run.
      task: Task to train.
      name: "module:object" of the task; None if unknown.
      execution: Devices, timer and outputs.

    Raises:
      ValueError: if the run is refused, or has no finite epsilon.
    """
    placement, stages, progress, _ = execution
    unresolved = settled_task(spec, task, name, progress)
    progress("checking the data")
    check_data(unresolved.task)
    progress(
        "note: accounting, compiling and the audit take about half a minute for a small model; "
        "then training starts, and shows its remaining time"
    )
    stages.begin("accounting")
    chosen = resolve(unresolved.spec, unresolved.task, unresolved.rows, progress)
    job = unresolved.job(chosen, placement)
    job.check_rows()
    sampler = job.mechanism.sampler
    if weak := report.weak_signal(job.mechanism.signal_to_noise, sampler.num_examples):
        progress(f"note: {weak}")
    guarantee = certified_guarantee(job)
    record = {"task": task_record(unresolved.task, name), **chosen.spec.record()}
    task_choices = {"task": unresolved.task_choices} if unresolved.task_choices else {}
    if choices := {**task_choices, **chosen.chosen}:
        record["chosen"] = choices
    digest = job.digest()
    stages.begin("compile")
    progress("compiling the program that trains")
    job.programs()
    _check_alike(job, record, digest)
    stages.begin("audit")
    return Plan(job, guarantee, record, digest, job.audit(progress=progress))


def certified_guarantee(job: Job) -> Guarantee:
    """Returns the guarantee of a whole run.

    Raises:
      ValueError: if its epsilon is infinite.
    """
    guarantee = job.guarantee(reproducible_noise=job.spec.insecure_seed is not None)
    if guarantee.epsilon is not None and math.isinf(guarantee.epsilon.upper):
        why = guarantee.epsilon.note or "no reason"
        raise ValueError(
            f"no finite epsilon is certified for this run ({why}): add noise; if batches are "
            "truncated, raise max_batch_size or set overflow to accumulate"
        )
    return guarantee


def _check_alike(job: Job, record: Mapping[str, Any], digest: str) -> None:
    """Raises ValueError naming the parts of the run that differ between processes."""
    if (processes := Processes.current()).count == 1:
        return
    facts = {**job.environment(), **job.terms(record).record(), "data": digest}
    del facts["platform"]  # the operating system does not affect results
    facts["program"] = " ".join(map(programs.digest, job.programs()))
    facts["options"] = programs.compilation()
    facts["processor"] = processor_digest()
    facts["start"] = arrays_digest(job.params)
    facts["scales"] = repr(job.mechanism.scales())  # audits of all processes must take equal steps
    processes.check_alike(facts)


# --- A run that resumes --------------------------------------------------------------------------


class RecordedRun:
    """Record, spec and task that `config.json` asks for."""

    def __init__(self, folder: RunDirectory, progress: Progress) -> None:
        """Reads the configuration, and imports a sampler from outside the package.

        Raises:
          ValueError: if the file is damaged.
        """
        self.where = f"{folder.path / 'config.json'} is damaged, or of another version"
        self.record = folder.read_json("config.json")
        check_version(self.record, folder.path)
        if ":" in (sampler := sampler_name(self.record, self.where)):
            progress(f"importing the module of the run's own sampler, {sampler}")
        self.spec = RunSpec.from_record(self.record, self.where, execute=True)

    def task(self, given: Task | None, progress: Progress) -> Task:
        """Returns the task, `given` or rebuilt from its record.

        Args:
          given: Task in place of the recorded one, with equal description; None to rebuild it.
          progress: Function of one line of text.

        Raises:
          ValueError: if its data cannot be trained on, or its description has changed.
        """
        recorded = checked(self.record.get("task"), dict[str, Any], f"{self.where}: task")
        task = load(recorded, self.where) if given is None else self._as_chosen(given)
        progress("checking the data")
        location = f"{self.where}: description"
        description = checked(recorded.get("description"), dict[str, Any], location)
        check_task(task, recorded.get("name") or "the task")
        check_data(task, description)
        if (now := to_json(task.describe())) != description:
            changed = [n for n in {**description, **now} if description.get(n) != now.get(n)]
            raise ValueError(
                f"describe() of the task differs from the start of the run in "
                f"{', '.join(changed)}: restore that task, or start a new run"
            )
        return task

    def _as_chosen(self, task: Any) -> Any:
        """Returns a task with the settings that the run once chose."""
        location = f"{self.where}: chosen"
        chosen = checked(self.record.get("chosen", {}), dict[str, Any], location)
        choices = checked(chosen.get("task", {}), dict[str, dict[str, Any]], f"{location}: task")
        values = {name: choice.get("value") for name, choice in choices.items()}
        missing = {name: x for name, x in values.items() if getattr(task, name, x) is None}
        return with_settings(task, missing, f"{location}: task") if missing else task


def restore_run(
    folder: RunDirectory,
    recorded: RecordedRun,
    ledger: Ledger,
    given: Task | None,
    execution: Execution,
) -> Start:
    """Returns the audited start of a run that resumes.

    A new attempt begins in the ledger if the last one cannot continue.

    Args:
      folder: Run directory.
      recorded: Content of its configuration.
      ledger: Ledger of the run, open for writing.
      given: Task in place of the recorded one; None to rebuild the recorded one.
      execution: Devices, timer and outputs.

    Raises:
      LedgerError: if the run cannot resume as its guarantee assumes.
    """
    processes, history = Processes.current(), ledger.history
    _, stages, progress, _ = execution
    job = _recorded_job(folder, recorded, history, given, execution)
    checkpoint = folder.checkpoints.latest(job.shapes())
    drawing = drawing_digest(job.mechanism.sampler)
    saved = [checkpoint.place] if checkpoint else []
    decision = _decided(folder, ledger, saved, job.terms(recorded.record), drawing)
    if checkpoint:
        state = checkpoint.state
        if isinstance(decision, NewAttempt) or checkpoint.attempt != history.attempts[-1].index:
            # Rows that were released before have no part in its noise.
            state = state._replace(noise=job.start().noise)
        checkpoint = checkpoint._replace(state=job.layout.put_state(job.scheduled(state)))
    stages.begin("audit")
    steps_remain = decision.step < job.mechanism.num_steps
    audit = job.audit(checkpoint.state if checkpoint else None, progress) if steps_remain else None
    if isinstance(decision, NewAttempt):
        progress(
            f"attempt {len(history.attempts)} begins at step {decision.step:,}, with new noise "
            "and batches; steps declared earlier still count"
        )
        if processes.first:  # remove later states, and a guarantee without this attempt
            folder.checkpoints.destroy_after(decision.step)
            folder.withdraw("guarantee.json")
        terms, environment = history.attempts[0].terms, job.environment()
        ledger.begin(terms, step=decision.step, drawing=drawing, environment=environment)
    if audit is not None:
        ledger.audited(audit)
    if processes.first:
        folder.write_json("environment.json", job.environment())
        folder.cut_diagnostics(decision.step)
    return Start(job, checkpoint, keys_of(decision, job.mechanism.sampler, job.spec.insecure_seed))


def _recorded_job(
    folder: RunDirectory,
    recorded: RecordedRun,
    history: History,
    given: Task | None,
    execution: Execution,
) -> Job:
    """Returns the compiled job of a recorded run, whose data are those that it began with."""
    placement, stages, progress, _ = execution
    folder.config(history)
    task = recorded.task(given, progress)
    stages.begin("accounting")
    rows = rows_of(task)
    run = _as_begun(history.attempts[0].terms, folder.path, recorded.spec, rows[1])
    job = Job.of_task(task, run, rows=rows, placement=placement)
    job.check_rows()
    digest = job.digest()
    if Processes.current().first:
        folder.check_data(digest)
    stages.begin("compile")
    job.programs()
    _check_alike(job, recorded.record, digest)
    return job


def start_run(folder: RunDirectory, job: Job, ledger: Ledger) -> Start:
    """Returns the start of a run planned in this process.

    Args:
      folder: Run directory.
      job: Job of the run, audited.
      ledger: Ledger of the run, without steps.
    """
    last = ledger.history.attempts[-1]
    decision = _decided(folder, ledger, (), last.terms, last.drawing)
    return Start(job, None, keys_of(decision, job.mechanism.sampler, job.spec.insecure_seed))


def _decided(
    folder: RunDirectory, ledger: Ledger, saved: Sequence[Saved], terms: Terms, drawing: str
) -> Continue | NewAttempt:
    """Returns how a run resumes, equal in all processes.

    Raises:
      LedgerError: if it cannot resume.
    """
    stop = read_stop(folder.path, terms.mechanism.sampler)
    decision = decide(ledger.history, saved, stop, terms, drawing)
    if isinstance(decision, Refuse):
        raise LedgerError(f"{folder.ledger_path}: {decision.reason}")
    Processes.current().check_alike({"files of the run": [type(decision).__name__, decision]})
    return decision


def _as_begun(begun: Terms, out: Path, spec: RunSpec, population: Population) -> ResolvedRun:
    """Returns a resolved run with the noise recorded in its ledger.

    Calibration in another version might find slightly different noise.
    """
    sampler, rows = begun.mechanism.sampler, population.num_examples
    if rows != sampler.num_examples:
        raise ValueError(
            f"the task has {rows:,} training examples, but {out} began on "
            f"{sampler.num_examples:,}: restore those rows, or start a new run"
        )
    # A ledger has only the shape of a unit tree, and drawing needs the tree.
    mechanism = dataclasses.replace(begun.mechanism, sampler=sampler.with_population(population))
    return ResolvedRun(spec, mechanism, begun.delta)
