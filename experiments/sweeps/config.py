"""A sweep as its file asks for it: every combination of the values in its grids, repeated.

`dpsgd sweep --help` (`experiments/cli/commands/sweep.py`) shows such a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from dpsgd.runs.recommendation import Settings
from dpsgd.runs.records import build, checked, near
from dpsgd.runs.spec import RunSpec, known_options
from dpsgd.runs.support import checked_spec
from experiments.results.metrics import Better
from experiments.results.table import (
    AXES,
    IN_SAMPLER,
    PRIVACY,
    WITH_NOISE,
    digits,
    sampler_settings,
)
from samplers.settings import SETTINGS, SamplerSettings

SHIPPED = Path(__file__).parent
"""The papers' experiments as files; a sweep can be asked for by the name of one."""

DEFAULTS: dict[str, Any] = {
    **{name: getattr(Settings, name) for name in ("batch_size", "epochs", "learning_rate")},
    "l2_clip_norm": Settings.l2_clip_norm,
    "bands": 1,
}
"""Axes of a grid that names no values for them."""

OUTSIDE_PRIVACY = ("l2_clip_norm", "bands")
"""Axes on which a run without privacy has no place, beside those of privacy."""

Cells = dict[str, dict[str, Any]]
"""Options of runs that are alike but for their randomness, by names fit for folders."""


