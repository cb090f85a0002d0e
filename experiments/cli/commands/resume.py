"""`dpsgd resume`: a run that was stopped, from its last checkpoint."""

from __future__ import annotations

from typing import Any

import dpsgd
from experiments import cli
from experiments.cli.commands.train import show
from experiments.cli.console import Console
from experiments.cli.devices import placement_of, together
from experiments.cli.options import look_in_the_current_folder
from experiments.cli.questions.directories import Resume
from experiments.cli.writers import writer
from experiments.tasks import task_of


def run(asked: Resume) -> None:
    """Runs `dpsgd resume`."""
    with (
        together(asked.devices, asked.run) as processes,
        Console(quiet=not processes.first) as console,
    ):
        console.progress("starting")
        look_in_the_current_folder()
        task = task_of(asked.run, data=asked.data)
        how: dict[str, Any] = {"placement": placement_of(asked.devices), "started": cli.started}
        how["log"] = asked.log_to and writer(asked.log_to, asked.run)
        record = dpsgd.resume(asked.run, task, progress=console.progress, **how)
        show(console, asked.run, record)
