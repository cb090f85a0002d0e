"""What a run does when it begins and when it resumes: decided before anything is drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dpsgd.audit.runtime.resume import wrong_noise
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.state import TrainState
from dpsgd.engine.loop import repeats_exactly
from dpsgd.engine.placement import Placement
from dpsgd.gradients.frozen import matching_leaves
from dpsgd.noise.keys import RootKey
from dpsgd.runs import report
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.fingerprint import environment
from dpsgd.runs.history import NO_HEAD, Attempt, History, check_same_noise
from dpsgd.runs.initial import check_same_start, earlier_task, with_absolute_path
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import MetricWriter, Stages
from dpsgd.runs.processes import Processes
from dpsgd.runs.recommendation import sentence
from dpsgd.runs.records import checked, to_json
from dpsgd.runs.resolve import ResolvedRun, request_of, resolve, resolved, with_any_noise
from dpsgd.runs.spec import RunSpec, check_version, config_digest, sampler_name
from dpsgd.runs.support import check
from dpsgd.runs.task import (
    Task,
    check_task,
    like_earlier,
    load,
    settled,
    task_record,
    with_settings,
)
from dpsgd.runs.terms import Terms, differing
from dpsgd.runs.timing import Timing, time_steps
from samplers import Population

PyTree = Any
Progress = Callable[[str], None]
Rows = tuple[PyTree, Population]


class Plan(NamedTuple):
    """A run that is about to begin."""

    job: Job
    guarantee: Guarantee
    record: dict[str, Any]
    """What `config.json` holds."""
    digest: str
    """What names its data: a secret, as they are."""
    audit: str
    """What its audit saw."""


class Execution(NamedTuple):
    """Where a run is executed, how long its stages take, and who is told of them."""

    placement: Placement | None
    stages: Stages
    progress: Progress
    log: MetricWriter | None = None


# --- A run that begins --------------------------------------------------------------------------


def planned(spec: RunSpec, task: Task, name: str | None, execution: Execution) -> Plan:
    """Returns a run that is resolved, accounted for, compiled and audited, or refuses it."""
    task, own, spec, rows = settled_task(spec, task, name, execution.progress)
    progress = execution.progress
    progress("checking the data")
    check_data(task)
    progress(
        "note: accounting, compiling and the audit come first, about half a minute for a small "
        "model; then it trains, and says how long that takes"
    )
    return _prepared(task, own, spec, name, rows, execution)


def settled_task(
    spec: RunSpec, task: Task, name: str | None, progress: Progress
) -> tuple[Task, dict[str, Any], RunSpec, Rows]:
    """Returns a task that leaves nothing open, what it chose, the spec, and the rows unread."""
    spec = with_absolute_path(spec)
    check(spec)
    check_task(task, name or "the task")
    rows = rows_of(task)
    check(spec, rows[1].num_examples)
    task, taken = like_earlier(task, name, earlier_task(spec.init_from))
    task, why = settled(task, request_of(spec, rows[1]))
    why = taken | why
    own = {key: {"value": getattr(task, key), "why": reason} for key, reason in why.items()}
    if own:
        progress(sentence({"task": own}))
    if spec.train is not None:
        matching_leaves(jax.eval_shape(lambda: task.init(spec.init_seed)), spec.train)
    return task, own, spec, rows


def check_data(task: Task, begun: Mapping[str, Any] | None = None) -> None:
    """Has the task refuse its data, if it knows how to and they cannot be trained on."""
    if callable(check := getattr(task, "check", None)):
        check(begun)


def timed(task: Task, spec: RunSpec, rows: Rows, placement: Placement | None = None) -> Timing:
    """Returns how long an epoch of a run takes here, by a few steps on generated rows.

    The noise of the spec does not matter; of the rows the shapes are read.
    """
    job = Job.of(task, with_any_noise(spec, rows[1]), rows=rows, placement=placement)
    return time_steps(job, flush_every=getattr(spec.tables, "flush_every", None))


def _prepared(
    task: Task,
    own: Mapping[str, Any],
    spec: RunSpec,
    name: str | None,
    rows: Rows,
    execution: Execution,
) -> Plan:
    placement, stages, progress, _ = execution
    stages.begin("accounting")
    chosen = resolve(spec, task, rows, progress)
    job = Job.of(task, chosen, rows=rows, placement=placement)
    job.check_rows()
    sampler = job.mechanism.sampler
    if weak := report.weak_signal(job.mechanism.signal_to_noise, sampler.num_examples):
        progress(f"note: {weak}")
    guarantee = certified(job)
    record = {"task": task_record(task, name), **chosen.spec.record()}
    if choices := {**({"task": own} if own else {}), **chosen.chosen}:
        record["chosen"] = choices
    digest = job.digest()
    stages.begin("compile")
    progress("compiling the program that trains")
    job.programs()
    _check_alike(job, record, digest)
    stages.begin("audit")
    return Plan(job, guarantee, record, digest, job.audit(progress=progress))


def certified(job: Job) -> Guarantee:
    """Returns the guarantee of a whole run, or refuses one without a finite epsilon."""
    guarantee = job.guarantee(reproducible_noise=job.spec.insecure_seed is not None)
    if guarantee.epsilon is not None and math.isinf(guarantee.epsilon.upper):
        why = guarantee.epsilon.note or "no reason"
        raise ValueError(
            f"no finite epsilon is certified for this run ({why}): take more noise; or, where "
            "batches are cut, a larger max_batch_size or overflow accumulate"
        )
    return guarantee


def _check_alike(job: Job, record: Mapping[str, Any], digest: str) -> None:
    """Raises ValueError, which names what differs, unless all processes would declare one run."""
    if (processes := Processes.current()).count == 1:
        return
    # Under a root of no run, so that digests of equal data and programs are equal.
    terms = job.terms(record, digest, RootKey(bytes(32), insecure=True)).record()
    parts = {**terms.pop("fingerprint"), **terms}
    del parts["platform"]  # the machine's kernel changes no number
    parts["scales"] = repr(job.mechanism.scales())  # or audits would not be of one step
    processes.check_alike(parts)


# --- A run that resumes --------------------------------------------------------------------------


class Asked:
    """What `config.json` asks for: its record, and the spec and the task that it names."""

    def __init__(self, folder: RunDirectory, progress: Progress) -> None:
        """Reads it, or refuses what is damaged; a sampler of one's own is imported."""
        self.where = f"{folder.path / 'config.json'} is damaged, or of another version"
        self.record = folder.read_json("config.json")
        check_version(self.record, folder.path)
        if ":" in (sampler := sampler_name(self.record, self.where)):
            progress(f"importing the module of the run's own sampler, {sampler}")
        self.spec = RunSpec.from_record(self.record, self.where, execute=True)

    def task(self, given: Task | None, progress: Progress) -> Task:
        """Returns the task, `given` or made again, whose data can be trained on, or refuses it.

        What it says of itself now is in the record from here on.
        """
        begun = checked(self.record.get("task"), dict[str, Any], f"{self.where}: task")
        task = load(begun, self.where) if given is None else self._as_chosen(given)
        progress("checking the data")
        where = f"{self.where}: description"
        description = checked(begun.get("description"), dict[str, Any], where)
        check_task(task, begun.get("name") or "the task")
        check_data(task, description)
        now = {**begun, "description": to_json(task.describe())}
        self.record = {**self.record, "task": now}
        return task

    def _as_chosen(self, task: Any) -> Any:
        """Returns a task with what the run chose of it when it began, where it is open again."""
        where = f"{self.where}: chosen"
        chosen = checked(self.record.get("chosen", {}), dict[str, Any], where)
        own = checked(chosen.get("task", {}), dict[str, dict[str, Any]], f"{where}: task")
        values = {name: of.get("value") for name, of in own.items()}
        given = {name: x for name, x in values.items() if getattr(task, name, x) is None}
        return with_settings(task, given, f"{where}: task") if given else task


