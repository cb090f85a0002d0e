"""`dpsgd sweep`: many runs from one file, and what they show together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class SweepConfig:
    """Carry out every run that a file asks for; write their table and figure.

    Started again, it goes on where it was: no finished run is repeated. The guarantees are those of
    single runs; a choice among them is not covered.
    """

    config: tyro.conf.Positional[Path]
    """Sweep to run (TOML; see the README), or the name of a shipped one."""
    data: tyro.conf.Positional[Path]
    """Store of prepared examples (see `dpsgd prepare`)."""
    out: Path
    """Folder of the sweep; one that exists is gone on with."""
    workers: int | None = None
    """Runs at once, each with its share of the cores; by default one a core on a CPU, else one."""


def run(config: SweepConfig) -> None:
    """Runs `dpsgd sweep`."""
    from experiments.console import Console
    from experiments.sweep import tables
    from experiments.sweep.config import Sweep, file_of
    from experiments.sweep.engine import run_sweep, write

    file = file_of(config.config)
    asked = file.read_bytes()
    with Console() as console:
        summary = run_sweep(
            Sweep.parse(asked, str(file)),
            config.data,
            config.out,
            where=str(config.config),
            workers=config.workers,
            progress=console.progress,
        )
        written = write(summary, config.out, asked)
        console.line(summary.setting)
        for panel in summary.panels:
            if panel.grid.title:
                console.line(f"\n{panel.grid.title}")
            for title, table in tables.tables(panel).items():
                console.line(f"\n{title}")
                console.table(*table)
            for verdict in tables.verdicts(panel):
                console.line(f"best {verdict}")
        console.line("")
        for statement in summary.statements:
            console.line(f"- {statement}")
        console.line(f"written: {', '.join(map(str, written))}")
