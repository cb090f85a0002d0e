"""`dpsgd sweep`, `results` and `report`: many runs, and the table that they make."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dpsgd
from dpsgd.files import write_atomically
from dpsgd.runs.environment import origin
from experiments.cli.commands.runs import show
from experiments.cli.console import Console
from experiments.cli.questions import results as questions
from experiments.figures.drawing import save
from experiments.results import listings, views
from experiments.results.draw import draw, draw_rows
from experiments.results.metrics import Headline
from experiments.results.table import read
from experiments.sweeps import engine, private
from experiments.sweeps.config import Sweep, file_of

DEVICES = (1, 2, 4, 8, 64)
"""Numbers of devices for which `--dry-run` prints the hours."""


def sweep(config: questions.Sweep) -> None:
    """Carries out the runs of a file; a dry run prints how long they take."""
    if config.private:
        return _select(config)
    file = file_of(config.config)
    asked = file.read_bytes()
    parsed = Sweep.parse(asked, str(file))
    with Console() as console:
        console.progress("starting")
        how: dict[str, Any] = {"where": str(config.config), "workers": config.workers}
        how["progress"] = console.progress
        if config.out is None or config.dry_run:
            return _show_forecast(console, *engine.forecast(parsed, config.data, **how))
        summary = engine.run_sweep(parsed, config.data, config.out, **how)
        summary = summary.showing(config.headline, config.better)
        written = engine.write(summary, config.out, asked)
        console.line(summary.setting)
        for view in summary.views:
            if view.title:
                console.line(f"\n{view.title}")
            show_view(console, view)
        console.line("")
        for statement in summary.statements:
            console.line(f"- {statement}")
        console.line(f"written: {', '.join(map(str, written))}")


def _show_forecast(console: Console, parts: Any, device: str) -> None:
    """Prints the runs, steps and hours of a sweep's parts.

    Args:
      console: Console to print on.
      parts: Forecasts by `experiments.sweeps.engine.forecast`.
      device: Device that was timed.
    """
    header = ["", "runs", "steps", *(f"hours on {count}" for count in DEVICES)]
    sizes = [[part.title, f"{part.runs:,}", f"{part.steps:,}"] for part in parts]
    hours = [[f"{part.hours(count):.3g}" for count in DEVICES] for part in parts]
    console.table(header, [row + more for row, more in zip(sizes, hours, strict=True)])
    console.line(
        f"Hours of training on this number of devices like the timed one, {device}, one run per "
        "device at a time, without compiling, audits and evaluations."
    )


def show_view(console: Console, view: views.View) -> None:
    """Prints the tables of a view of runs, and its best line.

    Args:
      console: Console to print on.
      view: View of a table of runs.
    """
    for title, table in view.tables().items():
        console.line(f"\n{title}")
        console.table(*table)
    for verdict in view.verdicts():
        console.line(f"best {verdict}")


def _select(config: questions.Sweep) -> None:
    """Runs `dpsgd sweep --private`."""
    assert config.out is not None, "checked"
    where = str(config.config)
    asked = file_of(config.config).read_bytes()
    search = private.PrivateSweep.parse(asked, where)
    with Console(timed=False) as console:  # how long it takes tells how many trials there are
        console.progress("starting")
        task = engine.task_of(search, config.data, where)
        score, better = search.scored(task, where)
        record = dpsgd.select(
            task,
            search.candidates(where),
            config.out,
            score=score,
            better=better,
            count=search.count,
            name=search.task_name,
            progress=console.progress,
        )
        write_atomically(config.out / engine.ASKED, lambda file: file.write(asked))
        show(console, config.out, record)


def results(config: questions.Results) -> None:
    """Prints the table of finished runs, or one column over another; writes and draws it."""
    if config.x is None and config.plot is not None:
        return _draw_sweeps(config, config.plot)
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        table, unfinished = read(config.runs)
        for path in unfinished:
            console.line(f"note: {path} is not finished, and left out")
        if config.x is None:
            for part in listings.by_task(table):
                headline = Headline.choose(part, config.y, config.better)
                console.table(*listings.overview(part, [headline.name, *config.columns]))
                console.line(listings.caption(part))
        else:
            is_setting = config.y in table.frame.columns and config.y not in table.metrics
            chosen = Headline if is_setting else partial(Headline.choose, table)
            headline = chosen(config.y, config.better)  # type: ignore[arg-type]
            view = views.View(table, config.x, headline, by=config.by or None)
            show_view(console, view)
            if config.plot is not None:
                save(draw([view]), config.plot)
                console.line(f"drawn: {config.plot}")
        if config.out is not None:
            table.write(config.out)
            console.line(f"written: {config.out}")


def _draw_sweeps(config: questions.Results, plot: Path) -> None:
    """Draws the panels of finished sweeps into one figure."""
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        for path in config.runs:
            if not engine.is_sweep(path):
                raise ValueError(
                    f"{path} is no sweep with panels of its own: --plot needs --x, its axis"
                )
        found = [engine.read(path).showing(config.y, config.better) for path in config.runs]
        save(draw_rows([(summary.title, summary.views) for summary in found]), plot)
        console.line(f"drawn: {plot}")


def report(config: questions.Report) -> None:
    """Writes a page about finished runs and sweeps, and its Markdown."""
    from experiments.results import clicks, page, render  # tables alone need no Markdown

    folder = config.markdown
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        rows = None
        if config.data is not None:
            split = config.split if config.data.is_dir() else None
            rows = clicks.Rows(config.data, split, config.by)
        shown = config.title, config.headline, config.better
        made = page.page(
            config.runs, *shown, origin=origin("Written"), rows=rows, against=config.against
        )
        files = {config.out: render.document(made).encode()}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files[folder / questions.MARKDOWN] = made.markdown.encode()
            files |= {folder / name: content for name, content in made.figures.items()}
        for path, content in files.items():
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        more = f"; Markdown: {folder / questions.MARKDOWN}" if folder else ""
        console.line(f"report: {config.out}{more}")
