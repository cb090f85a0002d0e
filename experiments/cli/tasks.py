"""Tasks as the command line asks for them: `--task NAME`, and the settings of that task."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any

import tyro

from dpsgd.runs.records import field_types
from dpsgd.runs.spec import known_options
from dpsgd.runs.task import METHODS, check_task, find
from experiments.tasks import TASKS
from samplers.settings import SETTINGS

DEFAULT = "clicks"


def choose(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the task that words name by `--task`, or the default one, and the other words.

    Raises:
      ValueError: if nothing follows, or several tasks are named.
    """
    named, others, rest = [], [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option != "--task":
            others.append(word)
        elif (value := value if equals else next(rest, "")) and not value.startswith("sampler:"):
            named.append(value)
        else:
            raise ValueError(f"--task needs a name, one of {', '.join(TASKS)}, or module:object")
    if len(named) > 1:
        raise ValueError(f"--task names several: {', '.join(named)}")
    return (named[0] if named else DEFAULT), others


def find_task(name: str) -> Any:
    """Returns the task called `name`, or the dataclass that such tasks are of.

    Raises:
      ValueError: if there is none, or it is no task.
    """
    if name not in TASKS and ":" not in name:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TASKS)}."
        raise ValueError(f"--task {name}: {hint} A task of your own is named module:object")
    look_in_the_current_folder()
    found = find(TASKS.get(name, name))
    if not isinstance(found, type):
        check_task(found, name)
    elif missing := [method for method in METHODS if not hasattr(found, method)]:
        raise ValueError(f"--task {name} is a class without {', '.join(missing)}, and so no task")
    elif not dataclasses.is_dataclass(found):
        raise ValueError(f"--task {name} is a class and no dataclass: name a task made of it")
    return found


def look_in_the_current_folder() -> None:
    """Has modules found in the folder that the command is given in, after all others."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def command(base: type, words: Sequence[str], *, place: bool = True) -> tuple[type, list[str]]:
    """Returns the command `base` with the settings of the task that words name, and other words.

    Args:
      base: Dataclass of what can be asked of any task.
      words: Of the command line.
      place: Whether a setting `data` is given by its place among them; or by its option, and not
        at all.

    Raises:
      ValueError: if there is no such task, or a setting of it is called as one of the command is.
    """
    name, others = choose(words)
    found = find_task(name)
    space = {"__doc__": base.__doc__, "task": (name, found)}
    fields: list[Any] = []
    if isinstance(found, type):
        options = options_of(found, place=place)
        taken = {field.name for kind in (base, *SETTINGS.values()) for field in fields_of(kind)}
        if both := sorted(taken & {field.name for field in fields_of(options)}):
            raise ValueError(
                f"--task {name}: its setting {both[0]} is called as one of the command's own: "
                "rename it"
            )
        fields.append(("settings", options))
    made = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, namespace=space
    )
    return made, others


def task_of(config: Any) -> Any:
    """Returns the task that a configuration of a `command` asks for."""
    _, found = config.task
    if not isinstance(found, type):
        return found
    return found(**{f.name: getattr(config.settings, f.name) for f in fields_of(config.settings)})


def without_data(config: Any) -> Any:
    """Returns the task that a configuration of a `command` asks for, whose rows are not looked at.

    Clicks without a store are those of Criteo Display Ads.
    """
    name, found = config.task
    settings = getattr(config, "settings", None)
    if settings is None or getattr(settings, "data", "") is not None or not needs_data(found):
        return task_of(config)
    if name != "clicks":
        raise ValueError(f"--data is missing: the task {name} needs it")
    from experiments.tasks.clicks.schema import DISPLAY_ADS
    from experiments.tasks.clicks.task import Clicks, DescribedClicks

    sizes = Clicks(**{**dataclasses.asdict(settings), "data": Path()}).sizes
    return DescribedClicks(sizes, DISPLAY_ADS, 0)


def needs_data(kind: type) -> bool:
    """Returns whether tasks of `kind` have no rows unless a setting `data` says where they lie."""
    missing = dataclasses.MISSING
    return any(
        field.name == "data" and field.default is missing and field.default_factory is missing
        for field in fields_of(kind)
    )


def options_of(kind: type, *, place: bool = True) -> type:
    """Returns a dataclass of the settings of the task `kind`, as the command line offers them.

    It has the fields of `kind` with their help and defaults; see `command` on `data`.
    """
    types, helps = field_types(kind), _helps(kind)
    fields: list[Any] = []
    for field in fields_of(kind):
        if not field.init:
            continue
        name, default = field.name, field.default
        offered: Any = types[field.name]
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if name == "data" and not place and needs_data(kind):
            offered, default = offered | None, None
        offered = Annotated[offered, tyro.conf.arg(help=helps.get(name, ""))]
        if name == "data" and place:
            offered = tyro.conf.Positional[offered]  # type: ignore[misc]  # a type known when run
        missing = default is dataclasses.MISSING
        fields.append(
            (name, offered, dataclasses.field() if missing else dataclasses.field(default=default))
        )
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, kw_only=True)


def of_run(base: type) -> type:
    """Returns the command `base` with the options of a run, as `RunSpec.of` takes them."""
    fields: list[Any] = []
    for name, option in known_options().items():
        if name != "sampler":
            owner, below = option.owner, option.field
            text = _helps(owner)[below] if below else inspect.getdoc(owner) or ""
            help = " ".join(text.partition("\n\n")[0].split())
            kind: Any = option.type
            offered = Annotated[kind, tyro.conf.arg(help=help)]
            fields.append((name, offered, dataclasses.field(default=option.default)))
    return dataclasses.make_dataclass(
        base.__name__,
        fields,
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": base.__doc__},
    )


def _helps(kind: type) -> dict[str, str]:
    """Returns the texts that stand below the fields of a class, and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        except (OSError, TypeError, SyntaxError):
            continue
        for one, below in itertools.pairwise(body):
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[one.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def model_task(name: str | None) -> Any:
    """Returns the task called `name`; None if it is not given, as a model names its own."""
    look_in_the_current_folder()
    return None if name is None else find_task(name)
