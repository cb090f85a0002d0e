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


def evaluate(question: Evaluate) -> None:
    """Prints how well a model predicts labelled rows."""
    with going_on("evaluating"):
        model, tables = _read(question), []
        if question.deciles or question.by is not None or question.against is not None:
            metrics, *tables = _fit(question, model)
        else:
            metrics = model.evaluate(question.data, split=question.split)
        has_training_rows = question.split in (None, "train") and trained_on(
            model, question.data, kinds=TASKS
        )
    if has_training_rows:
        print("note: some of these rows trained the model")
    for name, value in metrics.items():
        print(f"{name}: {'undefined' if math.isnan(value) else f'{value:.6g}'}")
    console = Console()
    for title, header, rows in tables:
        console.line(f"\n{title}")
        console.table(header, rows)


def _read(question: OfModel) -> TrainedModel:
    return read_model(question.model, task=model_task(question.task), kinds=TASKS)


def _fit(question: Evaluate, model: TrainedModel) -> Iterator[Any]:
    """Yields the metrics of a model of clicks, then tables with their titles."""
    from experiments.results import clicks  # metrics alone need no matplotlib

    rows = clicks.Rows(question.data, question.split, question.by)
    fit = clicks.Fit.read("this model", model, rows)
    yield dataclasses.asdict(fit.metrics)
    if question.against is not None:
        plain = read_model(question.against, kinds=TASKS)
        clicks.check_twin(plain)
        twin = clicks.Fit.read(str(question.against), plain, rows)
        title = f"against {twin.name}, which has no guarantee (± standard error over the rows):"
        yield title, *clicks.cost([fit], twin)
    title = "predicted and observed positives, by"
    if question.deciles:
        groups = clicks.groups("decile", fit.deciles(), intervals=False)
        yield f"{title} the prediction:", *groups
    if question.by is not None:
        yield (
            f"{title} {question.by}:",
            *clicks.groups(question.by, fit.categories(), intervals=False),
        )


def score(question: Score) -> None:
    """Writes a model's predictions, one line per row."""
    with Console() as console:
        console.progress("starting")
        RunDirectory.refuse_existing(question.out)
        model = _read(question)
        name = model.description.get("prediction", "prediction")
        rows, undefined = write_predictions(
            question.out,
            model.predictions(question.data, split=question.split),
            name=name,
            columns=model.description.get("prediction_columns", ()),
            keys=None
            if question.key is None
            else (question.key, model.keys(question.data, question.key)),
            progress=lambda rows: console.progress(f"{rows:,} rows"),
        )
        console.line(f"{counted(rows, 'row')} scored: {question.out}")
    if undefined:
        print(
            f"note: {counted(undefined, 'row')} without a {name} (nan): training diverged, or the "
            "values of these rows are too large for the model",
            file=sys.stderr,
        )


def export(question: Export) -> None:
    """Writes a finished run's model and guarantee to a folder."""
    with going_on("reading the run"):
        export_model(question.run, question.out, task=model_task(question.task), kinds=TASKS)
    print(f"model and guarantee: {question.out}")
