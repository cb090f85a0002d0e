"""A sweep as its file asks for it: every combination of the values in its grids, repeated.

`dpsgd sweep --help` (`experiments/cli/commands/sweep.py`) shows such a file.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from dpsgd.runs.recommendation import Settings
from dpsgd.runs.records import build
from dpsgd.runs.spec import known_options
from experiments.results.metrics import Better
from experiments.results.table import AXES, IN_SAMPLER, PRIVACY
from samplers.settings import SETTINGS, SamplerSettings

AxisName = Literal[
    "noise_multiplier",
    "target_epsilon",
    "target_advantage",
    "batch_size",
    "epochs",
    "learning_rate",
    "l2_clip_norm",
    "bands",
]
Integers = int | tuple[int, ...]
Numbers = float | tuple[float, ...]


SHIPPED = Path(__file__).parent
"""The papers' experiments as files; a sweep can be asked for by the name of one."""


@dataclass(frozen=True)
class Grid:
    """Runs that one panel of the figure shows: every combination of the values of its axes.

    An axis takes one value or a list. Where `tune` names an axis, the panel and the tables show for
    each point the value of it that is best on the validation rows.
    """

    x: AxisName
    """The axis of the panel."""
    sampler: str | Mapping[str, Any] | tuple[str | Mapping[str, Any], ...]
    """Samplers by name, or tables of a name and the sampler's own settings."""
    noise_multiplier: Numbers = ()
    """Noise of the runs; this, target_epsilon or target_advantage."""
    target_epsilon: Numbers = ()
    """Each run has the smallest noise that certifies this for its sampler."""
    target_advantage: Numbers = ()
    """The same of the advantage of a membership attack, in (0, 1)."""
    non_private: bool = False
    """Also (or, without the three above, only) train without clipping and noise."""
    batch_size: Integers = Settings.batch_size
    epochs: Integers = Settings.epochs
    learning_rate: Numbers = Settings.learning_rate
    l2_clip_norm: Numbers = Settings.l2_clip_norm
    bands: Integers = 1
    """Steps over which noise is correlated; 1 is independent noise."""
    tune: AxisName | None = None
    """Axis whose best value on the validation rows is shown."""
    title: str = ""
    """Title of the panel."""

    def __post_init__(self) -> None:
        for name in AXES:
            given = getattr(self, name)
            values = given if isinstance(given, tuple) else (given,)
            for i, value in enumerate(values):
                if not 0 < value <= sys.float_info.max:
                    shown = f"{value!s:.20}"
                    raise ValueError(f"{name}[{i}] must be finite and > 0, got {shown}")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} holds a value twice: {list(values)}")
            kind = int if name in (*IN_SAMPLER, "bands") else float
            object.__setattr__(self, name, tuple(map(kind, values)))
        object.__setattr__(self, "sampler", self._samplers)
        if not self.samplers():
            raise ValueError("sampler names none")
        given = [name for name in PRIVACY if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"give {' or '.join(given)}, not both")
        if not (given or self.non_private):
            raise ValueError(f"give {', '.join(PRIVACY)} or non_private = true")
        for name in {*AXES} - {*PRIVACY} | {self.x}:
            if not getattr(self, name):
                raise ValueError(f"{name} needs a value at least")
        if self.tune == self.x:
            raise ValueError(f"x and tune are both {self.x}: what is tuned is not seen")

    def samplers(self) -> list[SamplerSettings]:
        """Returns the samplers that are asked for, with sizes yet to be set."""
        return samplers_of(self._samplers)

    @property
    def _samplers(self) -> tuple[str | Mapping[str, Any], ...]:
        return self.sampler if isinstance(self.sampler, tuple) else (self.sampler,)


def samplers_of(given: Sequence[str | Mapping[str, Any]]) -> list[SamplerSettings]:
    """Returns samplers by name, or by tables of a name and settings, with sizes yet to be set.

    Raises:
      ValueError: if there is no such sampler, or a size is among its own settings.
    """
    found: list[Any] = []
    for i, one in enumerate(given):
        fields = {"name": one} if isinstance(one, str) else dict(one)
        name = fields.pop("name", None)
        if not isinstance(name, str) or name not in SETTINGS:
            raise ValueError(
                f"sampler[{i}]: there is no sampler {name!r}; there are {', '.join(SETTINGS)}"
            )
        for axis in IN_SAMPLER:
            if axis in fields:
                raise ValueError(f"sampler[{i}]: {axis} is an axis of the grid")
        found.append(build(SETTINGS[name], fields, f"sampler[{i}]"))
    return found


class OfTask:
    """A file that names what is trained: a task by name, or a table of a name and its settings."""

    task: str | Mapping[str, Any]

    def check_task(self) -> None:
        """Raises ValueError if no task is named, or its data are."""
        if not isinstance(self.task_name, str):
            raise ValueError("task: name is missing")
        if "data" in self.settings:
            raise ValueError("task: the command names the data, not the file")

    @property
    def task_name(self) -> Any:
        """The name of the task."""
        return self.task if isinstance(self.task, str) else self.task.get("name")

    @property
    def settings(self) -> dict[str, Any]:
        """The task's own settings, as far as they are given."""
        given = {} if isinstance(self.task, str) else self.task
        return {name: value for name, value in given.items() if name != "name"}


