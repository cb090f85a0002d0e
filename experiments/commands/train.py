"""`dpsgd train` and `dpsgd resume`: one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.config import TrainConfig
from experiments.sampler_commands import SamplerCommand


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a click model privately and write a run directory with the guarantee it earned."""

    data: tyro.conf.Positional[Path]
    sampler: SamplerCommand


@dataclass(frozen=True)
class ResumeConfig:
    """Go on with a run that was stopped, from its last checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: Path | None = None
    """Where the store of examples lies now; by default where it lay."""


def run(config: Train | ResumeConfig) -> None:
    """Runs `dpsgd train` and `dpsgd resume`."""
    from experiments.console import Console
    from experiments.train import resume, train

    with Console() as console:
        if isinstance(config, Train):
            out, record = config.out, train(config, console.progress)
        else:
            out, record = config.run, resume(config.run, config.data, console.progress)
        console.comparison([record])
        console.line(record["guarantee"])
        console.line(f"audit: {record['audit']}")
        console.line(f"report: {out / 'report.md'}")
