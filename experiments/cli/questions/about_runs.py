"""Options of a run: its sampler, its settings, its task and its sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from accounting.records import (
    Count,
    field_texts,
    named,
)
from dpsgd.runs.spec import OWN, PARTS, RunSpec, known_options, part_options
from dpsgd.runs.support import check
from experiments.cli.options import (
    Option,
    build,
    options_of,
    word_of,
)
from experiments.cli.questions import Question
from experiments.cli.tasks import DEFAULT, find_task, load_kind, needs_data
from samplers import Population, UnitTree
from samplers.settings import DEFAULTS, SETTINGS, settings_of
from samplers.tree import TreeShape

FOR_PROGRAMS = {
    "checkpoint_seconds": "the default suits runs of any length",
    "clip_gamma": "the default suits gradients of any size",
    "clip_shares": "groups get equal shares",
    "coefficients": "--bands uses the coefficients of the square root",
    "flush_every": "it follows from the tables' size",
    "init_seed": "only repeated runs need several",
    "optimistic": "it serves studies of shuffling",
    "weight_decay": "the default is optax's; sweeps compare others",
}
"""Options of a run that only Python and sweep files can set, with the reason."""

ORDER = (
    *("options", "sampler options", "privacy options", "optimizer options", "task options"),
    *("run options", "clipping options", "average options", "noise options", "tables options"),
)
"""Groups of options in the order of the help, newcomers' groups first."""

_GROUPS = {"target_delta": "privacy", "l2_clip_norm": "optimizer"}
"""Groups of options outside the parts of `RunSpec`; the default is "run"."""


# --- Samplers and runs as options -----------------------------------------------------------------


def sampler_options(name: str | None) -> list[Option]:
    """Returns the option `sampler` and its samplers' options.

    Args:
      name: Name of the sampler; None for the options of all samplers.
    """
    names = ", ".join(SETTINGS)
    text = f"Sampler, also as sampler:NAME: {names}, or your own as module:Class. "
    text += "balls-and-bins and poisson need the least noise."
    options_by_name = {"sampler": Option("sampler", str, MISSING, text)}
    kinds = [settings_of(load_kind("sampler", name))] if name else list(SETTINGS.values())
    owners: dict[str, list[str]] = {}
    for kind in kinds:
        texts = field_texts(kind.sampler)
        for option in options_of(kind, "sampler options"):
            text, default = texts.get(option.name, ""), option.default
            if option.name in DEFAULTS:
                chosen = f"chosen by the task in `dpsgd train`, else {DEFAULTS[option.name]}"
                text = f"{text.rstrip('.')}. Default: {chosen}."
            if not name and default is MISSING:
                default = None
            options_by_name.setdefault(
                option.name, dataclasses.replace(option, text=text, default=default)
            )
            owners.setdefault(option.name, []).append(kind.name)
    for option_name, having in owners.items():
        if len(having) < len(kinds):
            text = f"{options_by_name[option_name].text} (For {', '.join(having)}.)"
            options_by_name[option_name] = dataclasses.replace(
                options_by_name[option_name], text=text
            )
    return list(options_by_name.values())


def run_options(*names: str, **defaults: Any) -> dict[str, Any]:
    """Returns options of a run with their defaults.

    Args:
      *names: Options that have the default of `RunSpec`.
      **defaults: Other options with their defaults; MISSING for required options.

    >>> run_options("target_delta", calibration="none")
    {'target_delta': None, 'calibration': 'none'}
    """
    return {**{name: known_options()[name].default for name in names}, **defaults}


def options_of_run(defaults: Mapping[str, Any]) -> list[Option]:
    """Returns options of a run, grouped by part of `RunSpec`.

    Args:
      defaults: Default of each option by name.
    """
    options = []
    for name, default in defaults.items():
        option = known_options()[name]
        having = (
            part_name
            for part_name, kinds in PARTS.items()
            if any(issubclass(kind, option.owner) for kind in kinds.values())
        )
        part_name = name if name in PARTS else next(having, _GROUPS.get(name, "run"))
        about = (option.owner.__doc__ or "").partition("\n")[0]
        text = field_texts(option.owner).get(option.field, about)
        options.append(Option(name, option.type, default, text, f"{part_name} options"))
    return options


