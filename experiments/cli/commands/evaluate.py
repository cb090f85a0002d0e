"""`dpsgd evaluate`: how good a model is on labelled rows."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class EvaluateConfig:
    """Score labelled rows, raw or prepared, with a model, and compare with their labels."""

    model: tyro.conf.Positional[Path]
    """Exported model, or the directory of a finished run."""
    data: tyro.conf.Positional[Path]
    """Raw file in the format the model was trained from, or a store."""
    split: Literal["train", "validation", "test"] | None = None
    """Which rows of a store; by default all of them."""


def run(config: EvaluateConfig) -> None:
    """Runs `dpsgd evaluate`."""
    from experiments.cli.console import going_on

    with going_on("evaluating"):
        from experiments.tasks.clicks.evaluate import evaluate_model, is_own

        metrics = evaluate_model(config.model, config.data, config.split)
    for name, value in dataclasses.asdict(metrics).items():
        print(f"{name}: {'undefined' if math.isnan(value) else f'{value:.6g}'}")
    if is_own(config.model, config.data, config.split):
        print("note: among these rows are those that trained the model", file=sys.stderr)
