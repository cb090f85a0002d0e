"""Tasks that the command knows by name; other tasks are module:object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