@functools.lru_cache(maxsize=1024)
def with_names(text: str) -> str:
    """Replaces names of options by their flags.

    >>> with_names("Needs batch_size and an epsilon.")
    'Needs --batch-size and an epsilon.'
    """
    of_samplers = (field.name for kind in SETTINGS.values() for field in dataclasses.fields(kind))
    names = {*known_options(), *of_samplers}
    return re.sub(
        r"\b[a-z0-9]+(_[a-z0-9]+)+\b",
        lambda match: f"--{match[0].replace('_', '-')}" if match[0] in names else match[0],
        text,
    )


def with_options_of_run(
    options: Sequence[Option], offered: Mapping[str, Any], words: Sequence[str]
) -> list[Option]:
    """Returns the options of a command, of a run, and of the own parts that it names.

    Args:
      options: Options of the command itself.
      offered: Default of each option of a run by name.
      words: Words after the command, which may name own parts.
    """
    options = joined_options([*options, *options_of_run(offered)], "sampler")
    for flag in filter(offered.__contains__, OWN):
        if ":" in (name := word_of(words, flag) or ""):
            kind = load_kind(flag, name)
            settings = options_of(kind, f"{flag} options")
            settings = [option for option in settings if option.name not in part_options(kind)]
            options = joined_options([*options, *settings], flag)
    return options


