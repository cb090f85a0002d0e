"""`dpsgd evaluate`, `score` and `export`: models of finished runs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

from dpsgd.models.model import TrainedModel, read_model, trained_on
from dpsgd.models.model import export as export_model
from dpsgd.models.predictions import write_predictions
from dpsgd.runs.directory import RunDirectory
from experiments.cli.console import Console, counted, going_on
from experiments.cli.questions.models import Evaluate, Export, OfModel, Score
from experiments.cli.tasks import model_task
from experiments.tasks import TASKS


def evaluate(asked: Evaluate) -> None:
    """Prints how well a model predicts labelled rows."""
    with going_on("evaluating"):
        model, tables = _read(asked), []
        if asked.deciles or asked.by is not None or asked.against is not None:
            metrics, *tables = _fit(asked, model)
        else:
            metrics = model.evaluate(asked.data, split=asked.split)
        own = asked.split in (None, "train") and trained_on(model, asked.data, kinds=TASKS)
    if own:
        print("note: among these rows are some that trained the model")
    for name, value in metrics.items():
        print(f"{name}: {'undefined' if math.isnan(value) else f'{value:.6g}'}")
    console = Console()
    for title, header, rows in tables:
        console.line(f"\n{title}")
        console.table(header, rows)


def _read(asked: OfModel) -> TrainedModel:
    return read_model(asked.model, task=model_task(asked.task), kinds=TASKS)


def _fit(asked: Evaluate, model: TrainedModel) -> Iterator[Any]:
    """Yields the metrics of a model of clicks, then tables with their titles."""
    from experiments.results import clicks  # metrics alone need no matplotlib

    rows = clicks.Rows(asked.data, asked.split, asked.by)
    fit = clicks.Fit.read("this model", model, rows)
    yield dataclasses.asdict(fit.metrics)
    if asked.against is not None:
        plain = read_model(asked.against, kinds=TASKS)
        clicks.check_twin(plain)
        twin = clicks.Fit.read(str(asked.against), plain, rows)
        title = f"against {twin.name}, which has no guarantee (± standard error over the rows):"
        yield title, *clicks.cost([fit], twin)
    title = "predicted and observed positives, by"
    if asked.deciles:
        groups = clicks.groups("decile", fit.deciles(), intervals=False)
        yield f"{title} the prediction:", *groups
    if asked.by is not None:
        yield f"{title} {asked.by}:", *clicks.groups(asked.by, fit.categories(), intervals=False)


def score(asked: Score) -> None:
    """Writes the predictions of a model, a line for each row."""
    with Console() as console:
        console.progress("starting")
        RunDirectory.refuse_existing(asked.out)
        model = _read(asked)
        name = model.description.get("prediction", "prediction")
        rows, undefined = write_predictions(
            asked.out,
            model.predictions(asked.data, split=asked.split),
            name=name,
            columns=model.description.get("prediction_columns", ()),
            keys=None if asked.key is None else (asked.key, model.keys(asked.data, asked.key)),
            progress=lambda rows: console.progress(f"{rows:,} rows"),
        )
        console.line(f"{counted(rows, 'row')} scored: {asked.out}")
    if undefined:
        print(
            f"note: {counted(undefined, 'row')} without a {name} (nan): training diverged, or the "
            "values of these rows are too large for the model",
            file=sys.stderr,
        )


def export(asked: Export) -> None:
    """Writes the model and the guarantee of a finished run to a folder."""
    with going_on("reading the run"):
        export_model(asked.run, asked.out, task=model_task(asked.task), kinds=TASKS)
    print(f"model and guarantee: {asked.out}")