@dataclass(frozen=True)
class Sweep(OfTask):
    """What a file asks for.

    The runs of a sweep with `repetitions` draw their randomness from the operating system, as any
    run does. With `insecure_seeds` the same file gives the same numbers again, and no run has a
    guarantee: that is for public data only.
    """

    title: str
    """Title of figure and tables."""
    grid: tuple[Grid, ...]
    task: str | Mapping[str, Any] = "clicks"
    """What is trained: a task by name, or a table of a name and the task's own settings."""
    repetitions: int | None = None
    """How many runs of each combination, independent of one another."""
    insecure_seeds: tuple[int, ...] = ()
    """Reproducible runs, one a seed, in place of repetitions: they void every guarantee."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options that all runs share, see `dpsgd.RunSpec.of`."""
    headline: str | None = None
    """The metric that is shown; by default the one that the task puts first."""
    better: Better | None = None
    """Which of its values are better, if that is not the task's own metric."""

    GRID: ClassVar[tuple[str, ...]] = ("sampler", *AXES, "non_private")
    """Options of a run that a grid decides."""
    OWN: ClassVar[tuple[str, ...]] = (*GRID, "insecure_seed", "budget_minutes")
    """Options of a run that a grid, or the seeds, decide."""

    def __post_init__(self) -> None:
        if (self.repetitions is None) == (not self.insecure_seeds):
            raise ValueError("give repetitions or insecure_seeds")
        if self.repetitions is not None and not 1 <= self.repetitions <= 10_000:
            raise ValueError(f"repetitions must lie in [1, 10000], got {self.repetitions}")
        for i, seed in enumerate(self.insecure_seeds):
            if not 0 <= seed < 2**32:
                raise ValueError(f"insecure_seeds[{i}] must lie in [0, 2^32), got {seed}")
        if len(set(self.insecure_seeds)) < len(self.insecure_seeds):
            raise ValueError(f"insecure_seeds holds a seed twice: {list(self.insecure_seeds)}")
        if not self.grid:
            raise ValueError("grid is missing: give at least one [[grid]]")
        self.check_task()
        known = known_options().keys() - set(self.OWN)
        for name in self.run:
            if name in self.GRID:
                raise ValueError(f"run: {name} belongs into a [[grid]]")
            if name not in known:
                raise ValueError(f"run: {name!a} is unknown; there are {', '.join(sorted(known))}")

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Reads a sweep from a TOML file, or from the shipped one of that name.

        Raises:
          ValueError: if it asks for something that is not there or not possible; the line names the
            file and the key.
          OSError: if it cannot be read.
        """
        file = file_of(path)
        return cls.parse(file.read_bytes(), str(file))

    @classmethod
    def parse(cls, content: bytes, where: str) -> Sweep:
        """Returns the sweep that is asked for by `content`, a TOML file.

        Raises:
          ValueError: if it asks for something that is not there or not possible; the line begins
            with `where` and names the key.
        """
        fields = tables(content, where)
        if fields.keys() & {"target_epsilon", "target_advantage", "mean_trials", "score"}:
            raise ValueError(f"{where} is the file of a private selection: add --private")
        of_runs = known_options().keys() - set(cls.OWN)
        axes = {f.name for f in dataclasses.fields(Grid)}
        for i, table in enumerate(fields["grid"], 1):
            if found := sorted(table.keys() & of_runs - axes):
                raise ValueError(f"{where}, grid {i}: {found[0]} is no axis, it belongs into [run]")
        grids = [
            build(Grid, table, f"{where}, grid {i}") for i, table in enumerate(fields["grid"], 1)
        ]
        shared = fields.get("run")
        if isinstance(shared, dict) and shared.get("optimizer", "adam") != "adam":
            for i, table in enumerate(fields["grid"], 1):
                if "learning_rate" not in table:
                    raise ValueError(
                        f"{where}, grid {i}: learning_rate is missing, and its default is Adam's"
                    )
        return build(cls, {**fields, "grid": grids}, where)


def tables(content: bytes, where: str) -> dict[str, Any]:
    """Returns what a TOML file holds, with its grids as a list.

    Raises:
      ValueError: if it is not TOML, or its grids are no tables; the line begins with `where`.
    """
    try:
        fields = tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    if not isinstance(fields.setdefault("grid", []), list):
        raise ValueError(f"{where}, grid: each begins with [[grid]], in two pairs of brackets")
    return fields


def file_of(path: Path, folder: Path = SHIPPED) -> Path:
    """Returns `path` if there is such a file, or the one of that name that is shipped in `folder`.

    A folder is no such file: `dpsgd sweep no-noise store --out no-noise` can be said again.

    Raises:
      FileNotFoundError: if there is neither.
    """
    if path.exists() and not path.is_dir():
        return path
    shipped = {file.stem: file for file in sorted(folder.glob("*.toml"))}
    others = {file.stem for file in SHIPPED.rglob("*.toml")} - shipped.keys()
    if str(path) in others:
        mend = "is a private selection: add" if folder == SHIPPED else "shows every run: leave out"
        raise ValueError(f"{path} {mend} --private")
    if str(path) not in shipped:
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}; shipped are {', '.join(shipped)}")
    return shipped[str(path)]