def read_options_of_run(offered: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for `RunSpec.of`, own parts as tables of name and settings.

    Args:
      offered: Default of each option of a run by name.
      values: Values of the command's options by name.
    """
    options = {name: values[name] for name in offered}
    for flag in filter(options.__contains__, OWN):
        if ":" in (name := options[flag]):
            keys = values.keys() & named(load_kind(flag, name))
            options[flag] = {"name": name, **{key: values[key] for key in keys}}
    return options


@dataclass(frozen=True, kw_only=True)
class AboutRun(Question):
    """Base of questions about a run, given by sampler and options."""

    spec: RunSpec

    MADE: ClassVar[tuple[str, ...]] = ("spec", "settings")
    ABOUT_RUN: ClassVar[bool] = True

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the command's options of `RunSpec`, with defaults."""
        raise NotImplementedError

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command and the sampler.

        Args:
          words: Words after the command, which may name a sampler.
        """
        offered = cls.offered()
        sampler_flags = sampler_options(word_of(words, "sampler"))
        # The length of a cycle follows from the bands.
        sampler_flags = [
            option
            for option in sampler_flags
            if option.name != "cycle_length" or "bands" not in offered
        ]
        return with_options_of_run([*super().options(words), *sampler_flags], offered, words)

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns which samplers or programs set an unknown option.

        Args:
          name: Name of the option in Python's spelling.
        """
        if name in known_options() and name not in cls.offered():
            reason = f" ({FOR_PROGRAMS[name]})" if name in FOR_PROGRAMS else ""
            return f"only Python and sweep files can set {name}{reason}"
        owners = [key for key, kind in SETTINGS.items() if name in kind.__dataclass_fields__]
        return f"it belongs to sampler {' or '.join(owners)}" if owners else ""

    @classmethod
    def build(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Builds the question from option values.

        Raises:
          ValueError: For choices that do not go together.
        """
        sampler = build(settings_of(load_kind("sampler", values["sampler"])), values)
        spec = RunSpec.of(sampler, **read_options_of_run(cls.offered(), values))
        check(spec)
        return super().build(values, spec=spec, **others)


def joined_options(options: Sequence[Option], part: str) -> list[Option]:
    """Returns options sorted by group, with flags in texts.

    Args:
      options: Options of the command, and of a sampler or a task.
      part: Option that chose the sampler or the task, for errors.

    Raises:
      ValueError: If a setting of a sampler or a task has the name of another option.
    """
    names = [option.name for option in options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--{part}: its setting {twice[0]} has the name of an option of the command: rename it"
        )
    options = [dataclasses.replace(option, text=with_names(option.text)) for option in options]
    return sorted(options, key=lambda o: (*ORDER, o.group).index(o.group))


@dataclass(frozen=True, kw_only=True)
class OfTask(AboutRun):
    """Base of questions about a run of a task.

    Attributes:
      task: Task to train: clicks, images, ratings, or your own as module:object (imported from the
        current folder or Python's path). Its settings are further options.
    """

    task: str = DEFAULT
    settings: Mapping[str, Any]

    PLACED: ClassVar[bool] = True

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command, sampler and task.

        Args:
          words: Words after the command, which may name a sampler and a task.
        """
        command_options = super().options(words)
        task, sampler = word_of(words, "task") or DEFAULT, word_of(words, "sampler")
        for option in cls.task_options(task, sampler):
            if option.name == "data":
                default = None if option.default is MISSING and not cls.PLACED else option.default
                option = dataclasses.replace(option, place=cls.PLACED, default=default)
            command_options.append(option)
        return joined_options(command_options, "task")

    @classmethod
    def task_options(cls, task: str, sampler: str | None) -> list[Option]:
        """Returns the settings of a task as options.

        A cap on the rows of users is an option for samplers that protect users.

        Args:
          task: Name of the task.
          sampler: Name of the sampler; None if it is not known yet.
        """
        if not isinstance(kind := find_task(task), type):
            return []
        options, cap = options_of(kind, "task options"), "max_contributions"
        capped = sampler is None or cap in settings_of(load_kind("sampler", sampler)).of_data()
        if capped and cap not in cls.__dataclass_fields__:
            return options
        return [option for option in options if option.name != cap or option.default is not None]

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns which samplers or programs set an unknown option."""
        if name == "max_contributions":
            return "it belongs to sampler user-poisson, on a table prepared with --user"
        return super().elsewhere(name)

    @classmethod
    def build(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Builds the question from option values."""
        options = cls.task_options(values["task"], values["sampler"])
        settings = {option.name: values[option.name] for option in options}
        return super().build(values, settings=settings, **others)

    @cached_property
    def subject(self) -> Any:
        """Task of the run."""
        task = find_task(self.task)
        return build(task, self.settings) if isinstance(task, type) else task

    @property
    def lacks_data(self) -> bool:
        """True if the task requires `data` and has none."""
        task = find_task(self.task)
        return isinstance(task, type) and needs_data(task) and self.settings["data"] is None


@dataclass(frozen=True, kw_only=True)
class OfSizes(AboutRun):
    """Base of questions about a run on data of public sizes.

    Attributes:
      num_examples: Number of training examples (public).
      unit: Meaning of one row. user: all data of one user, clipped as one.
      max_contributions: Largest number of examples of one user, for user-poisson.
      num_users: Number of users, for the default delta of user-poisson.
      sizes: Children per unit on each level, for samplers of units within units. If sizes differ,
        give those on the path to the example that is drawn most often.
      units: Name of the units on each level, for the guarantee's sentence.
      largest_unit: Examples of the largest unit. Default: all units are equally large.
    """

    num_examples: Count
    unit: Literal["example", "user"] = "example"
    max_contributions: Count | None = None
    num_users: Count | None = None
    sizes: tuple[Count, ...] = ()
    units: tuple[str, ...] = ()
    largest_unit: Count | None = None

    def population(self, *, drawn: bool = False) -> Population:
        """Returns the population of the run.

        Args:
          drawn: Whether batches are drawn; all units of a level then have the same size.

        Raises:
          ValueError: If sizes are impossible, missing, or not used by the sampler.
        """
        levels, needed = len(self.sizes) - 1, self.spec.sampler.of_data()
        for name, value in {
            "tree": self.sizes,
            "max_contributions": self.max_contributions,
            "num_users": self.num_users,
        }.items():
            option = "--sizes" if name == "tree" else f"--{name.replace('_', '-')}"
            if value and name not in needed:
                raise ValueError(f"sampler:{self.spec.sampler.name} takes no {option}")
            if not value and name in needed and name != "num_users":
                raise ValueError(f"sampler:{self.spec.sampler.name} needs {option}")
        if self.units and len(self.units) != levels:
            raise ValueError(
                f"--units needs {max(levels, 0)} names, one for each level of --sizes above the "
                f"examples, got {self.units}"
            )
        if self.sizes and self.unit != "example":
            raise ValueError(f"--unit {self.unit}: the rows of --sizes are examples")
        if self.largest_unit is not None and self.largest_unit < (*self.sizes, 1)[levels]:
            raise ValueError(f"--largest-unit is less than the smallest unit: {self.largest_unit}")
        tree: UnitTree | TreeShape | None = None
        names = self.units or ("unit",) * levels
        if self.sizes and drawn:
            if math.prod(self.sizes) != self.num_examples:
                raise ValueError(
                    f"--num-examples must be {math.prod(self.sizes)}, the product of --sizes: "
                    "units of one size are drawn"
                )
            tree = UnitTree.even(self.sizes, names)
        elif self.sizes:
            tree = TreeShape(
                digest="",
                names=names,
                num_leaves=self.num_examples,
                most_leaves=self.largest_unit or self.sizes[-1],
                mean_leaves=float(self.sizes[-1]),
                worst_paths=(self.sizes,),
            )
        return Population(
            self.num_examples, self.unit, self.max_contributions, self.num_users, tree
        )
