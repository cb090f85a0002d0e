"""`dpsgd export`: what may leave the house."""

from __future__ import annotations

from dpsgd.models.model import export
from experiments.cli.console import going_on
from experiments.cli.questions.models import Export
from experiments.cli.tasks import model_task
from experiments.tasks import TASKS


def run(asked: Export) -> None:
    """Runs `dpsgd export`."""
    with going_on("reading the run"):
        export(asked.run, asked.out, task=model_task(asked.task), kinds=TASKS)
    print(f"model and guarantee: {asked.out}")
