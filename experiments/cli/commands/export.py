"""`dpsgd export`: what may leave the house."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.cli.console import going_on
from experiments.tasks import TASKS


@dataclass(frozen=True)
class ExportConfig:
    """Write the model and the guarantee of a finished run, and nothing else, to a new folder."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """Folder to create."""
    task: str | None = None
    """Task of the run as module:object, if the run directory does not name it."""


def run(config: ExportConfig) -> None:
    """Runs `dpsgd export`."""
    with going_on("reading the run"):
        from dpsgd.models.model import export
        from experiments.cli.tasks import model_task

        export(config.run, config.out, task=model_task(config.task), kinds=TASKS)
    print(f"model and guarantee: {config.out}")
