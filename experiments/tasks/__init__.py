"""Tasks that the command knows by name, and their base; other tasks are module:object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PyTree = Any

TASKS = {
    "clicks": "experiments.tasks.clicks.task:Clicks",
    "images": "experiments.tasks.images.task:Images",
    "ratings": "experiments.tasks.ratings.task:Ratings",
}
"""Built-in tasks, imported on demand."""


def task_of(run: Path, *, data: Path | None = None) -> Any:
    """Returns the task of a run, from its recorded configuration.

    Args:
      run: Directory of the run.
      data: Path of the data; by default the recorded path.

    Raises:
      FileNotFoundError: If there is no run.
      ValueError: If the configuration is damaged, or its task is unknown.
    """
    from dpsgd.runs import task
    from dpsgd.runs.directory import RunDirectory

    record = RunDirectory.open(run, finished=False).read_json("config.json")
    damage = f"{run / 'config.json'} is damaged, or of another version"
    return task.load(record.get("task"), damage, kinds=TASKS, data=data)


class Models:
    """Model as pure functions; a task adds training and held-out rows."""

    evaluate: Callable[[PyTree, Iterable[PyTree]], dict[str, float]]

    @property
    def functions(self) -> Any:
        """Pure functions of the model; equal models share compiled programs."""
        raise NotImplementedError

    def init(self, seed: int) -> PyTree:
        """Returns new parameters, which depend on no row."""
        return self.functions.init(seed)

    @property
    def loss(self) -> Callable[[PyTree, PyTree], Any]:
        """Loss (params, example) -> scalar, one function for equal models."""
        return self.functions.loss

    @property
    def predict(self) -> Callable[[PyTree, PyTree], Any]:
        """Predictions (params, rows) -> float32[rows] or float32[rows, ...]."""
        return self.functions.predict

    def held_out(self, split: str) -> Iterable[PyTree]:
        """Returns the "validation" or "test" rows in blocks."""
        raise NotImplementedError

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns `evaluate` of the validation and test rows, by name."""
        return {
            f"{split}_{name}": value
            for split in ("validation", "test")
            for name, value in self.evaluate(params, self.held_out(split)).items()
        }
