"""Configuration of a sweep: every combination of the values in its grids, repeated.

`dpsgd sweep --help` (`experiments/cli/questions/results.py`) shows a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from accounting.records import Ge, Le, Lt
from dpsgd.runs.records import build
from dpsgd.runs.spec import REGISTRIES, RunSpec, known_options
from dpsgd.runs.support import checked_spec
from experiments.cli.options import look_in_the_current_folder
from experiments.results.points import Better, ErrorBar
from experiments.results.table import WITH_NOISE
from experiments.sweeps.grid import GRID_OPTIONS, Grid
from samplers.registry import import_named

SHIPPED = Path(__file__).parent
"""Folder of the papers' experiments; a file can be named without path and suffix."""


class OfTask:
    """File that names the task to train, by name or a table of name and settings."""

    task: str | Mapping[str, Any]

    def check_task(self) -> None:
        """Raises ValueError unless the file names a task without data."""
        if not isinstance(self.task_name, str):
            raise ValueError("task: name is missing")
        if "data" in self.settings:
            raise ValueError("task: the command names the data, not the file")

    @property
    def task_name(self) -> Any:
        """Name of the task."""
        return self.task if isinstance(self.task, str) else self.task.get("name")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the task in the file."""
        table = {} if isinstance(self.task, str) else self.task
        return {name: value for name, value in table.items() if name != "name"}


@dataclass(frozen=True)
class Sweep(OfTask):
    """Sweep as its file describes it.

    With `repetitions` the runs draw their randomness from the operating system. With
    `insecure_seeds` the file reproduces its numbers, and no run has a guarantee: for public data
    only.
    """

    title: str
    """Title of the figure and the tables."""
    grid: tuple[Grid, ...]
    task: str | Mapping[str, Any] = "clicks"
    """Task by name, or a table of its name and settings."""
    repetitions: Annotated[int | None, Ge(1), Le(10_000)] = None
    """Independent runs of each combination."""
    insecure_seeds: tuple[Annotated[int, Ge(0), Lt(2**32)], ...] = ()
    """Seeds of reproducible runs, in place of repetitions. They void every guarantee."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options shared by all runs, see `dpsgd.RunSpec.of`."""
    headline: str | None = None
    """Metric to show. Default: the task's own."""
    better: Better | None = None
    """Direction in which the headline metric improves, if it is not the task's own."""
    error: ErrorBar = "standard_error"
    """Error bars of means: the standard error, or the standard deviation of a run."""

    def __post_init__(self) -> None:
        if (self.repetitions is None) == (not self.insecure_seeds):
            raise ValueError("give repetitions or insecure_seeds")
        if len(set(self.insecure_seeds)) < len(self.insecure_seeds):
            raise ValueError(f"insecure_seeds holds a seed twice: {list(self.insecure_seeds)}")
        if not self.grid:
            raise ValueError("grid is missing: give at least one [[grid]]")
        self.check_task()
        names = known_options().keys() - {*GRID_OPTIONS, "insecure_seed"}
        for name in self.run:
            if name in GRID_OPTIONS:
                raise ValueError(f"run: {name} belongs into a [[grid]]")
            if name not in names:
                raise ValueError(f"run: {name!a} is unknown; there are {', '.join(sorted(names))}")

    def showing(self, headline: str | None, better: Better | None) -> Sweep:
        """Returns the sweep with another headline metric.

        Args:
          headline: Name of the metric; None keeps it.
          better: Direction of better values; None keeps it, unless a metric is named.
        """
        if headline is not None:
            return dataclasses.replace(self, headline=headline, better=better)
        return self if better is None else dataclasses.replace(self, better=better)

    @property
    def panels(self) -> list[list[Grid]]:
        """Grids by panel.

        Grids with equal title, axis and tuned axes share a panel.
        """
        panels: dict[Any, list[Grid]] = {}
        for number, grid in enumerate(self.grid):
            panels.setdefault((grid.title or number, grid.x, grid.tune), []).append(grid)
        return list(panels.values())

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Reads a sweep from a file or by shipped name.

        Raises:
          ValueError: If it is invalid; the message names the file and the key.
          OSError: If it cannot be read.

        >>> [grid.x for grid in Sweep.read(Path("equal-privacy")).grid]
        ['target_epsilon', 'target_epsilon']
        """
        file = file_of(path)
        return cls.parse(file.read_bytes(), str(file))

    @classmethod
    def parse(cls, content: bytes, where: str) -> Sweep:
        """Returns the sweep that a TOML file describes.

        Args:
          content: Content of the file.
          where: Path of the file, for error messages.

        Raises:
          ValueError: If it is invalid; the message names the key.
        """
        fields = tables(content, where)
        if fields.keys() & {"target_epsilon", "mean_trials", "score"}:
            raise ValueError(f"{where} is the file of a private selection: add --private")
        shared = fields.get("run")
        grids = []
        for i, table in enumerate(fields["grid"], 1):
            grids.append(Grid.parse(table, f"{where}, grid {i}"))
            optimizer = shared.get("optimizer") if isinstance(shared, dict) else None
            if optimizer not in (None, "adam", "adamw") and "learning_rate" not in table:
                raise ValueError(
                    f"{where}, grid {i}: learning_rate is missing, and its default is Adam's"
                )
        return build(cls, {**fields, "grid": grids}, where)


@dataclass(frozen=True)
class PlannedRun:
    """Repetition of a cell, a combination of the values of a grid's axes."""

    cell: str
    """Name of the cell."""
    spec: RunSpec
    out: Path
    """Run directory."""