def product(axes: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns every combination of the values of axes, each one value or a list, as options.

    Raises:
      ValueError: if an axis has no value or holds one twice, a number is not finite and positive,
        or a sampler is unknown or names a size.
    """
    lists = {}
    for name, given in axes.items():
        values = given if isinstance(given, list) else [given]
        if not values:
            raise ValueError(f"{where}: {name} needs a value at least")
        if any(values.count(value) > 1 for value in values):
            raise ValueError(f"{where}: {name} holds a value twice: {values}")
        for i, value in enumerate(values):
            number = name in AXES and isinstance(value, int | float)
            if number and not 0 < value <= sys.float_info.max:
                shown = f"{value!s:.20}"
                raise ValueError(f"{where}: {name}[{i}] must be finite and > 0, got {shown}")
        lists[name] = values
    lists["sampler"] = samplers_of(lists["sampler"], where)
    for name in IN_SAMPLER:
        lists[name] = [checked(v, int, f"{where}, {name}") for v in lists.get(name, ())] or [None]
    found = []
    for combination in itertools.product(*lists.values()):
        options = dict(zip(lists, combination, strict=True))
        sizes = {name: options.pop(name) for name in IN_SAMPLER}
        fields = {field.name for field in dataclasses.fields(options["sampler"])}
        own = {k: v for k, v in sizes.items() if k in fields and v is not None}
        found.append({**options, "sampler": dataclasses.replace(options["sampler"], **own)})
    return found


def samplers_of(given: Sequence[Any], where: str) -> list[SamplerSettings]:
    """Returns samplers by name, or by tables of a name and settings, with sizes yet to be set.

    Raises:
      ValueError: if there is no such sampler, or a size is among its own settings.
    """
    found: list[Any] = []
    for i, one in enumerate(given):
        at = f"{where}, sampler[{i}]"
        fields = dict(one) if isinstance(one, dict) else {"name": one}
        name = fields.pop("name", None)
        if not isinstance(name, str) or name not in SETTINGS:
            raise ValueError(f"{at}: there is no sampler {name!r}; there are {', '.join(SETTINGS)}")
        for axis in IN_SAMPLER:
            if axis in fields:
                raise ValueError(f"{at}: {axis} is an axis of the grid")
        found.append(build(SETTINGS[name], fields, at))
    return found


def name_of(options: Mapping[str, Any]) -> str:
    """Returns every value by which options differ from others, fit for a folder.

    >>> from samplers.settings import SETTINGS
    >>> options = {"learning_rate": 3e-3, "l2_clip_norm": 4.0, "bands": 1}
    >>> options["sampler"] = SETTINGS["poisson"](batch_size=1024, epochs=10)
    >>> name_of({**options, "noise_multiplier": 0.5})
    'poisson-sigma0.5-b1024-e10-lr0.003-c4'
    >>> name_of({**options, "non_private": True})  # nothing is clipped without noise
    'poisson-nonprivate-b1024-e10-lr0.003'
    >>> name_of({"sampler": SETTINGS["poisson"](), "train": "a/b|c"})
    'poisson-traina%2Fb%7Cc'
    """
    sampler, without = options["sampler"], options.get("non_private")
    sizes = {axis: getattr(sampler, axis, None) for axis in IN_SAMPLER}
    values = {**options, **sizes, **(dict.fromkeys(OUTSIDE_PRIVACY) if without else {})}
    others = [name for name in options if name not in (*AXES, "sampler", "non_private")]
    parts = [
        f"{AXES[axis].short if axis in AXES else axis}{_quoted(value)}"
        for axis in (*AXES, *others)
        if (value := values.get(axis)) is not None and (axis, value) != ("bands", 1)
    ]
    own = sampler_settings(sampler).split()
    return "-".join([sampler.name, *own, *(["nonprivate"] if without else []), *parts])


def _quoted(value: Any) -> str:
    parts = value if isinstance(value, tuple | list) else [value]
    return "+".join(quote(x, safe="") if isinstance(x, str) else digits(x) for x in parts)


@dataclass(frozen=True)
class Grid:
    """Runs that one panel of the figure shows: every combination of the values of its axes.

    Where `tune` names axes, the panel and the tables show for each point the values of them that
    are best together on the validation rows. Grids with one title are one panel.
    """

    x: str
    """Axis of the panel."""
    axes: Mapping[str, Any]
    """Values of options, each one value or a list, including the sampler."""
    non_private: bool = False
    """Also train without clipping and noise (only that, if no axis is about privacy)."""
    tune: tuple[str, ...] = ()
    """Axis or axes whose best values on the validation rows are shown."""
    title: str = ""
    """Title of the panel."""

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str) -> Grid:
        """Returns the grid that a table of a file asks for.

        Raises:
          ValueError: if it cannot be; the line begins with `where`.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {"axes"}
        axes = {name: value for name, value in table.items() if name not in own}
        mine = {k: v for k, v in table.items() if k in own}
        if isinstance(tune := mine.get("tune"), str):
            mine["tune"] = [tune]
        grid = build(cls, mine | {"axes": axes}, where)
        known = {*known_options(), *IN_SAMPLER} - {*Sweep.SEEDS, "non_private"}
        for name in axes:
            if name not in known:
                hint = near(name, known) or f": there are {', '.join(known)}"
                raise ValueError(f"{where}: {name!a} is unknown{hint}")
        given = [name for name in PRIVACY if name in axes]
        if len(given) > 1:
            raise ValueError(f"{where}: give {' or '.join(given)}, not both")
        if not (given or grid.non_private):
            raise ValueError(f"{where}: give {', '.join(PRIVACY)} or non_private = true")
        for role, one in (("x", grid.x), *(("tune", name) for name in grid.tune)):
            if one not in {**DEFAULTS, **axes}:
                there = ", ".join(map(repr, {**dict.fromkeys(AXES), **axes}))
                problem = "has no value here" if one in AXES else f"is none of {there}"
                raise ValueError(f"{where}, {role}: {one!a} {problem}")
        if grid.x in grid.tune:
            raise ValueError(f"{where}: x and tune are both {grid.x}: what is tuned is not seen")
        grid.cells(where)
        return grid

    def cells(self, where: str = "grid") -> Cells:
        """Returns every combination of the values of its axes.

        Raises:
          ValueError: for a value that cannot be; the line begins with `where`.
        """
        if "sampler" not in self.axes:
            raise ValueError(f"{where}: sampler is missing")
        private = any(name in self.axes for name in PRIVACY)
        found = product({**DEFAULTS, **self.axes}, where) if private else []
        if self.non_private:
            # Without privacy nothing is clipped: one cell, whatever norms the grid has.
            axes, without = {**DEFAULTS, **self.axes}, {*PRIVACY, *WITH_NOISE}
            rest = {name: values for name, values in axes.items() if name not in without}
            rest |= {name: DEFAULTS[name] for name in OUTSIDE_PRIVACY}
            found += [{**options, "non_private": True} for options in product(rest, where)]
        return {name_of(options): options for options in found}


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
    """Title of the figure and the tables."""
    grid: tuple[Grid, ...]
    task: str | Mapping[str, Any] = "clicks"
    """Task by name, or a table of its name and settings."""
    repetitions: int | None = None
    """Independent runs of each combination."""
    insecure_seeds: tuple[int, ...] = ()
    """Seeds of reproducible runs, in place of repetitions. They void every guarantee."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options shared by all runs, see `dpsgd.RunSpec.of`."""
    headline: str | None = None
    """Metric to show. Default: the task's own."""
    better: Better | None = None
    """Direction in which the headline metric improves, if it is not the task's own."""

    OF_GRID: ClassVar[tuple[str, ...]] = ("sampler", *AXES, "non_private")
    """Options of a run that a grid decides."""
    SEEDS: ClassVar[tuple[str, ...]] = ("insecure_seed",)
    """Options of a run that neither a grid nor all runs have."""

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
        known = known_options().keys() - {*self.OF_GRID, *self.SEEDS}
        for name in self.run:
            if name in self.OF_GRID:
                raise ValueError(f"run: {name} belongs into a [[grid]]")
            if name not in known:
                raise ValueError(f"run: {name!a} is unknown; there are {', '.join(sorted(known))}")

    @property
    def panels(self) -> list[list[Grid]]:
        """The grids of each panel: one, or those that share its title, axis and tuned axes."""
        found: dict[Any, list[Grid]] = {}
        for number, grid in enumerate(self.grid):
            found.setdefault((grid.title or number, grid.x, grid.tune), []).append(grid)
        return list(found.values())

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
        if fields.keys() & {"target_epsilon", "mean_trials", "score"}:
            raise ValueError(f"{where} is the file of a private selection: add --private")
        shared = fields.get("run")
        grids = []
        for i, table in enumerate(fields["grid"], 1):
            grids.append(Grid.parse(table, f"{where}, grid {i}"))
            adam = not isinstance(shared, dict) or shared.get("optimizer", "adam") == "adam"
            if not adam and "learning_rate" not in table:
                raise ValueError(
                    f"{where}, grid {i}: learning_rate is missing, and its default is Adam's"
                )
        return build(cls, {**fields, "grid": grids}, where)


@dataclass(frozen=True)
class PlannedRun:
    """One repetition of a cell: a combination of the values of a grid's axes."""

    cell: str
    """Name of the cell."""
    spec: RunSpec
    out: Path
    """Run directory."""


def plan(sweep: Sweep, folder: Path, where: str) -> list[PlannedRun]:
    """Returns the runs of a sweep, each once, in the order of its file.

    The initial parameters of a repetition are its own, and alike for all cells: so that cells are
    compared from the same beginnings, and error bars hold all that is random.

    Raises:
      ValueError: for a setting of the wrong type, or a configuration that cannot be run.
    """
    seeds = sweep.insecure_seeds or (None,) * (sweep.repetitions or 0)
    cells = {name: options for grid in sweep.grid for name, options in grid.cells(where).items()}
    runs = []
    for (name, options), (number, seed) in itertools.product(cells.items(), enumerate(seeds)):
        # What a sweep does not ask for is no part of what it compares.
        settings = {"calibration": "none", **sweep.run, **options, "insecure_seed": seed}
        settings["bands"] = None if options["bands"] == 1 else options["bands"]
        if "non_private" in options:  # asked of all runs, and this one has no noise and no clipping
            kept = {name: x for name, x in settings.items() if name not in WITH_NOISE}
            settings = kept | {"calibration": "none"}
        spec = checked_spec(settings, f"{where}, run")
        begun = spec.init_seed + (number if seed is None else seed)
        spec = dataclasses.replace(spec, init_seed=begun % 2**32)
        repetition = f"r{number}" if seed is None else f"seed{seed}"
        runs.append(PlannedRun(name, spec, folder / f"{name}-{repetition}"))
    return runs


def tables(content: bytes, where: str) -> dict[str, Any]:
    """Returns what a TOML file holds, with its grids as a list of tables.

    Raises:
      ValueError: if it is not TOML, or its grids are no tables; the line begins with `where`.
    """
    try:
        fields = tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    grids = fields.setdefault("grid", [])
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{where}, grid: each begins with [[grid]], in two pairs of brackets")
    return fields


def file_of(path: Path, folder: Path = SHIPPED) -> Path:
    """Returns `path` if there is such a file, or the one of that name that is shipped in `folder`.

    A folder is no such file: `dpsgd sweep NAME store --out NAME` can be said again.

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
