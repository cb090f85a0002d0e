"""One run of a task: to a run directory with the model and the guarantee that it has earned.

**Several processes** (`dpsgd.runs.processes`) call the functions here alike, and compute alike.
Process 0 alone writes what is here, and the ledger before anybody takes part in a block; the others
read the root secret and the ledger in the directory that all of them share. What depends on time or
on signals is decided once for all. Whoever fails ends all of them.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpsgd.audit.runtime.resume import wrong_noise
from dpsgd.core.cost import Segment, cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.state import TrainState
from dpsgd.engine import batch_files
from dpsgd.engine.batch_files import BatchFiles, Draw
from dpsgd.engine.loop import Block, repeats_exactly, train_blocks
from dpsgd.engine.placement import Placement, on_one_device
from dpsgd.engine.queries import refine
from dpsgd.files import make_folder
from dpsgd.noise.keys import RootKey
from dpsgd.runs import budget, report, watchdog
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.directory import BATCHES, CALIBRATION, DATA, RunDirectory
from dpsgd.runs.environment import environment, origin
from dpsgd.runs.fingerprint import differing
from dpsgd.runs.history import NO_HEAD, Generation, History, check_same_noise
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.ledger import Ledger, SharedLedger, joined
from dpsgd.runs.processes import Processes
from dpsgd.runs.records import checked, plain
from dpsgd.runs.resolve import ResolvedRun, check, resolve, resolved, with_any_noise
from dpsgd.runs.result import FinishedRun, proved
from dpsgd.runs.spec import RunSpec, check_version, config_digest, sampler_name
from dpsgd.runs.stages import Stages
from dpsgd.runs.stop import Stopped, stop_requests
from dpsgd.runs.task import (
    Task,
    arrays_digest,
    check_task,
    load,
    task_record,
)
from dpsgd.runs.terms import Terms
from samplers import Population

PyTree = Any
Progress = Callable[[str], None]


def run(
    task: Task,
    spec: RunSpec,
    out: Path,
    *,
    name: str | None = None,
    placement: Placement | None = None,
    started: float | None = None,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Trains `task` as `spec` says, writes its run directory, and returns its report.

    What the spec leaves open is chosen now, by what is public alone, and recorded.

    Everything that can be refused is refused before the run directory is made.

    Args:
      task: What is trained.
      spec: How.
      out: The run directory; an existing one is never touched.
      name: By which `resume` finds the task again, "module:object"; by default its class, if it is
        a dataclass of JSON values.
      placement: On which devices it is trained; by default one.
      started: When its work began, by `time.monotonic`; by default now. `spec.budget_minutes`
        count from then on.
      progress: Called with one line of text whenever there is something to tell.

    Returns:
      What `report.json` holds: the guarantee's fields, "metrics" and others.

    Raises:
      FileExistsError: if the run directory exists; it is left as it is.
      ValueError: for a task or a spec that cannot be run or cannot be guaranteed.
      OSError: if the disk is full; `resume` then goes on.
      Stopped: if SIGTERM or SIGINT asked for it; `resume` then goes on.
    """
    stages = Stages(started)
    job, folder = _begun(task, spec, out, name, placement, stages, progress)
    processes = Processes.current()
    with joined(folder.ledger_path, processes) as ledger:
        root = _shared_root(folder, ledger)
        _check_root(root, processes)
        return _finish(job, folder, ledger, root, None, stages, progress)


def begin(
    task: Task,
    spec: RunSpec,
    out: Path,
    *,
    name: str | None = None,
    placement: Placement | None = None,
    started: float | None = None,
    progress: Progress = lambda line: None,
) -> None:
    """Makes the run directory that `run` makes, and takes no step: `resume` goes on from there.

    Between the two, `draw` can draw the run's batches, since its secret and its ledger are there.

    Args:
      task: What will be trained.
      spec: How.
      out: The run directory; an existing one is never touched.
      name: As for `run`, and so are all others.
      placement: On which devices it will be trained.
      started: As for `run`.
      progress: Called with one line of text.

    Raises:
      FileExistsError, ValueError, OSError: as for `run`.
    """
    _begun(task, spec, out, name, placement, Stages(started), progress)


