"""Which of the metrics of runs comes first, and which of its values are better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dpsgd.runs.report import label

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Headline:
    """The metric that tables and figures put first."""

    name: str
    """Its name, "<split>_<metric>"."""
    better: Better | None = None
    """Which of its values are; None where neither the task nor the user says."""

    @classmethod
    def of(
        cls,
        table: Any,
        name: str | None = None,
        better: Better | None = None,
    ) -> Headline:
        """Returns the metric that is asked for, by default the task's own, or the first one.

        Raises:
          ValueError: if nothing is measured, or no metric of that name.
        """
        known, own = table.metrics, next(iter(table.values("headline")), None)
        if name is not None and name not in known:
            raise ValueError(f"there is no metric {name!r}; there are {', '.join(known) or 'none'}")
        if not known:
            raise ValueError("the task has no metrics, so that there is nothing to compare")
        chosen = str(name or (own if own in known else known[0]))
        stated = next(iter(table.values("better")), None) if chosen == own else None
        return cls(chosen, better or (stated if stated in ("higher", "lower") else None))

    @property
    def label(self) -> str:
        """Its name as people write it."""
        return label(self.name)

    @property
    def split(self) -> str:
        """Of which rows it is; empty if its name does not say."""
        return self.name.partition("_")[0] if "_" in self.name else ""

    @property
    def rows(self) -> str:
        """The same in words."""
        return f"the {self.split} rows" if self.split else "the rows that it is measured on"

    def merit(self, value: float | None) -> float:
        """Returns what is higher for better values: -inf for one that is undefined."""
        if value is None:
            return -math.inf
        return -value if self.better == "lower" else value

    def on(self, split: str, metrics: Iterable[str]) -> Headline | None:
        """Returns the same metric of other rows; None where it is not measured there."""
        name = f"{split}_{self.name.partition('_')[2]}"
        return Headline(name, self.better) if name in metrics else None

    def beside(self, metrics: Iterable[str]) -> list[str]:
        """Returns this metric's name, and then those of all others of the same rows."""
        others = [Headline(name) for name in metrics if name != self.name]
        return [self.name, *(other.name for other in others if other.split == self.split)]
