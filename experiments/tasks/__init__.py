"""The tasks that the command knows by name; any other is named as module:object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TASKS = {
    "clicks": "experiments.tasks.clicks.task:Clicks",
    "images": "experiments.tasks.images.task:Images",
    "ratings": "experiments.tasks.ratings.task:Ratings",
}
"""Built-in tasks, imported when they are asked for."""


def task_of(run: Path, *, data: Path | None = None) -> Any:
    """Returns the task of the run in a directory, as its configuration recorded it.

    Args:
      run: The directory.
      data: Where the data lie, if not where they lay.

    Raises:
      FileNotFoundError: if there is no run.
      ValueError: if the configuration is damaged, or there is no such task any more.
    """
    from dpsgd.runs import task
    from dpsgd.runs.directory import RunDirectory
    from dpsgd.runs.spec import check_version

    record = RunDirectory.open(run, finished=False).read_json("config.json")
    check_version(record, run)
    where = f"{run / 'config.json'} is damaged, or of another version"
    return task.load(record.get("task"), where, kinds=TASKS, data=data)