def _begun(
    task: Task,
    spec: RunSpec,
    out: Path,
    name: str | None,
    placement: Placement | None,
    stages: Stages,
    progress: Progress,
) -> tuple[Job, RunDirectory]:
    """Makes the run directory; returns it with the job."""
    processes = Processes.current()
    check(spec, placement=placement)
    check_task(task, name or "the task")
    RunDirectory.refuse_existing(out)
    rows = rows_of(task)
    check(spec, rows[1].num_examples)
    progress("checking the data")
    _check_data(task, None)
    progress(
        "note: accounting, compiling and the audit come first, about half a minute for a small "
        "model; then it trains, and says how long that takes"
    )
    timer = _timer(task, spec, rows, placement, stages) if spec.budget_minutes else None
    how = task, spec, name, rows, timer, placement, stages, progress
    job, planned, record, digest, audit = _prepared(*how)
    if timer is not None and timer.exceeded(job.spec):
        progress("note: all but the steps takes longer than was thought: choosing fewer epochs")
        job, planned, record, digest, audit = _prepared(*how)
    if processes.first:
        if spec.insecure_seed is None:
            root = RootKey.from_entropy()
        else:
            root = RootKey.from_insecure_seed(spec.insecure_seed)
        terms = job.terms(record, digest, root)
        with RunDirectory.create(out) as made:
            made.write_json("config.json", record)
            made.write_json("environment.json", environment())
            made.write_json("guarantee.json", planned.record())
            made.write_json(DATA, {"data": [digest]})
            with Ledger.create(made.ledger_path, terms) as ledger:
                root.begin_run(ledger.history.name)
                ledger.audited(audit)
            root.save(made.root_path)
    return job, RunDirectory(out)


def _timer(
    task: Task,
    spec: RunSpec,
    rows: tuple[PyTree, Population],
    placement: Placement | None,
    stages: Stages,
) -> budget.Budget:
    """Returns what finds the epochs for `spec.budget_minutes`, by steps on generated rows."""
    processes = Processes.current()

    def timing(tried: RunSpec) -> budget.Timing:
        stages.begin("timing")
        job = Job.of(task, with_any_noise(tried, rows[1]), rows=rows, placement=placement)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows[0])
        parts = job.algorithm, job.mechanism, job.start(), job.layout, shapes, task.generated
        flush_every = getattr(tried.tables, "flush_every", None)
        found = budget.time_steps(*parts, flush_every=flush_every, clock=processes.clock)
        stages.begin("accounting")
        return found

    assert spec.budget_minutes is not None
    started = processes.share(stages.started)
    return budget.Budget(spec.budget_minutes, timing, started, processes.clock)


def _prepared(
    task: Task,
    spec: RunSpec,
    name: str | None,
    rows: tuple[PyTree, Population],
    timer: budget.Budget | None,
    placement: Placement | None,
    stages: Stages,
    progress: Progress,
) -> tuple[Job, Guarantee, dict[str, Any], str, str]:
    """Resolves, prices and audits a run: returns job, guarantee, `config.json`, digest, verdict."""
    stages.begin("accounting")
    chosen = resolve(spec, task, rows, timer, progress)
    job = Job.of(task, chosen, rows=rows, placement=placement)
    job.check_rows()
    sampler = job.mechanism.sampler
    if weak := report.weak_signal(job.mechanism.signal_to_noise, sampler.num_examples):
        progress(f"note: {weak}")
    insecure = spec.insecure_seed is not None
    lazy = job.algorithm.tables is not None
    how: dict[str, Any] = {"reproducible_noise": insecure, "lazy_tables": lazy}
    planned = cost([Segment(job.mechanism, unit=job.unit, **how)], job.delta)
    if planned.epsilon is not None and math.isinf(planned.epsilon.upper):
        raise ValueError(
            f"no finite epsilon is certified for this run ({planned.epsilon.note or 'no reason'}): "
            "raise noise_multiplier, or max_batch_size or overflow='accumulate' where batches "
            "are cut"
        )
    record = {"task": task_record(task, name), **chosen.spec.record()}
    if chosen.chosen:
        record["chosen"] = dict(chosen.chosen)
    digest = job.digest()
    stages.begin("compile")
    progress("compiling the program that trains")
    job.program_digest()
    _check_alike(job, record, digest, Processes.current())
    stages.begin("audit")
    return job, planned, record, digest, job.audit(job.start(), progress)


