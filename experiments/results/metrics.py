"""Headline metric of runs, and its better direction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dpsgd.runs.report import label

if TYPE_CHECKING:
    from experiments.results.table import Table

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Headline:
    """Metric that tables and figures show first.

    Attributes:
      name: Name of the metric, "<split>_<metric>".
      better: Direction of better values; None if neither the task nor the user states it.
    """

    name: str
    better: Better | None = None

    @classmethod
    def choose(
        cls, table: Table, name: str | None = None, better: Better | None = None
    ) -> Headline:
        """Chooses the named metric, or by default the task's own.

        If the runs lack the task's metric, the default is their first.

        Args:
          table: Table of runs.
          name: Name of the metric.
          better: Direction of better values; by default the task's.

        Raises:
          ValueError: If nothing is measured, or no metric of that name.
        """
        metrics, task_metric = table.metrics, next(iter(table.values("headline")), None)
        if name is not None and name not in metrics:
            raise ValueError(f"unknown metric {name!r}; choose of {', '.join(metrics) or 'none'}")
        if not metrics:
            raise ValueError("the task measures no metrics, so runs cannot be compared")
        chosen = str(name or (task_metric if task_metric in metrics else metrics[0]))
        direction = next(iter(table.values("better")), None) if chosen == task_metric else None
        return cls(chosen, better or (direction if direction in ("higher", "lower") else None))

    @property
    def label(self) -> str:
        """Name of the metric for people."""
        return label(self.name)

    @property
    def split(self) -> str:
        """Split of its rows; empty if its name has none."""
        return self.name.partition("_")[0] if "_" in self.name else ""

    @property
    def rows(self) -> str:
        """Rows of the metric, in words."""
        return f"the {self.split} rows" if self.split else "the rows that it is measured on"

    def merit(self, value: float | None, undefined: int = 0) -> tuple[int, float]:
        """Returns a tuple that is higher for better means.

        Fewer diverged runs come first: the mean of the other runs alone would favour settings that
        diverge, as it averages the lucky ones.

        >>> Headline("test_log_loss", "lower").merit(0.4)
        (0, -0.4)

        Args:
          value: Mean of the runs with a number, if any.
          undefined: Number of diverged runs.
        """
        sign = -1.0 if self.better == "lower" else 1.0
        return -undefined, -math.inf if value is None else sign * value

    def on_split(self, split: str, metrics: Iterable[str]) -> Headline | None:
        """Returns the metric on another split; None if unmeasured.

        Args:
          split: Name of the split.
          metrics: Names of the measured metrics.

        >>> Headline("test_auc").on_split("validation", ["validation_auc"]).name
        'validation_auc'
        """
        name = f"{split}_{self.name.partition('_')[2]}"
        return Headline(name, self.better) if name in metrics else None

    def beside(self, metrics: Iterable[str]) -> list[str]:
        """Returns this metric and others on its split.

        >>> Headline("test_auc").beside(["test_auc", "train_auc", "test_log_loss"])
        ['test_auc', 'test_log_loss']
        """
        further_names = [n for n in metrics if n != self.name and Headline(n).split == self.split]
        return [self.name, *further_names]
