"""`dpsgd train`: one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from experiments.cli.config import TrainConfig
from experiments.cli.console import Console
from experiments.cli.sampler_commands import SamplerCommand


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a click model privately and write a run directory with the guarantee it earned."""

    data: tyro.conf.Positional[Path]
    sampler: SamplerCommand


def run(config: Train) -> None:
    """Runs `dpsgd train`."""
    with Console() as console:
        console.progress("starting")
        from experiments.train import train

        show(console, config.out, train(config, console.progress))


def show(console: Console, path: Path, record: dict[str, Any]) -> None:
    """Says what the finished run in `path` came to."""
    from experiments.reports import run as report

    console.table(*report.comparison([record]))
    if diverged := report.divergence(record):
        console.line(f"note: {diverged}")
    console.line(record["guarantee"])
    console.line(f"audit: {record['audit']}")
    console.line(f"report: {path / 'report.md'}")