def resumed(
    folder: RunDirectory,
    asked: Asked,
    ledger: Ledger,
    root: RootKey,
    given: Task | None,
    execution: Execution,
) -> tuple[Job, Checkpoint | None]:
    """Returns the job of a run that resumes, audited, and the checkpoint from which it does.

    The attempt in which it resumes is the ledger's last one. A run that cannot resume as its
    guarantee assumes is refused.
    """
    processes, out, before = Processes.current(), folder.path, asked.record
    placement, stages, progress, _ = execution
    task = asked.task(given, progress)
    record = asked.record
    stages.begin("accounting")
    count, last = len(ledger.history.attempts), ledger.history.attempts[-1].terms
    unchanged = config_digest(record) == last.fingerprint["config"]
    rows = rows_of(task)
    run = _as_begun(last, out, asked.spec, unchanged, rows[1])
    job = Job.of(task, run, rows=rows, placement=placement)
    job.check_rows()
    check_same_noise(last, dataclasses.replace(last, mechanism=job.mechanism))
    digest = job.digest()
    stages.begin("compile")
    terms = job.terms(record, digest, root)
    check_same_start(asked.spec.init_from, last.fingerprint, terms.fingerprint)
    how = how_to_repeat(job, alone=processes.share(not root.is_copy))
    checkpoint = last_checkpoint(job, folder, ledger.history, terms, progress, **how)
    step, origin = _place(checkpoint)
    processes.check_alike({"last checkpoint": [step, origin]})
    if checkpoint:
        state = job.layout.put_state(job.scheduled(checkpoint.state))
        checkpoint = checkpoint._replace(state=state)
    _check_steps(job, last, step, out)
    _check_alike(job, record, digest)
    stages.begin("audit")
    audit = None
    if step < job.mechanism.num_steps:
        if ledger.history.released:
            raise ValueError(
                f"{out} has released its model, and its report and its last checkpoint are "
                "gone: restore report.json from a copy"
            )
        audit = job.audit(checkpoint.state if checkpoint else None, progress)
    if processes.first:
        if record != before:
            folder.write_json("config.json", record)
        folder.note_data(digest)
    attempt = next_attempt(folder, ledger, terms, checkpoint, processes, **how)
    if attempt.index == count and processes.first:
        root.hold()
    if audit is not None:
        ledger.audited(audit)
    if checkpoint and origin == attempt.origin and jax.tree.leaves(checkpoint.state.noise):
        # Begun anew: rows that were released before have no part in its noise.
        state = checkpoint.state._replace(noise=job.start().noise)
        checkpoint = checkpoint._replace(state=state)
    if checkpoint and step < job.mechanism.sampler.num_steps:
        _check_noise(job, checkpoint.state, root, attempt, out)
    if processes.first:
        folder.cut_diagnostics(step)
    if attempt.index == count and processes.first:
        folder.withdraw("guarantee.json")  # planned for fewer attempts: too low now
    if attempt.terms.fingerprint != last.fingerprint:
        if processes.first:
            folder.write_json("environment.json", environment())
        changed = differing([last.fingerprint, attempt.terms.fingerprint])
        progress(f"changed since: {', '.join(changed)}")
    return job, checkpoint


