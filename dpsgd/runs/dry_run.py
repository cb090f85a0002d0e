"""Describes a run without training it: sizes, memory, measured time and guarantee."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.guarantee import Guarantee
from dpsgd.engine.loop import train_blocks
from dpsgd.engine.placement import Placement
from dpsgd.runs.job import Job, Training
from dpsgd.runs.plan import Rows, certified, settled_task
from dpsgd.runs.resolve import resolve, with_any_noise
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import Task

PyTree = Any
Clock = Callable[[], float]

_ROWS = 4096
"""Most rows that are generated to be timed; there are as many copies as it takes."""

_LEAST_SECONDS = 1.0
"""For which steps are timed, unless all of the run take less."""

_MOST_STEPS = 1024
"""That are timed at all."""


class Timing(NamedTuple):
    """Seconds of an epoch, of one of its steps, and of the first step with its compilation."""

    epoch: float
    step: float
    first: float


def time_steps(
    job: Training, *, flush_every: int | None = None, clock: Clock = time.perf_counter
) -> Timing:
    """Returns the time of one epoch on this machine, of the compiled program of a run.

    Nothing private is read: rows are synthetic, of the shapes of the run's own. Any noise serves,
    as the program is the same.
    """
    algorithm, mechanism, state, layout = job.algorithm, job.mechanism, job.start(), job.layout
    sampler = mechanism.sampler
    some = job.synthetic(min(sampler.num_examples, _ROWS))
    rows = jax.tree.map(lambda shape, part: _filled(shape, part, layout.streamed), job.data, some)

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
    once, steps, most = timed(1), 4, min(_MOST_STEPS, sampler.num_steps - 1)
    if not most:
        return Timing(once, once, first)
    while True:
        steps = min(steps, most)
        more = timed(1 + steps)
        if steps == most or more - once >= _LEAST_SECONDS:
            break
        steps *= 4
    a_step = (more - once) / steps if more > once else more / (1 + steps)
    # What precedes the first step, such as the drawing of an epoch, is counted for each; and what
    # follows the last one, which is a flush of lazy tables, for each of these, if there are more.
    times = max(1.0, sampler.steps_per_epoch / (flush_every or math.inf))
    epoch = sampler.steps_per_epoch * a_step + times * max(0.0, once - a_step)
    return Timing(epoch, a_step, first)


def _filled(shape: Any, part: Any, streamed: bool) -> np.ndarray:
    """Returns rows of a shape made of some: all of them copies, or zeros where not all are stored.

    Rows that are streamed may be more than there is memory for; zeros take none.
    """
    part = np.asarray(part, shape.dtype)
    if not streamed:
        return np.resize(part, shape.shape)
    column = np.zeros(shape.shape, shape.dtype)
    column[: len(part)] = part
    return column


def timed(task: Task, spec: RunSpec, rows: Rows, placement: Placement | None = None) -> Timing:
    """Returns how long an epoch of a run takes here, by a few steps on generated rows.

    The noise of the spec does not matter; of the rows the shapes are read.
    """
    job = Job.of(task, with_any_noise(spec, rows[1]), rows=rows, placement=placement)
    return time_steps(job, flush_every=getattr(spec.tables, "flush_every", None))


class DryRun(NamedTuple):
    """The facts about a run that are known before it reads a row."""

    steps: int
    """Steps of the sampler."""
    expected_batch_size: float
    """Expected examples in a batch."""
    padded_batch_size: int
    """Places of a batch in the compiled program; a batch may take several passes of them."""
    parameters: int
    """Numbers in all parameters."""
    program_bytes: int
    """Bytes that the program of a block of steps needs on a device, rows included."""
    timing: Timing
    """Seconds measured on generated rows."""
    hours: float
    """Predicted hours of all steps, with compilation."""
    guarantee: Guarantee
    """Guarantee of the whole run."""


def dry_run(
    task: Task,
    spec: RunSpec,
    *,
    name: str | None = None,
    placement: Placement | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> DryRun:
    """Measures a run on generated rows, and computes its guarantee.

    Of the task's rows only their number, shapes and dtypes are read. Nothing is written.

    Args:
      task: Task that the run would train.
      spec: Configuration of the run.
      name: "module:object" of the task, for error messages.
      placement: Devices of the run; by default one.
      progress: Function that is called with one line of text.

    Raises:
      ValueError: for a run that `dpsgd.run` would refuse before it reads the rows.
    """
    asked = settled_task(spec, task, name, progress)
    job = asked.job(resolve(asked.spec, asked.task, asked.rows, progress), placement)
    guarantee = certified(job)
    progress("compiling the program that trains")
    memory = job.programs()[0].memory_analysis()
    progress("timing steps on generated rows")
    timing = time_steps(job, flush_every=getattr(job.spec.tables, "flush_every", None))
    sampler = job.mechanism.sampler
    seconds = timing.first + timing.epoch * sampler.num_steps / sampler.steps_per_epoch
    kept = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return DryRun(
        steps=sampler.num_steps,
        expected_batch_size=sampler.expected_batch_size,
        padded_batch_size=sampler.padded_batch_size,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(job.params)),
        program_bytes=kept + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        timing=timing,
        hours=seconds / 3600,
        guarantee=guarantee,
    )
