"""`dpsgd resume`: a run that was stopped goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from experiments import cli
from experiments.cli.devices import DevicesConfig, ProcessesConfig


@dataclass(frozen=True, kw_only=True)
class ResumeConfig(DevicesConfig, ProcessesConfig):
    """Go on with a run that was stopped, from its last checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: Path | None = None
    """Where the data of the task lie now; by default where they lay."""


def run(config: ResumeConfig) -> None:
    """Runs `dpsgd resume`."""
    from experiments.cli.commands.train import show
    from experiments.cli.console import Console

    config.check_devices()
    with config.together(config.run) as processes, Console(quiet=not processes.first) as console:
        console.progress("starting")
        import dpsgd
        from experiments.cli.tasks import look_in_the_current_folder
        from experiments.tasks import task_of

        look_in_the_current_folder()
        task = task_of(config.run, data=config.data)
        how: dict[str, Any] = {"placement": config.placement(), "started": cli.started}
        record = dpsgd.resume(config.run, task, progress=console.progress, **how)
        show(console, config.run, record)
