"""`dpsgd evaluate`: how good a model is on labelled rows."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from experiments.tasks import TASKS


@dataclass(frozen=True)
class EvaluateConfig:
    """Compare what a model says of labelled rows, raw or prepared, with their labels."""

    model: tyro.conf.Positional[Path]
    """Exported model, or the directory of a finished run."""
    data: tyro.conf.Positional[Path]
    """File in the format of the model's task: of clicks, a raw file or a store."""
    split: Literal["train", "validation", "test"] | None = None
    """Which rows of a store; by default all of them."""
    task: str | None = None
    """Task of the model, as module:object, where that is not one that an installed package has."""


def run(config: EvaluateConfig) -> None:
    """Runs `dpsgd evaluate`."""
    from experiments.cli.console import going_on

    with going_on("evaluating"):
        from dpsgd.models.model import read_model, trained_on
        from experiments.cli.tasks import model_task

        model = read_model(config.model, task=model_task(config.task), kinds=TASKS)
        metrics = model.evaluate(config.data, split=config.split)
        own = config.split in (None, "train") and trained_on(model, config.data, kinds=TASKS)
    for name, value in metrics.items():
        print(f"{name}: {'undefined' if math.isnan(value) else f'{value:.6g}'}")
    if own:
        print("note: among these rows are those that trained the model", file=sys.stderr)
