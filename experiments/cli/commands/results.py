"""`dpsgd results`: the table of finished runs, in a terminal, in a file or as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from experiments.cli import outputs
from experiments.cli.console import Console

TABLES = (".csv", ".parquet")
"""Endings of the file of a table, which name its format."""


@dataclass(frozen=True)
class ResultsConfig:
    """Print, export and draw the table of finished runs.

    A row is a run; columns are its settings, its guarantee, its metrics, its times and its digests.
    With --x and --y, one column is shown over another, as mean and standard error over the runs
    that are alike in all other settings, or in those that --by names. Each guarantee is that of its
    own run: a choice of one of several by what is shown here is covered by none.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, folders of sweeps, folders that contain these, or .parquet tables that --out
    wrote."""
    out: Path | None = None
    """File for the whole table: .csv or .parquet."""
    columns: tuple[str, ...] = ()
    """Further columns to print, such as test_log_loss or examples_per_second."""
    x: str | None = None
    """Column of the horizontal axis, such as noise_multiplier or epsilon_upper."""
    y: str | None = None
    """Numerical column of the vertical axis. Default: the task's headline metric."""
    by: tuple[str, ...] = ()
    """Settings that distinguish lines. Default: all settings that differ, except x and seeds."""
    plot: Path | None = None
    """Figure to draw (.png, .pdf or .svg): --y over --x, or, without --x, the panels of sweeps."""
    overwrite: bool = False
    """Replace existing files."""
    better: Literal["higher", "lower"] | None = None
    """Direction in which --y improves, if it is not the task's headline metric."""


def run(config: ResultsConfig) -> None:
    """Runs `dpsgd results`."""
    for path, endings, option in (
        (config.out, TABLES, "--out"),
        (config.plot, outputs.PICTURES, "--plot"),
    ):
        if path is not None:
            outputs.check(path, endings, option, overwrite=config.overwrite)
    if config.x is None and config.by:
        raise ValueError("--by needs --x, its axis")
    if config.x is None and config.plot is not None:
        return _draw_sweeps(config, config.plot)
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        from experiments.results import listings, views
        from experiments.results.metrics import Headline
        from experiments.results.table import read

        table, unfinished = read(config.runs)
        for path in unfinished:
            console.line(f"note: {path} is not finished, and left out")
        if config.x is None:
            for part in listings.by_task(table):
                headline = Headline.choose(part, config.y, config.better)
                console.table(*listings.overview(part, [headline.name, *config.columns]))
                console.line(listings.caption(part))
        else:
            from experiments.cli.commands.sweep import show_view

            column = config.y in table.frame.columns and config.y not in table.metrics
            headline = (
                Headline(str(config.y), config.better)
                if column
                else Headline.choose(table, config.y, config.better)
            )
            view = views.View(table, config.x, headline, by=config.by or None)
            show_view(console, view)
            if config.plot is not None:
                from experiments.figures.drawing import save
                from experiments.results.draw import draw

                save(draw([view]), config.plot)
                console.line(f"drawn: {config.plot}")
        if config.out is not None:
            table.write(config.out)
            console.line(f"written: {config.out}")


def _draw_sweeps(config: ResultsConfig, plot: Path) -> None:
    """Draws the panels of finished sweeps into one figure."""
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        from experiments.figures.drawing import save
        from experiments.results.draw import draw_rows
        from experiments.sweeps import engine

        for path in config.runs:
            if not engine.is_sweep(path):
                raise ValueError(
                    f"{path} is no sweep with panels of its own: --plot needs --x, its axis"
                )
        found = [engine.read(path).showing(config.y, config.better) for path in config.runs]
        save(draw_rows([(summary.title, summary.views) for summary in found]), plot)
        console.line(f"drawn: {plot}")
