"""`dpsgd train`, `batches` and `resume`: one run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dpsgd
from dpsgd.engine.batch_files import draw_here
from dpsgd.runs import report
from dpsgd.runs.dry_run import dry_run
from experiments import cli
from experiments.cli.console import Console, counted, sized
from experiments.cli.devices import placement_of, together
from experiments.cli.options import look_in_the_current_folder
from experiments.cli.questions.directories import Batches, Resume
from experiments.cli.questions.runs import Train
from experiments.cli.writers import writer
from experiments.tasks import task_of


@contextmanager
def _trained(asked: Train | Resume, out: Path) -> Iterator[tuple[Console, dict[str, Any]]]:
    """Yields a terminal, and the settings that runs and resumed runs share."""
    with (
        together(asked.devices, out) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        log = asked.log_to and writer(asked.log_to, out)
        placement = placement_of(asked.devices)
        yield console, {"placement": placement, "started": cli.started, "log": log}


def train(asked: Train) -> None:
    """Trains a task; a dry run prints facts, one a line."""
    task = asked.subject
    with _trained(asked, asked.out) as (console, how):
        if asked.dry_run:
            shared = {"placement": how["placement"], "progress": console.progress}
            for line in facts(dry_run(task, asked.spec, name=asked.task, **shared)):
                console.line(line)
            return
        how |= {"name": asked.task, "progress": console.tell}
        if asked.begin:
            dpsgd.Run.create(task, asked.spec, asked.out, **how)
            console.line(f"begun: dpsgd resume {asked.out}")
        else:
            show(console, asked.out, dpsgd.run(task, asked.spec, asked.out, **how))


def facts(plan: Any) -> list[str]:
    """Returns the facts about a run that a dry run prints, one a line.

    Args:
      plan: Result of `dpsgd.runs.dry_run.dry_run`.
    """
    padded = f"padded to {plan.padded_batch_size:,} places"
    return [
        f"steps: {plan.steps:,}",
        f"batch: {plan.expected_batch_size:,.0f} examples expected, {padded}",
        f"parameters: {plan.parameters:,}",
        f"memory of the program: {sized(plan.program_bytes)} on each device",
        f"time of a step: {plan.timing.step:.3g} s, measured on generated rows",
        f"time of all steps: {plan.hours:.3g} hours",
        f"guarantee: {plan.guarantee.sentence()}",
        "nothing was trained or written, and no private row was read",
    ]


def resume(asked: Resume) -> None:
    """Resumes a run from its last checkpoint."""
    with _trained(asked, asked.run) as (console, how):
        look_in_the_current_folder()
        task = task_of(asked.run, data=asked.data)
        record = dpsgd.resume(asked.run, task, progress=console.progress, **how)
        show(console, asked.run, record)


def batches(asked: Batches) -> None:
    """Draws the batches of a run ahead, and writes them to a folder."""
    with Console() as console:
        console.progress("starting")
        look_in_the_current_folder()
        task = task_of(asked.run, data=asked.data)
        write: Any = draw_here
        if asked.pipeline.beam:
            draws = importlib.import_module("experiments.beam.draws")
            write = draws.drawn_by(asked.pipeline.on_runner().write_batches, task.columns)
        place = placement_of(asked.devices)
        begun = dpsgd.Run.open(asked.run, task, placement=place, progress=console.progress)
        files = begun.draw(asked.out, write)
        if files is None:
            console.line(f"the run is finished, and needs no batches: dpsgd report {asked.run}")
        else:
            console.line(f"{counted(files, 'file')} in {asked.out}; dpsgd resume {asked.run}")


def show(console: Console, path: Path, record: dict[str, Any]) -> None:
    """Prints the metrics, the guarantee and the audit of a finished run.

    Args:
      console: Console to print on.
      path: Run directory.
      record: Record of the run, as in its report.json.
    """
    header, rows, caption = report.comparison([record])
    console.table(header, rows)
    console.line(caption)
    if diverged := report.divergence(record):
        console.line(f"note: {diverged}")
    console.line(record["guarantee"])
    console.line(f"audit: {record['audit']}")
    console.line(f"report: {path / 'report.md'}")
