"""What a run is going to do, once it is resolved: its job, audited, and all that is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from dpsgd.core.guarantee import Guarantee
from dpsgd.engine.placement import Placement
from dpsgd.gradients.frozen import matching_leaves
from dpsgd.noise.keys import RootKey
from dpsgd.runs import budget, report
from dpsgd.runs.initial import check_other_rows, pinned
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.log import MetricWriter
from dpsgd.runs.mapping import sentence
from dpsgd.runs.processes import Processes
from dpsgd.runs.resolve import resolve, with_any_noise
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stages import Stages
from dpsgd.runs.support import check
from dpsgd.runs.task import Task, check_task, task_record
from samplers import Population

PyTree = Any
Progress = Callable[[str], None]


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


def planned(spec: RunSpec, task: Task, name: str | None, execution: Execution) -> Plan:
    """Returns a run that is resolved, accounted for, compiled and audited, or refuses it.

    Raises:
      ValueError: for a task or a spec that cannot be run or cannot be guaranteed.
    """
    progress = execution.progress
    spec = pinned(spec)
    check(spec, placement=execution.placement)
    check_task(task, name or "the task")
    if spec.train is not None:
        matching_leaves(jax.eval_shape(lambda: task.init(spec.init_seed)), spec.train)
    rows = rows_of(task)
    check(spec, rows[1].num_examples)
    progress("checking the data")
    check_data(task)
    progress(
        "note: accounting, compiling and the audit come first, about half a minute for a small "
        "model; then it trains, and says how long that takes"
    )
    timer = _timer(task, spec, rows, execution) if spec.budget_minutes else None
    how = task, spec, name, rows, timer, execution
    found = _prepared(*how)
    if timer is not None and timer.exceeded(found.job.spec):
        progress("note: all but the steps takes longer than was thought: choosing fewer epochs")
        found = _prepared(*how)
    return found


def check_data(task: Task, begun: Mapping[str, Any] | None = None) -> None:
    """Has the task refuse its data, if it knows how to and they cannot be trained on."""
    if callable(check := getattr(task, "check", None)):
        check(begun)


def timed(
    task: Task,
    spec: RunSpec,
    rows: tuple[PyTree, Population],
    placement: Placement | None = None,
) -> budget.Timing:
    """Returns how long an epoch of a run takes here, by a few steps on generated rows.

    Args:
      task: What would be trained.
      spec: How; its noise does not matter.
      rows: Of the task, of which the shapes are read, and what is public of them.
      placement: On which devices; by default one.
    """
    job = Job.of(task, with_any_noise(spec, rows[1]), rows=rows, placement=placement)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows[0])
    parts = job.algorithm, job.mechanism, job.start(), job.layout, shapes, task.generated
    flush_every = getattr(spec.tables, "flush_every", None)
    return budget.time_steps(*parts, flush_every=flush_every, clock=Processes.current().clock)


def _timer(
    task: Task, spec: RunSpec, rows: tuple[PyTree, Population], execution: Execution
) -> budget.Budget:
    """Returns what finds the epochs for `spec.budget_minutes`."""
    processes, (placement, stages, *_) = Processes.current(), execution

    def timing(tried: RunSpec) -> budget.Timing:
        stages.begin("timing")
        found = timed(task, tried, rows, placement)
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
    execution: Execution,
) -> Plan:
    placement, stages, progress, _ = execution
    stages.begin("accounting")
    chosen = resolve(spec, task, rows, timer, progress)
    job = Job.of(task, chosen, rows=rows, placement=placement)
    job.check_rows()
    sampler = job.mechanism.sampler
    if weak := report.weak_signal(job.mechanism.signal_to_noise, sampler.num_examples):
        progress(f"note: {weak}")
    guarantee = job.guarantee(reproducible_noise=spec.insecure_seed is not None)
    if guarantee.epsilon is not None and math.isinf(guarantee.epsilon.upper):
        why = guarantee.epsilon.note or "no reason"
        raise ValueError(
            f"no finite epsilon is certified for this run ({why}): "
            "raise noise_multiplier, or max_batch_size or overflow='accumulate' where batches "
            "are cut"
        )
    record = {"task": task_record(task, name), **chosen.spec.record()}
    if chosen.chosen:
        record["chosen"] = dict(chosen.chosen)
    if job.taken:
        record["initial"] = dict(job.taken)
        progress(f"note: {sentence(record['initial'])}")
    digest = job.digest()
    check_other_rows(spec.init_from, digest)
    stages.begin("compile")
    progress("compiling the program that trains")
    job.programs()
    check_alike(job, record, digest, Processes.current())
    stages.begin("audit")
    return Plan(job, guarantee, record, digest, job.audit(job.start(), progress))


def check_alike(job: Job, record: Mapping[str, Any], digest: str, processes: Processes) -> None:
    """Raises ValueError, which names what differs, unless all processes would declare one run."""
    if processes.count == 1:
        return
    # Under a root that is nobody's, so that digests of equal data and programs are equal.
    terms = job.terms(record, digest, RootKey(bytes(32), insecure=True)).record()
    parts = {**terms.pop("fingerprint"), **terms}
    del parts["platform"]  # the machine's kernel changes no number
    parts["scales"] = repr(job.mechanism.scales())  # or audits would not be of one step
    processes.check_alike(parts)
