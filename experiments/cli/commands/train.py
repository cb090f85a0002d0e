"""`dpsgd train`: one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.files import check_writable
from dpsgd.runs.spec import RunSpec, known_options
from dpsgd.runs.support import check
from experiments import cli
from experiments.cli import tasks
from experiments.cli.console import Console, sized
from experiments.cli.devices import Devices, Processes
from experiments.cli.options import naming, run_options, spec_of
from experiments.cli.writers import LogTo, writer
from samplers.settings import SamplerSettings


@dataclass(frozen=True, kw_only=True)
class Train(tasks.OfTask):
    """Train a task with differential privacy and write a run directory.

    `dpsgd train sampler:NAME --help` adds the settings of that sampler, `--task NAME` those of that
    task. Name a sampler of your own sampler:module:Class.

    Batch size, epochs, clipping norm and learning rate that you omit are chosen before the run from
    the number of rows and the guarantee, and recorded; the rule was found on public data. Choosing
    them by results on private rows costs privacy that the guarantee does not cover.
    """

    sampler: SamplerSettings
    """Sampler that draws the batches and determines the guarantee. balls-and-bins and poisson need
    the least noise."""
    out: Path
    """Run directory to create; must not exist."""
    begin: bool = False
    """Create the run directory and take no step, so that `dpsgd batches` can draw batches ahead;
    `dpsgd resume` then trains."""
    dry_run: bool = False
    """Print steps, padding, parameters, memory, measured seconds per step, hours and the guarantee.
    Uses generated rows; nothing is trained or written, and no private row is read."""
    log_to: LogTo = None
    """Also send the rows of training_log.csv (steps, epsilon so far, examples per second) to this
    program."""


def command(words: Sequence[str]) -> type:
    """Returns what can be asked of the task and the sampler that words name."""
    options = run_options(*(name for name in known_options() if name != "sampler"))
    groups = {"devices": Devices, "processes": Processes}
    return tasks.command(Train, words, options=options, groups=groups)


def run(asked: Any) -> None:
    """Runs `dpsgd train`."""
    spec = spec_of(asked)
    with naming(asked):
        task = tasks.task_of(asked)
        if not asked.dry_run:
            check_writable(asked.out)
        check(spec, getattr(task, "num_examples", None))
    how: dict[str, Any]
    with (
        asked.processes.together(asked.out) as processes,
        Console(quiet=not processes.first) as console,
        naming(asked),
    ):
        console.progress("starting")
        if asked.dry_run:
            how = {"name": asked.task, "placement": asked.devices.placement()}
            for line in facts(spec, task, progress=console.progress, **how):
                console.line(line)
            return
        import dpsgd

        how = {
            "name": asked.task,
            "placement": asked.devices.placement(),
            "started": cli.started,
            "progress": console.tell,
            "log": asked.log_to and writer(asked.log_to, asked.out),
        }
        if asked.begin:
            dpsgd.Run.create(task, spec, asked.out, **how)
            console.line(f"begun: dpsgd resume {asked.out}")
        else:
            show(console, asked.out, dpsgd.run(task, spec, asked.out, **how))


def facts(spec: RunSpec, task: Any, **how: Any) -> list[str]:
    """Returns the facts about a run that a dry run prints, one a line.

    Args:
      spec: Configuration of the run.
      task: Task that the run would train.
      **how: Further arguments of `dpsgd.runs.dry_run.dry_run`.
    """
    from dpsgd.runs.dry_run import dry_run

    found = dry_run(task, spec, **how)
    padded = f"padded to {found.padded_batch_size:,} places"
    return [
        f"steps: {found.steps:,}",
        f"batch: {found.expected_batch_size:,.0f} examples expected, {padded}",
        f"parameters: {found.parameters:,}",
        f"memory of the program: {sized(found.program_bytes)} on each device",
        f"time of a step: {found.timing.step:.3g} s, measured on generated rows",
        f"time of all steps: {found.hours:.3g} hours",
        f"guarantee: {found.guarantee.sentence()}",
        "nothing was trained or written, and no private row was read",
    ]


def show(console: Console, path: Path, record: dict[str, Any]) -> None:
    """Says what the finished run in `path` came to."""
    from dpsgd.runs import report

    header, rows, caption = report.comparison([record])
    console.table(header, rows)
    console.line(caption)
    if diverged := report.divergence(record):
        console.line(f"note: {diverged}")
    console.line(record["guarantee"])
    console.line(f"audit: {record['audit']}")
    console.line(f"report: {path / 'report.md'}")
