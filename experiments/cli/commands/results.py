"""`dpsgd sweep`, `results` and `report`: many runs and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dpsgd
from dpsgd.core.cost import cost
from dpsgd.files import write_atomically
from dpsgd.runs.result import origin
from dpsgd.selection.candidates import Candidates
from experiments.cli.commands.runs import show
from experiments.cli.console import Console
from experiments.cli.questions import results as questions
from experiments.figures.drawing import save
from experiments.results import listings, views
from experiments.results.draw import draw, draw_rows
from experiments.results.points import Headline
from experiments.results.table import read
from experiments.sweeps import engine, private
from experiments.sweeps.config import Sweep, file_of, import_parts, with_insecure_seed
from experiments.sweeps.summary import Summary

DEVICES = (1, 2, 4, 8, 64)
"""Numbers of devices for which `--dry-run` prints the hours."""


def sweep(config: questions.Sweep) -> None:
    """Carries out a sweep file's runs, or forecasts their hours."""
    if config.private:
        return _select(config)
    file = file_of(config.config)
    content = file.read_bytes()
    import_parts(content, str(file))
    if config.insecure_seed is not None:
        content = with_insecure_seed(content, config.insecure_seed, str(file))
    parsed = Sweep.parse(content, str(file)).showing(config.headline, config.better)
    with Console() as console:
        console.progress("starting")
        arguments: dict[str, Any] = {"where": str(config.config), "workers": config.workers}
        arguments["progress"] = console.progress
        if config.out is None or config.dry_run:
            return _show_forecast(console, *engine.forecast(parsed, config.data, **arguments))
        summary = engine.run_sweep(parsed, config.data, config.out, **arguments)
        show_sweep(console, summary, config.out, content)


def show_sweep(console: Console, summary: Summary, out: Path, content: bytes) -> None:
    """Writes and prints the summary of a finished sweep.

    Args:
      console: Console to print on.
      summary: Summary of the sweep.
      out: Folder of the sweep.
      content: Content of the sweep's file.
    """
    written = engine.write(summary, out, content)
    console.line(summary.setting)
    for view in summary.views:
        if view.title:
            console.line(f"\n{view.title}")
        show_view(console, view)
    console.line("")
    for statement in summary.statements:
        console.line(f"- {statement}")
    console.line(f"written: {', '.join(map(str, written))}")


def _show_forecast(console: Console, forecasts: Any, device: str) -> None:
    """Prints the runs, steps and hours of a sweep's parts.

    Args:
      console: Console to print on.
      forecasts: Forecasts by `experiments.sweeps.engine.forecast`, one a panel.
      device: Device that was timed.
    """
    header = ["", "runs", "steps", *(f"hours on {count}" for count in DEVICES)]
    sizes = [
        [forecast.title, f"{forecast.runs:,}", f"{forecast.steps:,}"] for forecast in forecasts
    ]
    hours = [[f"{forecast.hours(count):.3g}" for count in DEVICES] for forecast in forecasts]
    console.table(header, [row + columns for row, columns in zip(sizes, hours, strict=True)])
    console.line(
        f"Hours of training on this number of devices like the timed one, {device}, one run per "
        "device at a time, without compiling, audits and evaluations."
    )


def show_view(console: Console, view: views.View) -> None:
    """Prints a view's tables and its best setting.

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
    file_name = str(config.config)
    content = file_of(config.config).read_bytes()
    import_parts(content, file_name)
    search = private.PrivateSweep.parse(content, file_name)
    with Console(timed=False) as console:  # how long it takes tells how many trials there are
        console.progress("starting")
        task = engine.task_of(search, config.data, file_name)
        score, better = search.scored(task, file_name)
        specs, name = tuple(search.candidates(file_name)), search.task_name
        if config.dry_run:
            candidates = Candidates(task, name, specs, score, better, search.count)
            return _show_selection(console, candidates)
        assert config.out is not None, "checked"
        options: Any = {"score": score, "better": better, "count": search.count, "name": name}
        record = dpsgd.select(task, specs, config.out, progress=console.progress, **options)
        write_atomically(config.out / engine.ASKED, lambda file: file.write(content))
        show(console, config.out, record)


def _show_selection(console: Console, candidates: Candidates) -> None:
    """Prints the trials, mean hours and guarantee of a private selection."""
    console.progress("finding the noise for the target epsilon")
    selection = candidates.planned({})
    console.progress("timing steps on generated rows")
    forecasts, device = engine.forecast_selection(candidates, selection)
    steps = sorted({forecast.steps for forecast in forecasts})
    hours = [forecast.hours(1) for forecast in forecasts]
    mean = candidates.count.mean
    guarantee = cost([selection.trials()], selection.candidates[0].delta)
    for line in (
        f"candidates: {len(hours):,}, each equally likely to be a trial",
        f"trials: {mean:g} on average; their number is random and stays secret",
        f"steps of a trial: {' to '.join(f'{n:,}' for n in dict.fromkeys((steps[0], steps[-1])))}",
        f"time of a trial: {min(hours):.3g} to {max(hours):.3g} hours of steps, measured on "
        f"generated rows ({device})",
        f"time of all trials: {mean * sum(hours) / len(hours):.3g} hours on average, one after "
        "another, without compiling, audits and evaluations",
        f"guarantee: {guarantee.sentence()}",
        "nothing was trained or written, and no private row was read",
    ):
        console.line(line)


def results(config: questions.Results) -> None:
    """Prints, writes and draws the table of finished runs."""
    if config.x is None and config.plot is not None:
        return _draw_sweeps(config, config.plot)
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        table, unfinished = read(config.runs)
        for path in unfinished:
            console.line(f"note: {path} is not finished, and left out")
        if config.x is None:
            for task_table in listings.by_task(table):
                headline = task_table.headline(config.y, config.better)
                console.table(*listings.overview(task_table, [headline.name, *config.columns]))
                if caption := listings.caption(task_table):
                    console.line(caption)
        else:
            is_setting = config.y in table.frame.columns and config.y not in table.metrics
            chosen = Headline if is_setting else table.headline
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
                    f"{path} is no folder of a sweep: to draw runs, give --plot an axis by --x"
                )
        summaries = [engine.read(path).showing(config.y, config.better) for path in config.runs]
        save(draw_rows([(summary.title, summary.views) for summary in summaries]), plot)
        console.line(f"drawn: {plot}")


def report(config: questions.Report) -> None:
    """Writes an HTML page about finished runs and sweeps."""
    from experiments.results import clicks, page, render  # tables alone need no Markdown

    folder = config.markdown
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        rows = None
        if config.data is not None:
            split = config.split if config.data.is_dir() else None
            rows = clicks.Rows(config.data, split, config.by)
        heading = config.title, config.headline, config.better
        built = page.page(
            config.runs, *heading, origin=origin("Written"), rows=rows, against=config.against
        )
        files = {config.out: render.document(built).encode()}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files[folder / questions.MARKDOWN] = built.markdown.encode()
            files |= {folder / name: content for name, content in built.figures.items()}
        for path, content in files.items():
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        markdown = f"; Markdown: {folder / questions.MARKDOWN}" if folder else ""
        console.line(f"report: {config.out}{markdown}")
