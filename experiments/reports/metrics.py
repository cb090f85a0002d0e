"""What tasks measure, as people read it: which metric comes first, and what they are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
    """Which of its values are; None where nobody says."""

    @classmethod
    def of(
        cls,
        description: Mapping[str, Any],
        metrics: Iterable[str],
        name: str | None = None,
        better: Better | None = None,
    ) -> Headline:
        """Returns the metric that is wished for, by default the task's own, or its first one.

        Args:
          description: What the task says of itself.
          metrics: Names of what it measures.
          name: Of the metric that is wished for.
          better: Which of its values are better; by default the task says so of its own.

        Raises:
          ValueError: if nothing is measured, or no metric of that name.
        """
        known, own = list(metrics), description.get("headline")
        if name is not None and name not in known:
            raise ValueError(f"there is no metric {name!r}; there are {', '.join(known) or 'none'}")
        if not known:
            raise ValueError("the task has no metrics, so that there is nothing to compare")
        chosen = name or (own if own in known else known[0])
        stated = description.get("better") if chosen == own else None
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
