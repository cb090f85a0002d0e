"""`dpsgd score`: what a model says of rows, labelled or not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from experiments.tasks import TASKS

OTHER_FORMATS = (".parquet", ".feather", ".arrow", ".json", ".jsonl", ".tsv", ".xlsx", ".zip")
"""Endings that promise another format than CSV."""


@dataclass(frozen=True)
class ScoreConfig:
    """Write what a model says of the rows of a file, in their order, as CSV."""

    model: tyro.conf.Positional[Path]
    """Exported model, or directory of a finished run."""
    data: tyro.conf.Positional[Path]
    """Rows to score, labelled or not, in the format of the model's task. For clicks: a raw file (or
    .gz) or a store."""
    out: Path
    """File to create: a header, then one line per row; compressed if it ends in .gz."""
    key: str | None = None
    """Column to copy beside each prediction, such as an identifier; it need not be a feature."""
    split: Literal["train", "validation", "test"] | None = None
    """Split of a store to score. Default: all rows."""
    task: str | None = None
    """Task of the model as module:object, if no installed package has it."""


def run(config: ScoreConfig) -> None:
    """Runs `dpsgd score`."""
    from experiments.cli.console import Console, counted

    with Console() as console:
        console.progress("starting")
        from dpsgd.models.model import read_model
        from dpsgd.models.predictions import write_predictions
        from dpsgd.runs.directory import RunDirectory
        from experiments.cli.tasks import model_task

        if config.out.suffix in OTHER_FORMATS:
            raise ValueError(
                f"--out {config.out}: predictions are written as CSV; end the name in .csv or "
                ".csv.gz"
            )
        RunDirectory.refuse_existing(config.out)
        model = read_model(config.model, task=model_task(config.task), kinds=TASKS)
        name = model.description.get("prediction", "prediction")
        keys = None
        if config.key is not None:
            keys = config.key, model.keys(config.data, config.key)
        rows, undefined = write_predictions(
            config.out,
            model.predictions(config.data, split=config.split),
            name=name,
            columns=model.description.get("prediction_columns", ()),
            keys=keys,
            progress=lambda rows: console.progress(f"{rows:,} rows"),
        )
        console.line(f"{counted(rows, 'row')} scored: {config.out}")
    if undefined:
        print(
            f"note: {counted(undefined, 'row')} without a {name} (nan): the model's training "
            "diverged, or their values are too large for it",
            file=sys.stderr,
        )
