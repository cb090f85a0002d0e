"""`dpsgd results`: the table of finished runs, in a terminal, in a file or as a figure."""

from __future__ import annotations

from pathlib import Path

from experiments.cli.commands.sweep import show_view
from experiments.cli.console import Console
from experiments.cli.questions.results import Results
from experiments.figures.drawing import save
from experiments.results import listings, views
from experiments.results.draw import draw, draw_rows
from experiments.results.metrics import Headline
from experiments.results.table import read
from experiments.sweeps import engine


def run(config: Results) -> None:
    """Runs `dpsgd results`."""
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
            column = config.y in table.frame.columns and config.y not in table.metrics
            headline = (
                Headline(str(config.y), config.better)
                if column
                else Headline.choose(table, config.y, config.better)
            )
            view = views.View(table, config.x, headline, by=config.by or None)
            show_view(console, view)
            if config.plot is not None:
                save(draw([view]), config.plot)
                console.line(f"drawn: {config.plot}")
        if config.out is not None:
            table.write(config.out)
            console.line(f"written: {config.out}")


def _draw_sweeps(config: Results, plot: Path) -> None:
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
