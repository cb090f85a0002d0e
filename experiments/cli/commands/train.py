"""`dpsgd train`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dpsgd
from dpsgd.runs import report
from dpsgd.runs.dry_run import dry_run
from dpsgd.runs.spec import RunSpec
from experiments import cli
from experiments.cli.console import Console, sized
from experiments.cli.devices import placement_of, together
from experiments.cli.questions.runs import Train
from experiments.cli.writers import writer


def run(asked: Train) -> None:
    """Runs `dpsgd train`."""
    spec, task = asked.spec(), asked.subject
    with (
        together(asked.devices, asked.out) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        how: dict[str, Any] = {"name": asked.task, "placement": placement_of(asked.devices)}
        if asked.dry_run:
            for line in facts(spec, task, progress=console.progress, **how):
                console.line(line)
            return
        how |= {
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
    header, rows, caption = report.comparison([record])
    console.table(header, rows)
    console.line(caption)
    if diverged := report.divergence(record):
        console.line(f"note: {diverged}")
    console.line(record["guarantee"])
    console.line(f"audit: {record['audit']}")
    console.line(f"report: {path / 'report.md'}")