def _as_begun(
    last: Terms, out: Path, spec: RunSpec, unchanged: bool, population: Population
) -> ResolvedRun:
    """Returns what is resumed of a run that was begun under `last`.

    The noise of an unchanged spec stays: another version might find a little more or less.
    """
    sampler, rows = last.mechanism.sampler, population.num_examples
    if rows != sampler.num_examples:
        raise ValueError(
            f"the task has {rows:,} training examples, and {out} was begun on "
            f"{sampler.num_examples:,}: its guarantee is for those"
        )
    if (spec.calibration == "none") != (last.mechanism.full_sums is None):
        begun = "without" if last.mechanism.full_sums is None else "with"
        raise ValueError(
            f"{out} was begun {begun} a calibration and resumes only so: what its guarantee "
            "covers was planned for it; start a new run"
        )
    if not unchanged:
        try:
            return resolved(spec, population)
        except ValueError as error:
            raise ValueError(f"{out / 'config.json'}: {error}") from None
    # A ledger knows a tree of units by its shape alone, of which nothing can be drawn.
    mechanism = dataclasses.replace(last.mechanism, sampler=sampler.of(population))
    return ResolvedRun(spec, mechanism, last.delta)


def _check_steps(job: Job, last: Terms, step: int, out: Path) -> None:
    """Raises ValueError if the steps that are left are not those of the mechanism."""
    begun, mechanism = last.mechanism, job.mechanism
    others = job.refinement is not None and mechanism.num_steps != begun.num_steps
    if others and step > min(mechanism.sampler.num_steps, begun.sampler.num_steps):
        raise ValueError(
            f"{out} is at step {step:,} of {begun.num_steps:,}, too late for "
            f"{mechanism.num_steps:,}: sums over all rows follow the last step once"
        )
    same = dataclasses.replace(last, mechanism=mechanism).record() == last.record()
    if step >= mechanism.num_steps and not same:
        raise ValueError(
            f"{out} has no step left to take, and its config.json asks for another noise, "
            "clipping norm or sampler than its steps had: restore the configuration"
        )


