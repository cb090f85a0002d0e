"""Tasks as the command line asks for them: `--task NAME`, and the settings of that task."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpsgd.removed import removal_notice
from dpsgd.runs.task import METHODS, check_task, find
from experiments.cli import options
from experiments.tasks import TASKS
from samplers.settings import SETTINGS

DEFAULT = "clicks"


@dataclass(frozen=True, kw_only=True)
class OfTask:
    """Options of a command about a task; `command` adds the task's settings."""

    task: str = DEFAULT
    """Task to train: clicks, images, ratings, or your own as module:object (imported from the
    current folder or Python's path). Its settings are further options."""


def command(base: type, words: Sequence[str], **more: Any) -> type:
    """Returns the command `base` with the settings of the task that words name.

    Raises:
      ValueError: if there is no such task, or a setting of it is called as an option is.
    """
    found = find_task(name := _named(words))
    if not isinstance(found, type):
        return options.command(base, words, **more)
    kinds = base, *more.get("groups", {}).values(), *SETTINGS.values()
    taken = {one.name for kind in kinds for one in dataclasses.fields(kind)}
    taken |= set(more.get("options", ()))
    if both := sorted(taken & {one.name for one in dataclasses.fields(found)}):
        raise ValueError(
            f"--task {name}: its setting {both[0]} is called as one of the command's own: rename it"
        )
    return options.command(base, words, settings=found, **more)


def _named(words: Sequence[str]) -> str:
    """Returns the task that words name by `--task`."""
    names = []
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option == "--task":
            names.append(name := value if equals else following)
            if not name or name.startswith(("-", "sampler:")):
                raise ValueError(
                    f"--task needs a name, one of {', '.join(TASKS)}, or module:object"
                )
    if len(names) > 1:
        raise ValueError(f"--task names several: {', '.join(names)}")
    return names[0] if names else DEFAULT


def find_task(name: str) -> Any:
    """Returns the task called `name`, or the dataclass that such tasks are of.

    Raises:
      ValueError: if there is none, or it is no task.
    """
    if notice := removal_notice("task", name):
        raise ValueError(f"--task {name} was {notice}")
    if name not in TASKS and ":" not in name:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TASKS)}."
        raise ValueError(f"--task {name}: {hint} A task of your own is named module:object")
    options.look_in_the_current_folder()
    found = find(TASKS.get(name, name))
    if not isinstance(found, type):
        check_task(found, name)
    elif missing := [method for method in METHODS if not hasattr(found, method)]:
        raise ValueError(f"--task {name} is a class without {', '.join(missing)}, and so no task")
    elif not dataclasses.is_dataclass(found):
        raise ValueError(f"--task {name} is a class and no dataclass: name a task made of it")
    return found


def task_of(config: Any) -> Any:
    """Returns the task that was asked for."""
    found = find_task(config.task)
    return found(**vars(config.settings)) if isinstance(found, type) else found


def without_data(config: Any) -> Any:
    """Returns the task that was asked for, whose rows are not looked at.

    Clicks without a store are those of Criteo Display Ads.
    """
    found = find_task(config.task)
    settings = getattr(config, "settings", None)
    if settings is None or not needs_data(found) or settings.data is not None:
        return task_of(config)
    if config.task != "clicks":
        raise ValueError(f"--data is missing: the task {config.task} needs it")
    from experiments.tasks.clicks.schema import DISPLAY_ADS
    from experiments.tasks.clicks.sizes import preset_for
    from experiments.tasks.clicks.task import Clicks, DescribedClicks

    given = {**vars(settings), "data": Path()}
    network = settings.embedding_dim is not None or settings.hidden is not None
    given["model"] = settings.model or preset_for(config.num_examples, network=network)
    return DescribedClicks(Clicks(**given).sizes, DISPLAY_ADS, 0)


def needs_data(kind: type) -> bool:
    """Returns whether tasks of `kind` have no rows unless a setting `data` says where they lie."""
    return any(
        one.name == "data" and one.default is MISSING and one.default_factory is MISSING
        for one in dataclasses.fields(kind)
    )


def model_task(name: str | None) -> Any:
    """Returns the task called `name`; None if it is not given, as a model names its own."""
    options.look_in_the_current_folder()
    return None if name is None else find_task(name)
