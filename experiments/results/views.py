"""Views of the table of runs: one metric over one setting, as means over runs that are alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import scipy.stats

from accounting import Bound
from accounting.profile import format_delta
from dpsgd.runs import report
from experiments.results.metrics import Headline
from experiments.results.table import AXES, PRIVACY, Axis, Table, digits

Cells = tuple[list[str], list[list[str]]]
"""Header and rows of a table that is shown."""

VOID = "reproducible noise: no guarantee"
"""What stands where an epsilon would, of runs whose seeds are written down."""

LEVEL = 0.05
"""How often means that are equal may be told apart."""

CERTIFIED = "epsilon_upper"
_OF_PRIVACY = (*PRIVACY, "epsilon_lower", CERTIFIED)
"""Columns on which a run without privacy has no place."""
_ALIKE = (*PRIVACY, "init_seed", "insecure_seed")
"""Settings in which the runs of one line may differ; privacy has one label for all three."""


def axis(name: str) -> Axis:
    """Returns how a column is written."""
    if name == CERTIFIED:
        return Axis("", "ε ≤", "ε, certified")
    words = report.label(name)
    return AXES.get(name, Axis(name, words, words))


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of a number over independent runs, of those that have it.

    >>> f"{Estimate.of([0.71, 0.72, 0.73])}"
    '0.7200 ± 0.0100'
    >>> f"{Estimate.of([7100])}"  # one run shows no spread
    '7100'
    >>> f"{Estimate.of([0.71, float('nan'), 0.73])}"  # the training of one diverged
    '0.7200 ± 0.0141 (1 of 3 diverged)'
    """

    mean: float | None
    """None if no run has the number."""
    sd: float | None
    """Of one run, not of the mean; None for a single run."""
    count: int
    """Runs that have the number."""
    undefined: int = 0
    """Runs that have not, as their training diverged: mean and deviation leave them out."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate:
        """Returns the estimate from the values of independent runs: NaN is undefined, None none."""
        measured = [value for value in values if value is not None]
        known = [value for value in measured if not math.isnan(value)]
        mean = statistics.fmean(known) if known else None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean, sd, len(known), len(measured) - len(known))

    def merit(self, headline: Headline) -> tuple[int, float]:
        """Returns what is higher for better estimates: the fewer runs diverged, then by the mean.

        The mean of the runs that did not diverge alone would favour what diverges: those are the
        lucky ones.
        """
        return -self.undefined, headline.merit(self.mean)

    def differs(self, other: Estimate) -> bool:
        """Whether Welch's t-test tells the means apart at `LEVEL`; never from a single run.

        With three runs, two standard errors apart is not much: equal means are, one time in eight.
        """
        if self.mean is None or self.sd is None or other.mean is None or other.sd is None:
            return False
        if self.sd == other.sd == 0.0:
            return self.mean != other.mean
        test = scipy.stats.ttest_ind_from_stats(
            *(self.mean, self.sd, self.count), *(other.mean, other.sd, other.count), equal_var=False
        )
        return bool(test.pvalue < LEVEL)

    def __str__(self) -> str:
        if self.mean is None:
            return report.UNDEFINED if self.undefined else ""
        form = ".4f" if self.mean == 0 or 0.01 <= abs(self.mean) < 100 else ".4g"
        spread = "" if self.sd is None else f" ± {self.sd:{form}}"
        lost = f" ({self.undefined} of {self.undefined + self.count} diverged)"
        return f"{self.mean:{form}}{spread}{lost if self.undefined else ''}"


@dataclass(frozen=True)
class Point:
    """Runs that differ in nothing but their randomness."""

    line: str
    x: Any
    """Where it lies: None for runs without privacy on an axis that measures it."""
    rows: tuple[dict[str, Any], ...]

    def __getitem__(self, column: str) -> Estimate:
        return Estimate.of([row[column] for row in self.rows])

    @property
    def private(self) -> bool:
        """Whether its runs have noise."""
        return self.rows[0]["noise_multiplier"] > 0

    @property
    def noise_multiplier(self) -> float:
        """The largest of the runs, which differ only if calibration was changed meanwhile."""
        return max(row["noise_multiplier"] for row in self.rows)

    @property
    def epsilon(self) -> Bound | None:
        """What contains the epsilon of each single run; None where one has no guarantee."""
        ends = [(row["epsilon_lower"], row["epsilon_upper"]) for row in self.rows]
        if any(end is None for pair in ends for end in pair):
            return None
        return Bound(min(lower for lower, _ in ends), max(upper for _, upper in ends))

    @property
    def optimistic(self) -> bool:
        """Whether the noise of its runs was chosen by the lower end of their epsilon."""
        return bool(self.rows[0].get("optimistic"))

    @property
    def exceeds(self) -> bool:
        """Whether a run costs more than the target by which its noise was chosen.

        One does that resumed after a change, with steps that count twice, or is `optimistic`.
        """
        found = [(row[CERTIFIED], row["target_epsilon"]) for row in self.rows]
        return any(None not in pair and pair[0] > pair[1] for pair in found)


@dataclass(frozen=True)
class View:
    """One metric over one setting: lines of points, of which each is runs that are alike."""

    table: Table
    """The runs that are shown."""
    x: str
    """The column of the axis."""
    headline: Headline
    """The metric, or another column of numbers."""
    by: tuple[str, ...] | None = None
    """Columns that tell lines apart; by default all settings in which the runs differ."""
    tune: tuple[str, ...] = ()
    """Settings of which each point shows the values that are best together by `judge`."""
    title: str = ""

    def __post_init__(self) -> None:
        self.table.check_columns((self.x, self.headline.name, *(self.by or ())))
        if not self.table.frame[self.headline.name].dtype.is_numeric():
            raise ValueError(f"{self.headline.name} is no number that could be drawn")
        if self.tune and self.headline.better is None:
            raise ValueError(
                f"tune needs to know which {self.headline.label} is better: give the sweep's file "
                f'a line headline = "{self.headline.name}", and better = "higher" or "lower"'
            )

    @property
    def judge(self) -> Headline:
        """The metric by which a tuned setting is chosen: that of validation rows, if any."""
        return self.headline.on("validation", self.table.metrics) or self.headline

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All that is shown, line by line, ascending in x; runs without privacy come last."""
        groups: dict[tuple[str, Any], dict[Any, list[dict[str, Any]]]] = {}
        for row, line in zip(self.table.rows, self._labels(), strict=True):
            tuned = tuple(row[name] for name in self.tune)
            groups.setdefault((line, self._place(row)), {}).setdefault(tuned, []).append(row)
        found = []
        for (line, x), candidates in groups.items():
            several = [Point(line, x, tuple(rows)) for rows in candidates.values()]
            judge = self.judge
            found.append(max(several, key=lambda p: p[judge.name].merit(judge)))
        order = list(dict.fromkeys(point.line for point in found))
        return tuple(sorted(found, key=lambda p: (order.index(p.line), self._rank(p.x))))

    def _place(self, row: dict[str, Any]) -> Any:
        without = self.x in _OF_PRIVACY and not row["noise_multiplier"]
        return None if without else row[self.x]

    def _rank(self, x: Any) -> float:
        if isinstance(x, str):
            return self.table.values(self.x).index(x)
        return math.inf if x is None else x

    @property
    def lines(self) -> dict[str, list[Point]]:
        """The points of each line, by its label."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.line, []).append(point)
        return found

    @property
    def xs(self) -> list[Any]:
        """Every place on the axis, in order."""
        return sorted({point.x for point in self.points}, key=self._rank)

    @property
    def insecure(self) -> bool:
        """Whether seeds are written down, so that no run has a guarantee."""
        return bool(self.table.values("insecure_seed"))

    @property
    def terms(self) -> str:
        """What its epsilons hold for: delta, adjacency, unit; or why none holds."""
        if self.insecure:
            return VOID
        found = [
            f"delta {format_delta(row['delta'])}, {row['adjacency']} adjacency, unit: one "
            f"{row['unit']}"
            for point in self.points
            if point.epsilon
            for row in point.rows
        ]
        return "; ".join(dict.fromkeys(found))

    def _labels(self) -> list[str]:
        """Returns the label of each run's line: where it lies on all other axes that vary."""
        rows = self.table.rows
        if self.by is not None:
            return [
                ", ".join(
                    _privacy(row)
                    if name in PRIVACY and not row["noise_multiplier"]
                    else _written(name, row[name])
                    for name in self.by
                )
                for row in rows
            ]
        varied = [n for n in self.table.varied() if n not in (*_ALIKE, self.x, *self.tune)]
        privacy = self.x not in _OF_PRIVACY and len({_privacy(row) for row in rows}) > 1
        units = len(self.table.values("unit")) > 1
        labels = []
        for row in rows:
            name = row["sampler"]
            if "sampler_settings" in varied:
                name = f"{name} {row['sampler_settings']}".strip()
            parts = [name] if {"sampler", "sampler_settings"} & {*varied} else []
            parts += [_privacy(row)] if privacy else []
            parts += [
                _written(other, row[other])
                for other in varied
                if other not in ("sampler", "sampler_settings")
                and row[other] is not None
                and row[other] is not False
            ]
            # An epsilon for one user and one for one example are not to be compared.
            unit = f" (unit: one {row['unit']})" if units else ""
            labels.append((", ".join(parts) or name) + unit)
        return labels

    def tables(self, *, intervals: bool = False) -> dict[str, Cells]:
        """Returns what is shown as tables by title: a row for each x, a column for each line.

        Args:
          intervals: Whether epsilon is an interval, or, for a narrow page, its upper end alone.
        """
        found = {self.headline.label: self._pivot(self._shown)}
        if tune := self.tune:
            names = ", ".join(axis(name).symbol for name in tune)
            found[f"{names}, best on {self.judge.rows}"] = self._pivot(
                lambda p: ", ".join(written(p.rows[0][name]) or "none" for name in tune)
            )
        if self.table.values("target_epsilon"):
            found["noise multiplier σ"] = self._pivot(
                lambda p: f"{p.noise_multiplier:.4g}" if p.private else "none"
            )
        if self.x != CERTIFIED and any(point.epsilon for point in self.points):
            title = "epsilon [lower, upper]" if intervals else "proved upper bound on epsilon"
            found[f"{title} of a single run ({self.terms})"] = self._pivot(
                lambda p: _epsilon(p.epsilon, intervals)
            )
        return found

    def _shown(self, point: Point) -> str:
        found = point[name := self.headline.name]
        bound = not found.sd and name.endswith(("_upper", "_lower"))
        return written(found.mean, name) if bound else str(found)

    def _pivot(self, show: Callable[[Point], str]) -> Cells:
        cells = {(point.line, point.x): show(point) for point in self.points}
        rows = []
        for x in self.xs:
            name = "no privacy" if x is None else written(x, self.x)
            rows.append([name, *(cells.get((line, x), "") for line in self.lines)])
        return [axis(self.x).symbol, *self.lines], rows

    def verdicts(self) -> list[str]:
        """Returns, for each epsilon, which line is best, and which cannot be told from it.

        Nothing is said where each point is a single run, which shows no spread.
        """
        found: list[str] = []
        told = len(self.lines) > 1 and any(len(point.rows) > 1 for point in self.points)
        if self.x != "target_epsilon" or not told or self.headline.better is None:
            return found
        for x in self.xs:
            points = [p for p in self.points if p.x == x and not p.optimistic]
            here = {p.line: p[self.headline.name] for p in points}
            best = max(here, key=lambda line: here[line].merit(self.headline))
            tested = {
                line: estimate
                for line, estimate in here.items()
                if line != best and None not in (estimate.sd, here[best].sd)
            }
            near = [line for line, one in tested.items() if not here[best].differs(one)]
            if x is None:
                where = "without privacy"
            elif self.insecure:
                where = f"at the noise of epsilon {x:g} ({VOID})"
            elif any(point.exceeds for point in points):
                where = f"at epsilon {x:g} (which a run exceeds: see the table)"
            else:
                where = f"at epsilon {x:g}"
            verdict = f"{where}: {best} ({here[best]})"
            if near:
                verdict += f"; not told from it (Welch's t-test, {LEVEL:.0%}): {', '.join(near)}"
            found.append(verdict)
        return found


def _privacy(row: dict[str, Any]) -> str:
    if not row["noise_multiplier"]:
        return "no clipping, no noise"
    name = "noise_multiplier" if row["target_epsilon"] is None else "target_epsilon"
    return _written(name, row[name])


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return axis(name).symbol if value else f"not {axis(name).symbol}"
    return (
        f"{axis(name).symbol} {written(value, name)}"
        if name not in ("run", "sampler")
        else str(value)
    )


def written(value: Any, name: str = "") -> str:
    """Returns a value of the column `name` as people read it; nothing for null.

    What is an end of an interval is rounded outward: no bound is printed tighter than it is.
    """
    if value is None:
        return ""
    if name.endswith("_upper"):
        return Bound(value, value).format_upper()
    if name.endswith("_lower"):
        return Bound(value, value).format_lower()
    return f"{value:g}" if isinstance(value, float) else digits(value)


def _epsilon(found: Bound | None, interval: bool) -> str:
    if found is None:
        return "none"
    return str(found) if interval else found.format_upper()