def _check_noise(job: Job, state: TrainState, root: RootKey, attempt: Attempt, out: Path) -> None:
    """Raises ValueError unless what the noise kept is that of the key and the steps so far."""
    key = root.noise_key(attempt.key)
    first = attempt.steps.start
    if wrong := wrong_noise(job.mechanism.noise, state, job.params, key, first):
        raise ValueError(
            f"the last checkpoint of {out} does not hold the noise of its steps: {wrong}; restore "
            "it from a copy, or remove it, and the steps since the one before count once more"
        )


def how_to_repeat(job: Job, *, alone: bool) -> dict[str, bool]:
    """Returns what `Ledger.resume` needs to know of this process, and of the directory.

    With lazy tables a copy of a directory repeats nothing of the original's.
    """
    lazy = job.algorithm.tables is not None
    return {"repeatable": repeats_exactly() and (alone or not lazy), "alone": alone}


def last_checkpoint(
    job: Job,
    folder: RunDirectory,
    history: History,
    terms: Terms,
    progress: Progress,
    *,
    repeatable: bool,
    alone: bool,
) -> Checkpoint | None:
    """Returns where the run resumes: its newest checkpoint, if pending noise may be drawn."""
    like, pending = job.shapes()
    found = folder.checkpoints.latest(like, pending)
    step, origin = _place(found)
    history.check_origin(step, origin)
    if found is None or not found.state.pending:
        return found
    where: dict[str, Any] = {"step": step, "origin": origin, "alone": alone}
    if history.resumes(terms, repeatable=repeatable, **where) or (
        history.may_draw_anew(terms, **where)
    ):
        return found
    found = folder.checkpoints.latest(like)
    history.check_origin(*_place(found))
    progress(
        f"going back to step {_place(found)[0]:,}, where no noise of tables is pending: the steps "
        "that were declared since count, and others take their place"
    )
    return found


def next_attempt(
    folder: RunDirectory,
    ledger: Ledger,
    terms: Terms,
    checkpoint: Checkpoint | None,
    processes: Processes,
    **how: bool,
) -> Attempt:
    """Returns the attempt in which the run resumes; of a new one no later state is left."""
    if ledger.history.released:  # only the report is left to be written
        return ledger.history.attempts[-1]
    step, origin = _place(checkpoint)
    if processes.first and not ledger.history.resumes(terms, step=step, origin=origin, **how):
        folder.checkpoints.destroy_after(step)
    pending = checkpoint is not None and checkpoint.state.pending
    return ledger.resume(terms, step=step, origin=origin, pending=pending, **how)


def _place(checkpoint: Checkpoint | None) -> tuple[int, str]:
    """Returns the step of a checkpoint and the ledger's head in it; those of a start without."""
    return (int(checkpoint.state.step), checkpoint.ledger_head) if checkpoint else (0, NO_HEAD)
