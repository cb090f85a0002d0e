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
    """Train a task privately and write a run directory with the guarantee it earned.

    `dpsgd train sampler:NAME --help` adds the settings of that sampler, and `--task NAME` those of
    that task. A sampler of your own is named likewise, sampler:module:name.

    Of batch size, epochs, clipping norm and learning rate, what is left out is chosen before the
    run for the number of rows and the guarantee that is wanted, and recorded. The rule for clicks
    was found on the validation rows of a public data set: a choice by private rows of your own
    costs privacy, and the guarantee of a run does not cover that.
    """

    sampler: SamplerSettings
    """How batches are drawn: the guarantee goes by it. balls-and-bins and poisson need least
    noise."""
    out: Path
    """Run directory to create; an existing one is never touched."""
    begin: bool = False
    """Make the run directory, and take no step: `dpsgd batches` can draw the run's batches then,
    and `dpsgd resume` trains."""
    dry_run: bool = False
    """Print steps, padding, parameters, memory, seconds a step measured on generated rows, hours
    and the guarantee. Nothing is trained or written, and no private row is read."""
    log_to: LogTo = None
    """Also write steps, epsilon so far and examples a second, which training_log.csv in the run
    directory has, to this program."""


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