def plan(sweep: Sweep, folder: Path, where: str) -> list[PlannedRun]:
    """Returns a sweep's distinct runs in the file's order.

    Each repetition has its own initial parameters, equal for all cells: cells are compared from
    equal starts, and error bars include all randomness.

    Args:
      sweep: Sweep to plan.
      folder: Folder of the run directories.
      where: Path of the file, for error messages.

    Raises:
      ValueError: For a setting of the wrong type, or a configuration that cannot run.
    """
    seeds = sweep.insecure_seeds or (None,) * (sweep.repetitions or 0)
    cells = {name: options for grid in sweep.grid for name, options in grid.cells(where).items()}
    runs = []
    for (name, options), (number, seed) in itertools.product(cells.items(), enumerate(seeds)):
        # Calibration only if the sweep asks for it.
        settings = {"calibration": "none", **sweep.run, **options, "insecure_seed": seed}
        settings["bands"] = None if options["bands"] == 1 else options["bands"]
        if "non_private" in options:  # without the options of noise and clipping
            plain = {name: x for name, x in settings.items() if name not in WITH_NOISE}
            settings = plain | {"calibration": "none"}
        spec = checked_spec(settings, f"{where}, run")
        init_seed = spec.init_seed + (number if seed is None else seed)
        spec = dataclasses.replace(spec, init_seed=init_seed % 2**32)
        repetition = f"r{number}" if seed is None else f"seed{seed}"
        runs.append(PlannedRun(name, spec, folder / f"{name}-{repetition}"))
    return runs


def with_insecure_seed(content: bytes, seed: int, where: str) -> bytes:
    """Returns a sweep's file with a seed for each repetition, from `seed` on.

    Args:
      content: Content of the file.
      seed: First seed; every run becomes reproducible, and no run has a guarantee.
      where: Path of the file, for error messages.

    Raises:
      ValueError: If the file is invalid, or a seed is above 2**32 - 1.
    """
    sweep = Sweep.parse(content, where)
    count = sweep.repetitions or len(sweep.insecure_seeds)
    seeds = list(range(seed, seed + count))
    key = re.compile(
        rb"^[ \t]*(?:repetitions[ \t]*=[^\n]*|insecure_seeds[ \t]*=[ \t]*\[[^\]]*\])", re.MULTILINE
    )
    seeded = key.sub(f"insecure_seeds = {seeds}".encode(), content, count=1)
    Sweep.parse(seeded, f"{where} with --insecure-seed")
    return seeded


def tables(content: bytes, where: str) -> dict[str, Any]:
    """Parses a TOML file whose grids are tables.

    Args:
      content: Content of the file.
      where: Path of the file, for error messages.

    Raises:
      ValueError: If it is not TOML, or its grids are not tables; the message begins with `where`.

    >>> tables(b"[[grid]]\\nepochs = 2", "sweep.toml")
    {'grid': [{'epochs': 2}]}
    """
    try:
        fields = tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    grids = fields.setdefault("grid", [])
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{where}, grid: begin each grid with [[grid]], in double brackets")
    return fields


def import_parts(content: bytes, where: str) -> None:
    """Imports the modules of own parts that a file to run names.

    Args:
      content: Content of the file.
      where: Path of the file, for error messages.

    Raises:
      ValueError: If the file is not TOML, or a part cannot be used.
    """
    look_in_the_current_folder()
    fields = tables(content, where)
    grids = {f"grid {i}": grid for i, grid in enumerate(fields["grid"], 1)}
    for place, options in {**grids, "run": fields.get("run")}.items():
        if isinstance(options, dict):
            import_named(options, REGISTRIES, f"{where}, {place}")


def file_of(path: Path) -> Path:
    """Returns a sweep file by path or shipped name.

    Folders are ignored, so that `dpsgd sweep NAME store --out NAME` can be repeated.

    Raises:
      FileNotFoundError: If neither exists.

    >>> file_of(Path("equal-privacy")).name
    'equal-privacy.toml'
    """
    if path.exists() and not path.is_dir():
        return path
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}
    if str(path) not in shipped:
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}; shipped are {', '.join(shipped)}")
    return shipped[str(path)]
