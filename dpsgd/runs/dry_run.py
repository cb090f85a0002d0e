"""Describes a run's sizes, memory, time and guarantee without training it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.guarantee import Guarantee
from dpsgd.core.noise import Independent
from dpsgd.core.segments import Segment
from dpsgd.engine.loop import train_blocks
from dpsgd.engine.placement import Placement
from dpsgd.runs.job import Job, Training
from dpsgd.runs.log import Stages
from dpsgd.runs.mechanism import resolved
from dpsgd.runs.plan import Execution, plan_run
from dpsgd.runs.recommendation import RecommendationRequest
from dpsgd.runs.resolve import Rows
from dpsgd.runs.spec import NoiseMultiplier, RunSpec
from dpsgd.runs.task import Task
from samplers import Deterministic

PyTree = Any
Clock = Callable[[], float]

_ROWS = 4096
"""Most rows generated for timing; others are copies or zeros."""

_TIMED_ROWS = 2**18
"""Least number of timed rows in a dry run with assumed rows or devices."""

_LEAST_SECONDS = 1.0
"""Seconds after which no more steps are timed."""

_MOST_STEPS = 1024
"""Most steps that are timed after the first one."""


class Timing(NamedTuple):
    """Seconds of an epoch, a step, and the first step with compilation."""

    epoch: float
    step: float
    first: float


def time_steps(
    job: Training, *, flush_every: int | None = None, clock: Clock = time.perf_counter
) -> Timing:
    """Measures an epoch and a step in seconds.

    It reads no private row: the rows are synthetic, with the shapes of the run's rows. Any
    noise multiplier serves, as the program is the same.

    Args:
      job: Job of the run.
      flush_every: Steps between flushes of lazy tables; None for one flush per epoch.
      clock: Function that returns seconds.
    """
    algorithm, mechanism, state, layout = job.algorithm, job.mechanism, job.start(), job.layout
    sampler = mechanism.sampler
    probe_rows = job.synthetic(min(sampler.num_examples, _ROWS))
    rows = jax.tree.map(
        lambda shape, first_rows: _filled(shape, first_rows, layout.streamed), job.data, probe_rows
    )

    def timed(steps: int) -> float:
        begin = jnp.asarray(sampler.num_steps - steps, state.step.dtype)
        blocks = train_blocks(
            algorithm,
            mechanism,
            state._replace(step=begin),
            rows,
            layout=layout,
        )
        began = clock()
        for block in blocks:
            last = block.state
        jax.block_until_ready(last)
        return clock() - began

    first = timed(1)
    first_step_seconds, steps, most = timed(1), 4, min(_MOST_STEPS, sampler.num_steps - 1)
    if not most:
        return Timing(first_step_seconds, first_step_seconds, first)
    while True:
        steps = min(steps, most)
        several_seconds = timed(1 + steps)
        if steps == most or several_seconds - first_step_seconds >= _LEAST_SECONDS:
            break
        steps *= 4
    a_step = (
        (several_seconds - first_step_seconds) / steps
        if several_seconds > first_step_seconds
        else several_seconds / (1 + steps)
    )
    # Overhead before the first step, such as drawing an epoch, counts once per epoch; the flush of
    # lazy tables after the last step counts once per flush, if an epoch has more than one.
    times = max(1.0, sampler.steps_per_epoch / (flush_every or math.inf))
    epoch = sampler.steps_per_epoch * a_step + times * max(0.0, first_step_seconds - a_step)
    return Timing(epoch, a_step, first)


def _filled(shape: Any, first_rows: Any, streamed: bool) -> np.ndarray:
    """Returns rows of `shape`: `part`, then copies of it or zeros.

    Streamed rows are filled up with zeros, which take no memory: they may exceed the memory.
    """
    first_rows = np.asarray(first_rows, shape.dtype)
    if not streamed:
        return np.resize(first_rows, shape.shape)
    column = np.zeros(shape.shape, shape.dtype)
    column[: len(first_rows)] = first_rows
    return column


def timed(task: Task, spec: RunSpec, rows: Rows) -> Timing:
    """Measures the seconds of an epoch on this machine.

    Args:
      task: Task that would be trained.
      spec: Settings of the run; its noise does not matter.
      rows: Training rows, read for their shapes and dtypes only, and their population.
    """
    noise = Independent() if spec.noise.bands == "auto" else spec.noise
    privacy = NoiseMultiplier(1.0) if spec.private else spec.privacy
    spec = dataclasses.replace(spec, noise=noise, privacy=privacy, calibration="none")
    job = Job.of_task(task, resolved(spec, rows[1]), rows=rows)
    return time_steps(job, flush_every=getattr(spec.tables, "flush_every", None))


@dataclass(frozen=True)
class Resized:
    """Task with an assumed number of training rows, for a dry run.

    Attributes:
      task: Task whose rows are examples.
      num_examples: Number of training rows.
    """

    task: Any
    num_examples: int

    def columns(self) -> PyTree:
        """Returns one generated row as all rows, without copies."""
        return _repeated(self.task.generated(1), self.num_examples)

    def settle(self, request: RecommendationRequest) -> tuple[Resized, dict[str, str]]:
        """Returns the task with settings chosen, and the reasons."""
        settle = getattr(self.task, "settle", None)
        task, reasons = settle(request) if callable(settle) else (self.task, {})
        return Resized(task, self.num_examples), reasons

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "task"), name)


def _repeated(rows: PyTree, count: int) -> PyTree:
    first_rows = jax.tree.map(lambda column: np.asarray(column)[:1], rows)
    return jax.tree.map(lambda x: np.broadcast_to(x, (count, *x.shape[1:])), first_rows)


def _share(job: Job, num_devices: int, num_examples: int) -> Job:
    """Returns a job whose steps are one device's share of each batch.

    Args:
      job: Job of the run, on one device.
      num_devices: Number of devices that share a batch.
      num_examples: Least number of rows.
    """
    sampler = job.mechanism.sampler
    if sampler.clipped_shape:
        raise ValueError(
            f"{sampler} clips units of several rows: a dry run on other devices or numbers of "
            "rows is not possible; leave out --num-examples and --num-devices"
        )
    places = -(-sampler.padded_batch_size // num_devices)
    count = -(-num_examples // places) * places
    mechanism = dataclasses.replace(
        job.mechanism, sampler=Deterministic(count, places, 1), full_sums=None
    )
    data = _repeated(job.synthetic(1), count)
    return dataclasses.replace(job, data=data, plan=Segment(mechanism), refinement=None)


class DryRun(NamedTuple):
    """Facts about a run that are known before it reads a row."""

    steps: int
    """Steps of the sampler."""
    expected_batch_size: float
    """Expected examples in a batch."""
    padded_batch_size: int
    """Batch positions per pass; a larger batch takes several passes."""
    num_devices: int
    """Number of assumed devices, which share each batch; 1 if the run's own devices are timed."""
    parameters: int
    """Total number of entries of all parameters."""
    program_bytes: int
    """Device memory of a block's program in bytes, rows included."""
    timing: Timing
    """Seconds measured on generated rows; of one device's share, if devices are assumed."""
    hours: float
    """Predicted hours of all steps, with compilation."""
    guarantee: Guarantee
    """Guarantee of the whole run."""


