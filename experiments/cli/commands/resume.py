"""`dpsgd resume`: a run that was stopped goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ResumeConfig:
    """Go on with a run that was stopped, from its last checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: Path | None = None
    """Where the store of examples lies now; by default where it lay."""


def run(config: ResumeConfig) -> None:
    """Runs `dpsgd resume`."""
    from experiments.cli.commands.train import show
    from experiments.cli.console import Console
    from experiments.train import resume

    with Console() as console:
        show(console, config.run, resume(config.run, config.data, console.progress))