def resume(
    out: Path,
    task: Task | None = None,
    *,
    placement: Placement | None = None,
    started: float | None = None,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Goes on with the run in `out` from its last checkpoint, and returns its report.

    No step is replayed: a batch is a function of seed and step. The ledger decides whether declared
    steps are repeated bit for bit, or taken anew and counted again (`Ledger.resume`).

    Args:
      out: Its run directory.
      task: What is trained; by default it is made again of what the configuration says.
      placement: On which devices it goes on; by default one. Others than before add up in another
        order, so that a generation begins and steps that were declared already count once more.
      started: As for `run`.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      FileNotFoundError: if there is no run, or its root secret or its data are gone.
      ValueError: if ledger, checkpoints, batches or data are damaged, or another process is at it.
      OSError, Stopped: as for `run`.
    """
    return _gone_on(out, task, placement, Stages(started), progress, _finish)


def draw(
    out: Path,
    path: Path,
    task: Task | None = None,
    *,
    write: Callable[[Path, Draw, int, PyTree], list[str]] = batch_files.draw_here,
    placement: Placement | None = None,
    progress: Progress = lambda line: None,
) -> int | None:
    """Draws the batches of all steps that the run in `out` has left, and returns how many files.

    `resume` then reads them in their order in place of rows at random, to the same bits. They are
    those of the generation in which the run would go on, which begins by this if it must: if
    anything that a generation depends on changes afterwards, they are refused, and drawn again.
    As secret as the seed, they are destroyed when the run ends.

    Args:
      out: Its run directory, of a run whose `data_on` is "host".
      path: Folder to make for them; if batches of this run lie there, others take their place.
      task: As for `resume`.
      write: Writes the files of a draw with this seed from these rows, and returns their SHA-256.
      placement: As for `resume`: on which devices the run will go on.
      progress: Called with one line of text whenever there is something to tell.

    Returns:
      The number of files; None if the run is finished.

    Raises:
      FileExistsError: if there is something else at `path`.
      ValueError: if the run reads no rows from the host, or as for `resume`.
      OSError: as for `resume`.
    """

    def drawn(
        job: Job,
        folder: RunDirectory,
        ledger: Ledger | SharedLedger,
        root: RootKey,
        checkpoint: Checkpoint | None,
        stages: Stages,
        progress: Progress,
    ) -> dict[str, Any]:
        _check_batches_can_be_read(job)
        history, step = ledger.history, int(checkpoint.state.step) if checkpoint else 0
        of = _draw_of(job, history, step)
        if (before := folder.batches) is not None:
            batch_files.forget(before, history.name)
        batch_files.refuse_existing(path)  # whatever lies there is not noted, nor ever removed
        folder.note_batches(path)
        seed = root.sampling_seed(of.generation)
        make_folder(path, 0o700)
        try:
            progress(f"drawing the batches of steps {step:,} to {of.sampler.num_steps:,}")
            digests = write(path, of, seed, job.data)
            batch_files.write_manifest(path, of, seed, digests, job.data)
        except BaseException:
            batch_files.forget(path, history.name)
            raise
        return {"files": of.num_files}

    return _gone_on(out, task, placement, Stages(), progress, drawn).get("files")


def _draw_of(job: Job, history: History, step: int) -> Draw:
    """Returns the draw of all steps from `step` on, for the generation in which the run goes on."""
    key = history.generations[-1].key
    sampler = job.mechanism.sampler
    return Draw.of(sampler, job.data, run=history.name, generation=key, first_step=step)


def _check_batches_can_be_read(job: Job) -> None:
    """Raises ValueError unless a run can read batches from files."""
    if Processes.current().count > 1:
        raise ValueError("a run of several processes draws its own batches: they share storage")
    if not job.layout.streamed:
        raise ValueError(
            "batches that are drawn ahead bring their rows along: begin the run with "
            "data_on='host' (--data-on host)"
        )


def _gone_on(
    out: Path,
    task: Task | None,
    placement: Placement | None,
    stages: Stages,
    progress: Progress,
    then: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Finds where the run in `out` goes on, and in which generation; returns what `then` does."""
    processes = Processes.current()
    folder = RunDirectory.open(out, finished=False)
    if folder.finished:
        report_of = FinishedRun.read(out).record
        if processes.first:
            folder.forget()  # in case the run died just before it did
        progress("the run is finished")
        return report_of
    where = f"{out / 'config.json'} is damaged, or of another version"
    record = folder.read_json("config.json")
    check_version(record, out)
    if ":" in (sampler := sampler_name(record, where)):
        progress(f"importing the module of the run's own sampler, {sampler}")
    spec = RunSpec.from_record(record, where, execute=True)
    with joined(folder.ledger_path, processes) as ledger:
        folder.history()  # refuses a ledger that is older than the checkpoints
        root = _shared_root(folder, ledger)
        _check_root(root, processes)
        begun = checked(record.get("task"), dict[str, Any], f"{where}: task")
        if task is None:
            task = load(begun, where)
        progress("checking the data")
        description = checked(begun.get("description"), dict[str, Any], f"{where}: description")
        check_task(task, begun.get("name") or "the task")
        _check_data(task, description)
        # What the task says of itself now is what is trained from here on.
        record = {**record, "task": {**begun, "description": plain(task.describe())}}
        stages.begin("accounting")
        generations = tuple(ledger.history.generations)
        last = generations[-1].terms
        unchanged = config_digest(record) == last.fingerprint["config"]
        rows = rows_of(task)
        same_run = _resumed(last, out, spec, unchanged, rows[1])
        job = Job.of(task, same_run, rows=rows, placement=placement)
        job.check_rows()
        check_same_noise(last, dataclasses.replace(last, mechanism=job.mechanism))
        digest = job.digest()
        stages.begin("compile")
        terms = job.terms(record, digest, root)
        how = _how_to_repeat(job, alone=processes.share(not root.is_copy))
        checkpoint = _last_checkpoint(job, folder, ledger.history, terms, progress, **how)
        step, origin = _place(checkpoint)
        processes.check_alike({"last checkpoint": [step, origin]})
        if checkpoint:
            state = job.layout.put_state(job.scheduled(checkpoint.state))
            checkpoint = checkpoint._replace(state=state)
        planned, steps = last.mechanism, job.mechanism.sampler.num_steps
        if (
            job.refinement
            and job.mechanism.num_steps != planned.num_steps
            and step > min(steps, planned.sampler.num_steps)
        ):
            raise ValueError(
                f"{out} is at step {step:,} of {planned.num_steps:,}, too late for "
                f"{job.mechanism.num_steps:,}: sums over all rows follow the last step once"
            )
        same = dataclasses.replace(last, mechanism=job.mechanism).record() == last.record()
        if step >= job.mechanism.num_steps and not same:
            raise ValueError(
                f"{out} has no step left to take, and its config.json asks for another noise, "
                "clipping norm or sampler than its steps had: restore the configuration"
            )
        _check_alike(job, record, digest, processes)
        stages.begin("audit")
        audit = None
        if step < job.mechanism.num_steps:
            if ledger.history.released:
                raise ValueError(
                    f"{out} has released its model, and its report and its last checkpoint are "
                    "gone: restore report.json from a copy"
                )
            audit = job.audit(checkpoint.state if checkpoint else job.start(), progress)
        if processes.first:
            if record["task"] != begun:
                folder.write_json("config.json", record)
            folder.note_data(digest)
        generation = _generation(folder, ledger, terms, checkpoint, processes, **how)
        if generation.index == len(generations) and processes.first:
            root.hold()
        if audit is not None:
            ledger.audited(audit)
        if checkpoint and origin == generation.origin and jax.tree.leaves(checkpoint.state.noise):
            # Begun anew: rows that were released before have no part in its noise.
            state = checkpoint.state._replace(noise=job.start().noise)
            checkpoint = checkpoint._replace(state=state)
        if checkpoint and step < job.mechanism.sampler.num_steps:
            _check_noise(job, checkpoint.state, root, generation, out)
        if processes.first:
            folder.cut_diagnostics(step)
        if generation.terms.fingerprint != last.fingerprint:
            if processes.first:
                folder.withdraw("guarantee.json")  # planned for one generation: too low now
                folder.write_json("environment.json", environment())
            changed = differing([last.fingerprint, generation.terms.fingerprint])
            progress(f"changed since: {', '.join(changed)}")
        return then(job, folder, ledger, root, checkpoint, stages, progress)


def _check_noise(
    job: Job, state: TrainState, root: RootKey, generation: Generation, out: Path
) -> None:
    """Raises ValueError unless what the noise kept is that of the key and the steps so far."""
    key = job.mechanism.noise_key(root, generation.key)
    first = generation.steps.start
    if wrong := wrong_noise(job.mechanism.noise, state, job.params, key, first):
        raise ValueError(
            f"the last checkpoint of {out} does not hold the noise of its steps: {wrong}; restore "
            "it from a copy, or remove it, and the steps since the one before count once more"
        )


def _how_to_repeat(job: Job, *, alone: bool) -> dict[str, bool]:
    """Returns what `Ledger.resume` needs to know of this process, and of the directory.

    With lazy tables nobody repeats what another directory's run may not: `dpsgd.runs.ledger`.
    """
    lazy = job.algorithm.tables is not None
    return {"repeatable": repeats_exactly() and (alone or not lazy), "alone": alone}


def _last_checkpoint(
    job: Job,
    folder: RunDirectory,
    history: History,
    terms: Terms,
    progress: Progress,
    *,
    repeatable: bool,
    alone: bool,
) -> Checkpoint | None:
    """Returns where the run goes on: its newest checkpoint, if noise that is due may be drawn."""
    like, due = job.shapes()
    found = folder.checkpoints.latest(like, due)
    step, origin = _place(found)
    history.check_origin(step, origin)
    if found is None or not found.state.pending:
        return found
    where: dict[str, Any] = {"step": step, "origin": origin, "alone": alone}
    if history.goes_on(terms, repeatable=repeatable, **where) or (
        history.may_draw_anew(terms, **where)
    ):
        return found
    found = folder.checkpoints.latest(like)
    history.check_origin(*_place(found))
    progress(
        f"going back to step {_place(found)[0]:,}, where no noise of tables is due: the steps that "
        "were declared since count, and others take their place"
    )
    return found


def _generation(
    folder: RunDirectory,
    ledger: Ledger | SharedLedger,
    terms: Terms,
    checkpoint: Checkpoint | None,
    processes: Processes,
    **how: bool,
) -> Generation:
    """Returns the generation in which the run goes on; of a new one no later state is left."""
    if ledger.history.released:  # only the report is left to be written
        return ledger.history.generations[-1]
    step, origin = _place(checkpoint)
    if processes.first and not ledger.history.goes_on(terms, step=step, origin=origin, **how):
        folder.checkpoints.destroy_after(step)
    due = checkpoint is not None and checkpoint.state.pending
    return ledger.resume(terms, step=step, origin=origin, due=due, **how)


def _place(checkpoint: Checkpoint | None) -> tuple[int, str]:
    """Returns the step of a checkpoint and the ledger's head in it; those of a start without."""
    return (int(checkpoint.state.step), checkpoint.ledger_head) if checkpoint else (0, NO_HEAD)


def _check_alike(job: Job, record: Mapping[str, Any], digest: str, processes: Processes) -> None:
    """Raises ValueError, which names what differs, unless all processes would declare one run."""
    if processes.count == 1:
        return
    # Under a root that is nobody's, so that digests of equal data and programs are equal.
    terms = job.terms(record, digest, RootKey(bytes(32), insecure=True)).record()
    parts = {**terms.pop("fingerprint"), **terms}
    del parts["platform"]  # the machine's kernel changes no number
    parts["scales"] = repr(job.mechanism.scales())  # or audits would not be of one step
    processes.check_alike(parts)


def _shared_root(folder: RunDirectory, ledger: Ledger | SharedLedger) -> RootKey:
    """Returns the root secret of the run that the ledger is of."""
    root = folder.root()
    root.begin_run(ledger.history.name)
    return root


def _check_root(root: RootKey, processes: Processes) -> None:
    """Raises ValueError unless all processes have one root: others' noise would be another."""
    processes.check_alike({"root secret": root.blind("processes")})


def _check_data(task: Task, begun: Mapping[str, Any] | None) -> None:
    """Has the task refuse its data, if it knows how to and they cannot be trained on."""
    if callable(check := getattr(task, "check", None)):
        check(begun)


def _resumed(
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
    if (spec.calibration == "platt") != (last.mechanism.full_sums is not None):
        begun = "none" if last.mechanism.full_sums is None else "platt"
        raise ValueError(
            f"{out} was begun with calibration {begun} and goes on only so: what its guarantee "
            "covers was planned for it; start a new run"
        )
    if not unchanged:
        return resolved(spec, population)
    # A ledger knows a tree of units by its shape alone, of which nothing can be drawn.
    mechanism = dataclasses.replace(last.mechanism, sampler=sampler.of(population))
    return ResolvedRun(spec, mechanism, last.delta)


def _finish(
    job: Job,
    folder: RunDirectory,
    ledger: Ledger | SharedLedger,
    root: RootKey,
    checkpoint: Checkpoint | None,
    stages: Stages,
    progress: Progress,
) -> dict[str, Any]:
    """Trains from `checkpoint` to the end, evaluates, and writes model and report."""
    stages.begin("train")
    last = checkpoint or Checkpoint(job.start(), NO_HEAD, 0.0)
    with _full_disk_explained(folder):
        with stop_requests() as stop:
            if last.state.step < job.mechanism.sampler.num_steps:
                last = _train(job, folder, ledger, root, last, stop, progress)
            if last.state.step < job.mechanism.num_steps:
                stages.begin("calibrate")
                last = _refine(job, folder, ledger, root, last, stop, progress)
        params = on_one_device(last.state.params)
        record = None
        processes = Processes.current()
        if processes.first:
            stages.begin("evaluate")
            released = ledger.history.released
            if not (
                released and folder.params_path.exists() and folder.params_digest() == released
            ):
                folder.write_params(params)
            ledger.release(folder.params_digest())
            progress("evaluating")
            metrics = _numbers(job.task.metrics(params))
            stages.begin("accounting")
            guarantee = ledger.history.guarantee().record()
            sampler = job.mechanism.sampler
            record = {
                **proved(ledger.history),
                "ledger_head": ledger.history.head,
                "metrics": metrics,
                "num_params": sum(leaf.size for leaf in jax.tree.leaves(job.params)),
                "calibration": folder.read_json(CALIBRATION) if job.refinement else None,
                "stage_seconds": stages.seconds(),
                "training_seconds": last.seconds,
                "examples_per_second": (
                    sampler.num_steps * sampler.expected_batch_size / last.seconds
                ),
            }
            folder.write_json("guarantee.json", guarantee)
            config = folder.read_json("config.json")
            folder.write_text("report.md", report.markdown(record, config, origin()))
            folder.write_json("report.json", record)
            folder.forget()
    return processes.share(record, patience=math.inf)


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns numbers as JSON values: None for one that is undefined."""
    found = {}
    for name, value in values.items():
        number = value if isinstance(value, int) else float(value)
        found[name] = number if math.isfinite(number) else None
    return found


def _train(
    job: Job,
    folder: RunDirectory,
    ledger: Ledger | SharedLedger,
    root: RootKey,
    last: Checkpoint,
    stop: Callable[[], bool],
    progress: Progress,
) -> Checkpoint:
    """Takes the steps that are left, with a checkpoint now and then and one at the end."""
    processes = Processes.current()
    generation: Generation = ledger.history.generations[-1]
    num_steps = job.mechanism.sampler.num_steps
    first = int(last.state.step)
    before, started, saved = last.seconds, time.perf_counter(), time.perf_counter()
    batches = _batches(job, folder, ledger.history, first)
    progress(f"steps {first:,} to {num_steps:,}")
    blocks = train_blocks(
        job.algorithm,
        job.mechanism,
        last.state,
        job.data,
        root=root,
        generation=generation.key,
        layout=job.layout,
        declare=ledger.declare,
        donate=True,
        flush_every=getattr(job.spec.tables, "flush_every", None),
        batches=batches,
        run=ledger.history.name,
    )
    done = first
    under_way: deque[Block] = deque()
    for block in blocks:
        under_way.append(block)
        watchdog.step()
        due = time.perf_counter() - saved >= job.spec.checkpoint_seconds
        stopping, due = map(any, zip(*processes.gather([stop(), due]), strict=True))
        # A generation may begin where no noise is due: each such state of lazy tables is kept.
        flushed = bool(block.state.tables) and not block.state.pending
        save = due or stopping or flushed or block.steps.stop == num_steps
        # One block stays under way while the one before is written down, but for a checkpoint.
        while len(under_way) > (0 if save else 1):
            past = under_way.popleft()
            diagnostics = past.diagnostics
            if processes.first:
                folder.append_diagnostics(past.steps.start, diagnostics)
            done = past.steps.stop
        elapsed = time.perf_counter() - started
        if done > first:
            left = elapsed / (done - first) * (num_steps - done)
            progress(f"step {done:,} of {num_steps:,}, {left:.0f} s left")
        if save:
            _check_state(block.state, processes)
            last = Checkpoint(block.state, ledger.history.head, before + elapsed)
            folder.checkpoints.save(last)
            saved = time.perf_counter()
        if stopping and done < num_steps:
            raise Stopped(
                f"stopped at step {done:,} of {num_steps:,}, all of it saved: "
                f"`dpsgd resume {folder.path}` goes on"
            )
    watchdog.rest()
    return last


def _batches(
    job: Job, folder: RunDirectory, history: History, step: int
) -> Callable[[int], BatchFiles] | None:
    """Returns what opens the batches that were drawn ahead, if any were."""
    if (path := folder.batches) is None:
        return None
    _check_batches_can_be_read(job)

    def opened(seed: int) -> BatchFiles:
        try:
            return BatchFiles(path, _draw_of(job, history, step), seed, job.data)
        except ValueError as error:
            raise ValueError(
                f"{error}; or remove {folder.path / BATCHES}, and the run draws its own"
            ) from None

    return opened


def _check_state(state: TrainState, processes: Processes) -> None:
    """Raises ValueError unless what all processes compute for themselves is the same in all."""
    if processes.count > 1:
        whole = [leaf for leaf in jax.tree.leaves(state) if leaf.is_fully_replicated]
        processes.check_alike({"state of training": arrays_digest(whole)})


def _refine(
    job: Job,
    folder: RunDirectory,
    ledger: Ledger | SharedLedger,
    root: RootKey,
    last: Checkpoint,
    stop: Callable[[], bool],
    progress: Progress,
) -> Checkpoint:
    """Releases the sums over all rows, and saves what is made of them: nothing releases them twice.

    They are declared when the checkpoint of the last step is on the disk, so that a run that dies
    here goes on from these very parameters.
    """
    mechanism, processes = job.mechanism, Processes.current()
    assert job.refinement is not None, "a mechanism has sums over all rows for a refinement alone"

    def declare(steps: range) -> None:
        if processes.any(stop()):
            raise Stopped(
                f"stopped before the {mechanism.full_sums}, all of it saved: `dpsgd resume "
                f"{folder.path}` goes on"
            )
        ledger.declare(steps)

    progress(f"calibrating by {mechanism.full_sums}")
    refined = refine(
        job.refinement,
        mechanism,
        on_one_device(last.state.params),
        job.data,
        root=root,
        generation=ledger.history.generations[-1].key,
        declare=declare,
        run=ledger.history.name,
    )
    if processes.first:
        folder.write_json(CALIBRATION, _numbers(refined.summary))
    state = last.state._replace(step=np.int32(mechanism.num_steps), raw_params=refined.params)
    last = Checkpoint(state, ledger.history.head, last.seconds)
    folder.checkpoints.save(last)
    return last


@contextmanager
def _full_disk_explained(folder: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"the disk is full; nothing is lost: make room, and `dpsgd resume {folder.path}` goes "
            "on"
        ) from None
