"""`dpsgd evaluate`: how good a model is on labelled rows."""

from __future__ import annotations

import dataclasses
import math

from dpsgd.models.model import TrainedModel, read_model, trained_on
from experiments.cli.console import Console, going_on
from experiments.cli.questions.models import Evaluate
from experiments.cli.tasks import model_task
from experiments.tasks import TASKS


def run(config: Evaluate) -> None:
    """Runs `dpsgd evaluate`."""
    with going_on("evaluating"):
        model = read_model(config.model, task=model_task(config.task), kinds=TASKS)
        if config.deciles or config.by is not None or config.against is not None:
            metrics, tables = _fit(config, model)
        else:
            metrics, tables = model.evaluate(config.data, split=config.split), []
        own = config.split in (None, "train") and trained_on(model, config.data, kinds=TASKS)
    if own:
        print("note: among these rows are some that trained the model")
    for name, value in metrics.items():
        print(f"{name}: {'undefined' if math.isnan(value) else f'{value:.6g}'}")
    console = Console()
    for title, header, rows in tables:
        console.line(f"\n{title}")
        console.table(header, rows)


def _fit(
    config: Evaluate, model: TrainedModel
) -> tuple[dict[str, float], list[tuple[str, list[str], list[list[str]]]]]:
    """Returns the metrics of a model of clicks, and tables by their titles."""
    from experiments.results import clicks  # metrics alone need no matplotlib

    rows = clicks.Rows(config.data, config.split, config.by)
    fit, tables = clicks.Fit.read("this model", model, rows), []
    if config.against is not None:
        plain = read_model(config.against, kinds=TASKS)
        clicks.check_twin(plain)
        twin = clicks.Fit.read(str(config.against), plain, rows)
        title = f"against {twin.name}, which has no guarantee (± standard error over the rows):"
        tables.append((title, *clicks.cost([fit], twin)))
    if config.deciles:
        table = clicks.groups("decile", fit.deciles(), intervals=False)
        tables.append(("predicted and observed positives, by the prediction:", *table))
    if config.by is not None:
        table = clicks.groups(config.by, fit.categories(), intervals=False)
        tables.append((f"predicted and observed positives, by {config.by}:", *table))
    return dataclasses.asdict(fit.metrics), tables
