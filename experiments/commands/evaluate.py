"""`dpsgd evaluate`: a finished run's model on labelled rows."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class EvaluateConfig:
    """Score a labelled file, raw or prepared, with the model of a finished run."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    data: tyro.conf.Positional[Path]
    """Raw file in the format the run was prepared from, or a store."""


def run(config: EvaluateConfig) -> None:
    """Runs `dpsgd evaluate`."""
    from experiments.evaluate import evaluate_run, is_own

    for name, value in dataclasses.asdict(evaluate_run(config.run, config.data)).items():
        print(f"{name}: {value:.6g}")
    if is_own(config.run, config.data):
        print("note: among these rows are those that trained the model", file=sys.stderr)
