"""`dpsgd train` and `dpsgd resume`: one run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.config import TrainConfig


@dataclass(frozen=True)
class ResumeConfig:
    """Go on with a run that was stopped, from its last checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: Path | None = None
    """Where the store of examples lies now; by default where it lay."""


STOPPED = 75
"""Exit status of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h."""


def run(config: TrainConfig | ResumeConfig) -> int:
    """Runs `dpsgd train` and `dpsgd resume`; the status is `STOPPED` if the run can go on."""
    from experiments.console import Console
    from experiments.stop import Stopped
    from experiments.train import resume, train

    try:
        with Console() as console:
            if isinstance(config, TrainConfig):
                out, record = config.out, train(config, console.progress)
            else:
                out, record = config.run, resume(config.run, config.data, console.progress)
            console.comparison([record])
            console.line(record["guarantee"])
            console.line(f"audit: {record['audit']}")
            console.line(f"report: {out / 'report.md'}")
    except Stopped as stopped:
        print(f"dpsgd: {stopped}", file=sys.stderr)
        return STOPPED
    return 0
