"""`dpsgd evaluate`: how good a model is on labelled rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from experiments.tasks import TASKS

if TYPE_CHECKING:
    from dpsgd.models.model import TrainedModel


@dataclass(frozen=True)
class EvaluateConfig:
    """Compare what a model says of labelled rows, raw or prepared, with their labels."""

    model: tyro.conf.Positional[Path]
    """Exported model, or directory of a finished run."""
    data: tyro.conf.Positional[Path]
    """Rows to evaluate on, in the format of the model's task. For clicks: a raw file or a store."""
    split: Literal["train", "validation", "test"] | None = None
    """Split of a store to evaluate on. Default: all rows."""
    task: str | None = None
    """Task of the model as module:object, if no installed package has it."""
    deciles: bool = False
    """For a model of clicks, also print predicted and observed clicks per decile of the
    prediction."""
    by: str | None = None
    """Also print predicted and observed clicks for the largest categories of this column."""
    against: Path | None = None
    """Non-private model (dpsgd train --non-private) to compare with."""


def run(config: EvaluateConfig) -> None:
    """Runs `dpsgd evaluate`."""
    from experiments.cli.console import going_on

    with going_on("evaluating"):
        from dpsgd.models.model import read_model, trained_on
        from experiments.cli.tasks import model_task

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
    if tables:
        from experiments.cli.console import Console

        console = Console()
        for title, header, rows in tables:
            console.line(f"\n{title}")
            console.table(header, rows)


def _fit(
    config: EvaluateConfig, model: TrainedModel
) -> tuple[dict[str, float], list[tuple[str, list[str], list[list[str]]]]]:
    """Returns the metrics of a model of clicks, and tables by their titles."""
    import dataclasses

    from dpsgd.models.model import read_model
    from experiments.results import clicks

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