def dry_run(
    task: Task,
    spec: RunSpec,
    *,
    name: str | None = None,
    placement: Placement | int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    clock: Clock = time.perf_counter,
) -> DryRun:
    """Measures a run on generated rows and computes its guarantee.

    It reads only number, shapes and dtypes of the task's rows, and writes no file. With assumed
    devices or rows (`Resized`) it times steps alone, without drawing batches or exchanging sums.

    Args:
      task: Task that the run would train, or `Resized`.
      spec: Configuration of the run.
      name: "module:object" of the task, for error messages.
      placement: Devices of the run, or an assumed number of equal devices; by default one.
      progress: Function that is called with each line of progress text.
      clock: Function that returns seconds.

    Raises:
      ValueError: if `dpsgd.run` would refuse the run before it reads the rows.
    """
    num_devices = placement if isinstance(placement, int) else 1
    devices = None if isinstance(placement, int) else placement
    job = plan_run(spec, task, name, Execution(devices, Stages(), progress), dry=True)
    sampler = job.mechanism.sampler
    progress("compiling the program that trains")
    program = job if num_devices == 1 else _share(job, num_devices, sampler.num_examples)
    memory = program.programs()[0].memory_analysis()
    progress("timing steps on generated rows")
    if num_devices > 1 or isinstance(job.task, Resized):
        few_rows = max(_TIMED_ROWS, 8 * sampler.padded_batch_size // num_devices)
        share = _share(job, num_devices, min(few_rows, sampler.num_examples))
        timing = time_steps(share, clock=clock)
        timing = timing._replace(epoch=timing.step * sampler.steps_per_epoch)
    else:
        flush_every = getattr(job.spec.tables, "flush_every", None)
        timing = time_steps(job, flush_every=flush_every, clock=clock)
    seconds = timing.first + timing.epoch * sampler.num_steps / sampler.steps_per_epoch
    resident_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return DryRun(
        steps=sampler.num_steps,
        expected_batch_size=sampler.expected_batch_size,
        padded_batch_size=sampler.padded_batch_size,
        num_devices=num_devices,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(job.params)),
        program_bytes=resident_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        timing=timing,
        hours=seconds / 3600,
        guarantee=job.guarantee,
    )
