"""`dpsgd sweep`: many runs from one file, and what they show together."""

from __future__ import annotations

from typing import Any

import dpsgd
from dpsgd.files import write_atomically
from experiments.cli.commands.train import show
from experiments.cli.console import Console
from experiments.cli.questions import results
from experiments.results.views import View
from experiments.sweeps import private
from experiments.sweeps.config import Sweep, file_of
from experiments.sweeps.engine import ASKED, forecast, run_sweep, task_of, write

DEVICES = (1, 2, 4, 8, 64)
"""Counts for which `--dry-run` says the hours."""


def run(config: results.Sweep) -> None:
    """Runs `dpsgd sweep`."""
    if config.private:
        return _select(config)
    file = file_of(config.config)
    asked = file.read_bytes()
    sweep = Sweep.parse(asked, str(file))
    if config.out is None or config.dry_run:
        with Console() as console:
            return _forecast(config, sweep, console)
    with Console() as console:
        console.progress("starting")
        summary = run_sweep(
            sweep,
            config.data,
            config.out,
            where=str(config.config),
            workers=config.workers,
            progress=console.progress,
        ).showing(config.headline, config.better)
        written = write(summary, config.out, asked)
        console.line(summary.setting)
        for view in summary.views:
            if view.title:
                console.line(f"\n{view.title}")
            show_view(console, view)
        console.line("")
        for statement in summary.statements:
            console.line(f"- {statement}")
        console.line(f"written: {', '.join(map(str, written))}")


def _forecast(config: results.Sweep, sweep: Sweep, console: Console) -> None:
    """Prints what a sweep is going to take."""
    console.progress("starting")
    where, workers = str(config.config), config.workers
    how: dict[str, Any] = {"where": where, "workers": workers, "progress": console.progress}
    found, device = forecast(sweep, config.data, **how)
    header = ["", "runs", "steps", *(f"hours on {count}" for count in DEVICES)]
    console.table(
        header,
        [
            [part.title, f"{part.runs:,}", f"{part.steps:,}"]
            + [f"{part.hours(count):.3g}" for count in DEVICES]
            for part in found
        ],
    )
    console.line(
        f"Hours of training on so many devices like the one that was timed, {device}, each with a "
        "run at a time; compiling, audits and evaluations come on top."
    )


def show_view(console: Console, view: View) -> None:
    """Prints the tables of a view of runs, and which line is best."""
    for title, table in view.tables().items():
        console.line(f"\n{title}")
        console.table(*table)
    for verdict in view.verdicts():
        console.line(f"best {verdict}")


def _select(config: results.Sweep) -> None:
    """Runs `dpsgd sweep --private`."""
    assert config.out is not None, "checked"
    where = str(config.config)
    asked = file_of(config.config, private.SHIPPED).read_bytes()
    sweep = private.PrivateSweep.parse(asked, where)
    with Console(timed=False) as console:  # how long it takes tells how many trials there are
        console.progress("starting")
        task = task_of(sweep, config.data, where)
        score, better = sweep.scored(task, where)
        record = dpsgd.select(
            task,
            sweep.candidates(where),
            config.out,
            score=score,
            better=better,
            count=sweep.count,
            name=sweep.task_name,
            progress=console.progress,
        )
        write_atomically(config.out / ASKED, lambda file: file.write(asked))
        show(console, config.out, record)
