"""`dpsgd export`: what may leave the house."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.cli.console import going_on


@dataclass(frozen=True)
class ExportConfig:
    """Write the model and the guarantee of a finished run, and nothing else, to a new folder."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """Folder to create."""


def run(config: ExportConfig) -> None:
    """Runs `dpsgd export`."""
    with going_on("reading the run"):
        from experiments.export import export

        export(config.run, config.out)
    print(f"model and guarantee: {config.out}")
