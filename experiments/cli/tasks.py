"""Tasks and samplers by their names in commands and sweep files."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from typing import Any

from accounting.records import near
from dpsgd.removed import removal_notice
from dpsgd.runs.spec import REGISTRIES
from dpsgd.runs.task import METHODS, check_task, find
from experiments.cli.options import look_in_the_current_folder
from experiments.tasks import TASKS

DEFAULT = "clicks"


def find_task(name: str) -> Any:
    """Returns the task, or its dataclass, by name.

    Raises:
      ValueError: If the name is unknown, or names no task.

    >>> find_task("ratings")
    <class 'experiments.tasks.ratings.task.Ratings'>
    """
    if notice := removal_notice("task", name):
        raise ValueError(f"--task {name} was {notice}")
    if name not in TASKS and ":" not in name:
        raise ValueError(f"--task {name}{near(name, TASKS)} (your own: module:object)")
    look_in_the_current_folder()
    task = find(TASKS.get(name, name))
    if not isinstance(task, type):
        check_task(task, name)
    elif missing := [method for method in METHODS if not hasattr(task, method)]:
        raise ValueError(f"--task {name} is no task: the class lacks {', '.join(missing)}")
    elif not dataclasses.is_dataclass(task):
        raise ValueError(f"--task {name} is a class but no dataclass: name an instance of it")
    return task


def load_kind(option: str, name: str, flag: str | None = None) -> Any:
    """Returns the class that an option names, imported if it is your own.

    Args:
      option: Option: sampler, noise, optimizer or clipping.
      name: Name of a part, or module:Class.
      flag: Option on the command line, if it has another name.

    Raises:
      ValueError: If the part is unknown, or no frozen dataclass.

    >>> load_kind("optimizer", "sgd")
    <class 'dpsgd.runs.spec.SGD'>
    """
    if ":" in name:
        look_in_the_current_folder()
    try:
        return REGISTRIES[option].load(name)
    except ValueError as error:
        raise ValueError(f"--{flag or option}: {error}") from None


def needs_data(kind: type) -> bool:
    """Returns whether a task requires the setting `data`.

    >>> needs_data(find_task("clicks")), needs_data(find_task("ratings"))
    (True, False)
    """
    return any(
        field.name == "data" and field.default is MISSING and field.default_factory is MISSING
        for field in dataclasses.fields(kind)
    )


def model_task(name: str | None) -> Any:
    """Returns the task of a model by name.

    Args:
      name: Value of --task; None, which is returned, if the model names its task.
    """
    look_in_the_current_folder()
    return None if name is None else find_task(name)
