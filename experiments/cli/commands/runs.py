"""`dpsgd train`, `batches` and `resume`: one run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dpsgd
from dpsgd.engine.batch_files import draw_here
from dpsgd.engine.placement import Placement
from dpsgd.runs import report
from dpsgd.runs.dry_run import Resized, dry_run
from experiments import cli
from experiments.cli.console import Console, counted, sized
from experiments.cli.devices import placement_of, together
from experiments.cli.options import look_in_the_current_folder
from experiments.cli.questions.directories import Batches, Resume
from experiments.cli.questions.runs import Train
from experiments.tasks import task_of
from samplers import UnitData


@contextmanager
def _trained(question: Train | Resume, out: Path) -> Iterator[tuple[Console, dict[str, Any]]]:
    """Yields a terminal, and the settings that runs and resumed runs share."""
    with (
        together(question.devices, out) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        log = question.log_to and out / question.log_to
        placement = placement_of(question.devices)
        yield console, {"placement": placement, "started": cli.started, "log": log}


def train(question: Train) -> None:
    """Trains a task, or prints facts about a run."""
    if question.dry_run:
        return _show_facts(question)
    task = question.subject
    assert question.out is not None, "checked"
    with _trained(question, question.out) as (console, arguments):
        arguments |= {"name": question.task, "progress": console.tell}
        if question.begin:
            dpsgd.Run.create(task, question.spec, question.out, **arguments)
            console.line(f"created; to train it: dpsgd resume {question.out}")
        else:
            show(console, question.out, dpsgd.run(task, question.spec, question.out, **arguments))


def _show_facts(question: Train) -> None:
    """Prints facts about a run, with the assumed devices and rows of a dry run."""
    task, num_examples = question.subject, question.num_examples
    placement: Placement | int | None
    if num_examples is not None:
        if not question.lacks_data and isinstance(task.columns(), UnitData):
            raise ValueError(
                "--num-examples needs rows that are examples, and this task groups rows into "
                "units; leave it out"
            )
        task = Resized(task, num_examples)
    with (
        together(question.devices, question.out or Path()) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        count = question.devices.num_devices or 1
        if processes.count == 1 and count > len(Placement.default().devices):
            placement = count
        else:
            placement = placement_of(question.devices)
        options: Any = {"placement": placement, "progress": console.tell}
        for line in facts(dry_run(task, question.spec, name=question.task, **options)):
            console.line(line)


def facts(plan: Any) -> list[str]:
    """Returns the lines that a dry run prints.

    Args:
      plan: Result of `dpsgd.runs.dry_run.dry_run`.
    """
    padded = f"padded to {plan.padded_batch_size:,} places"
    measured = "measured on generated rows"
    if (count := plan.num_devices) > 1:
        padded += f", {-(-plan.padded_batch_size // count):,} on each of {count:,} devices"
        measured += ": one device's share, without the exchange between devices"
    return [
        f"steps: {plan.steps:,}",
        f"batch: {plan.expected_batch_size:,.0f} examples expected, {padded}",
        f"parameters: {plan.parameters:,}",
        f"memory of the program: {sized(plan.program_bytes)} on each device",
        f"time of a step: {plan.timing.step:.3g} s, {measured}",
        f"time of all steps: {plan.hours:.3g} hours",
        f"guarantee: {plan.guarantee.sentence()}",
        "nothing was trained or written; of private rows only counts were used",
    ]


def resume(question: Resume) -> None:
    """Resumes a run from its last checkpoint."""
    with _trained(question, question.run) as (console, how):
        look_in_the_current_folder()
        task = task_of(question.run, data=question.data)
        record = dpsgd.resume(question.run, task, progress=console.tell, **how)
        show(console, question.run, record)


def batches(question: Batches) -> None:
    """Draws a run's batches ahead and writes them to files."""
    with Console() as console:
        console.progress("starting")
        look_in_the_current_folder()
        task = task_of(question.run, data=question.data)
        write: Any = draw_here
        if question.pipeline.beam:
            draws = importlib.import_module("experiments.beam.draws")
            write = draws.drawn_by(question.pipeline.on_runner().write_batches, task.columns)
        place = placement_of(question.devices)
        run = dpsgd.Run.open(question.run, task, placement=place, progress=console.tell)
        files = run.draw(question.out, write)
        if files is None:
            console.line(f"the run is finished and needs no batches: dpsgd report {question.run}")
        else:
            console.line(f"{counted(files, 'file')} in {question.out}; dpsgd resume {question.run}")


def show(console: Console, path: Path, record: dict[str, Any]) -> None:
    """Prints a finished run's metrics, guarantee and audit.

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
