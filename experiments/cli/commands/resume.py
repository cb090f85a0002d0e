"""`dpsgd resume`: a run that was stopped, from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from experiments import cli
from experiments.cli.devices import Devices, Processes
from experiments.cli.writers import LogTo, writer


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run that was stopped, from its last checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: Path | None = None
    """Path of the training data. Default: the path that the run recorded."""
    log_to: LogTo = None
    """Also send steps, epsilon so far and examples per second to this program."""
    devices: Devices = field(default_factory=Devices)
    processes: Processes = field(default_factory=Processes)


def run(asked: Resume) -> None:
    """Runs `dpsgd resume`."""
    from experiments.cli.commands.train import show
    from experiments.cli.console import Console

    with (
        asked.processes.together(asked.run) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        import dpsgd
        from experiments.cli.options import look_in_the_current_folder
        from experiments.tasks import task_of

        look_in_the_current_folder()
        task = task_of(asked.run, data=asked.data)
        how: dict[str, Any] = {"placement": asked.devices.placement(), "started": cli.started}
        how["log"] = asked.log_to and writer(asked.log_to, asked.run)
        record = dpsgd.resume(asked.run, task, progress=console.progress, **how)
        show(console, asked.run, record)
