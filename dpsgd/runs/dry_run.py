"""Describes a run without training it: sizes, memory, measured time and guarantee."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from dpsgd.core.guarantee import Guarantee
from dpsgd.engine.placement import Placement
from dpsgd.runs.plan import certified, settled_task
from dpsgd.runs.resolve import resolve
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import Task
from dpsgd.runs.timing import Timing, time_steps


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
