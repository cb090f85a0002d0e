"""Tasks by the names that commands and sweeps have for them."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from typing import Any

from accounting.records import near
from dpsgd.removed import removal_notice
from dpsgd.runs.task import METHODS, check_task, find
from experiments.cli.options import look_in_the_current_folder
from experiments.tasks import TASKS

DEFAULT = "clicks"


def find_task(name: str) -> Any:
    """Returns the task called `name`, or the dataclass that such tasks are of.

    Raises:
      ValueError: if there is none, or it is no task.
    """
    if notice := removal_notice("task", name):
        raise ValueError(f"--task {name} was {notice}")
    if name not in TASKS and ":" not in name:
        raise ValueError(f"--task {name}{near(name, TASKS)} (your own: module:object)")
    look_in_the_current_folder()
    found = find(TASKS.get(name, name))
    if not isinstance(found, type):
        check_task(found, name)
    elif missing := [method for method in METHODS if not hasattr(found, method)]:
        raise ValueError(f"--task {name} is a class without {', '.join(missing)}, and so no task")
    elif not dataclasses.is_dataclass(found):
        raise ValueError(f"--task {name} is a class and no dataclass: name a task made of it")
    return found


def needs_data(kind: type) -> bool:
    """Returns whether tasks of `kind` have no rows unless a setting `data` says where they lie."""
    return any(
        one.name == "data" and one.default is MISSING and one.default_factory is MISSING
        for one in dataclasses.fields(kind)
    )


def model_task(name: str | None) -> Any:
    """Returns the task called `name`; None if it is not given, as a model names its own."""
    look_in_the_current_folder()
    return None if name is None else find_task(name)
