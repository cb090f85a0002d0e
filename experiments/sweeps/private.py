"""Private selection from a file: `dpsgd sweep --private`.

Trials differ in the chosen options, and one model is released: see `dpsgd.selection.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accounting import TrialCount
from dpsgd.runs.records import build
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.support import checked_spec
from dpsgd.runs.task import Task
from experiments.results.points import Better
from experiments.sweeps.config import OfTask, tables
from experiments.sweeps.grid import product

_REFUSED = ("non_private", "insecure_seed")


@dataclass(frozen=True)
class PrivateSweep(OfTask):
    """Private selection as its file describes it.

    A grid's candidates are all combinations of its values, a list standing for several; it may hold
    any setting of a run. All candidates of all grids are equally likely to be a trial.
    """

    grid: tuple[Mapping[str, Any], ...]
    task: str | Mapping[str, Any] = "clicks"
    """Task by name, or a table of its name and settings."""
    target_epsilon: float | None = None
    """Epsilon of the whole selection; or give noise_multiplier of the trials."""
    mean_trials: float = 10.0
    """Mean number of trials."""
    trials_shape: float = 0.0
    """Shape of the distribution of the number of trials: 0 is logarithmic, 1 geometric."""
    score: str | None = None
    """Metric that selects. Default: the task's headline on the validation rows."""
    better: Better | None = None
    """Direction in which the score improves, if it is not the task's own metric."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options shared by all candidates, see `dpsgd.RunSpec.of`."""
    title: str = ""

    def __post_init__(self) -> None:
        self.check_task()
        if not self.grid:
            raise ValueError("grid is missing: give at least one [[grid]]")
        for name in ("target_epsilon", *_REFUSED):
            if name in self.run or any(name in grid for grid in self.grid):
                advice = "applies to the whole selection; give it above all tables"
                raise ValueError(f"{name} {'voids the guarantee' if name in _REFUSED else advice}")
        TrialCount(self.mean_trials, self.trials_shape)

    @property
    def count(self) -> TrialCount:
        """Law of the number of trials."""
        return TrialCount(self.mean_trials, self.trials_shape)

    @classmethod
    def parse(cls, content: bytes, where: str) -> PrivateSweep:
        """Parses a private selection from a TOML file.

        Args:
          content: Content of the file.
          where: Path of the file, for error messages.

        Raises:
          ValueError: If the file is invalid; the message begins with `where` and names the key.

        >>> content = b'[[grid]]\\nnoise_multiplier = 0.5\\nepochs = [1, 2]'
        >>> len(PrivateSweep.parse(content, "search.toml").candidates("search.toml"))
        2
        """
        fields = tables(content, where)
        if "repetitions" in fields or "insecure_seeds" in fields:
            raise ValueError(
                f"{where} is the file of a sweep that shows every run: leave out --private, or "
                "write the file of a private selection (docs/how-to/private-selection.md)"
            )
        return build(cls, fields, where)

    def candidates(self, where: str) -> list[RunSpec]:
        """Returns the distinct candidates in the file's order.

        Args:
          where: Path of the file, for error messages.

        Raises:
          ValueError: For an invalid setting; the message begins with `where`.
        """
        specs: dict[str, RunSpec] = {}
        for number, grid in enumerate(self.grid, 1):
            place = f"{where}, grid {number}"
            axes = {"sampler": "balls-and-bins", **grid}
            for options in product(axes, place):
                spec = checked_spec(
                    {**self.run, **options, "target_epsilon": self.target_epsilon}, place
                )
                specs.setdefault(repr(spec), spec)
        return list(specs.values())

    def scored(self, task: Task, where: str) -> tuple[str, Better]:
        """Returns the metric that selects, and its direction.

        Args:
          task: Task of the trials.
          where: Path of the file, for error messages.

        Raises:
          ValueError: If neither file nor task states them, or the metric is on training rows.
        """
        description = task.describe()
        headline = str(description.get("headline") or "")
        own_score = f"validation_{headline.partition('_')[2]}" if "_" in headline else None
        score = self.score or own_score
        if score is None:
            raise ValueError(f"{where}: score is missing, and the task names no headline")
        if score.startswith("train"):
            raise ValueError(
                f"{where}: score: {score} is measured on protected rows; choose one "
                "on validation rows"
            )
        same = score.partition("_")[2] == headline.partition("_")[2]
        better = self.better or (description.get("better") if same else None)
        if better not in ("higher", "lower"):
            raise ValueError(f'{where}: better is missing: "higher" or "lower" values of {score}?')
        return score, better
