"""`dpsgd score`: what a model says of rows, labelled or not."""

from __future__ import annotations

import sys

from dpsgd.models.model import read_model
from dpsgd.models.predictions import write_predictions
from dpsgd.runs.directory import RunDirectory
from experiments.cli.console import Console, counted
from experiments.cli.questions.models import Score
from experiments.cli.tasks import model_task
from experiments.tasks import TASKS


def run(config: Score) -> None:
    """Runs `dpsgd score`."""
    with Console() as console:
        console.progress("starting")
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
