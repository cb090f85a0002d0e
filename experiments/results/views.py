"""Views of the table of runs: a metric over a setting, as means over repetitions."""

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
"""Header and rows of a printed table."""

VOID = "reproducible noise: no guarantee"
"""Text in place of epsilon for runs from recorded seeds."""

LEVEL = 0.05
"""Significance level of the test that distinguishes means."""

CERTIFIED = "epsilon_upper"
_OF_PRIVACY = (*PRIVACY, "epsilon_lower", CERTIFIED)
"""Columns that a run without privacy does not have."""
_ALIKE = (*PRIVACY, "init_seed", "insecure_seed")
"""Settings in which the runs of one line may differ; privacy has its own label."""


def axis(name: str) -> Axis:
    """Returns the spellings of a column."""
    if name == CERTIFIED:
        return Axis("", "ε ≤", "ε, certified")
    words = report.label(name)
    return AXES.get(name, Axis(name, words, words))


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation over the independent runs that have a number.

    >>> f"{Estimate.compute([0.71, 0.72, 0.73])}"
    '0.7200 ± 0.0100'
    >>> f"{Estimate.compute([7100])}"  # one run shows no spread
    '7100'
    >>> f"{Estimate.compute([0.71, float('nan'), 0.73])}"  # the training of one diverged
    '0.7200 ± 0.0141 (1 of 3 diverged)'
    """

    mean: float | None
    """None if no run has the number."""
    sd: float | None
    """Standard deviation of one run, not of the mean; None for a single run."""
    count: int
    """Number of runs with the number."""
    undefined: int = 0
    """Number of diverged runs, which mean and deviation leave out."""

    @classmethod
    def compute(cls, values: Sequence[float | None]) -> Estimate:
        """Returns the estimate from independent runs; NaN is undefined, None missing."""
        measured = [value for value in values if value is not None]
        defined = [value for value in measured if not math.isnan(value)]
        mean = statistics.fmean(defined) if defined else None
        sd = statistics.stdev(defined) if len(defined) > 1 else None
        return cls(mean, sd, len(defined), len(measured) - len(defined))

    def merit(self, headline: Headline) -> tuple[int, float]:
        """Returns a tuple that is higher for better estimates.

        Fewer diverged runs come first, then the mean: the mean of the other runs alone would favour
        settings that diverge, as it averages the lucky ones.
        """
        return -self.undefined, headline.merit(self.mean)

    def differs(self, other: Estimate) -> bool:
        """Returns True if Welch's t-test at `LEVEL` distinguishes the means.

        Single runs never differ. With three runs, two standard errors are little: equal means are
        as far apart one time in eight.
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
    """Runs that differ only in their randomness."""

    line: str
    x: Any
    """Position on the axis; None for runs without privacy on an axis of privacy."""
    rows: tuple[dict[str, Any], ...]

    def __getitem__(self, column: str) -> Estimate:
        return Estimate.compute([row[column] for row in self.rows])

    @property
    def private(self) -> bool:
        """True if its runs have noise."""
        return self.rows[0]["noise_multiplier"] > 0

    @property
    def noise_multiplier(self) -> float:
        """Largest noise multiplier of the runs; they differ only after a new calibration."""
        return max(row["noise_multiplier"] for row in self.rows)

    @property
    def epsilon(self) -> Bound | None:
        """Interval that contains each single run's epsilon; None if one has no guarantee."""
        bounds = [(row["epsilon_lower"], row["epsilon_upper"]) for row in self.rows]
        if any(bound is None for pair in bounds for bound in pair):
            return None
        return Bound(min(lower for lower, _ in bounds), max(upper for _, upper in bounds))

    @property
    def optimistic(self) -> bool:
        """True if the noise of its runs was chosen by the lower end of epsilon."""
        return bool(self.rows[0].get("optimistic"))

    @property
    def exceeds(self) -> bool:
        """True if a run costs more than the target that chose its noise.

        A run resumed after a change, with steps that count twice, and an `optimistic` one may.
        """
        costs_and_targets = [(row[CERTIFIED], row["target_epsilon"]) for row in self.rows]
        return any(None not in pair and pair[0] > pair[1] for pair in costs_and_targets)


@dataclass(frozen=True)
class View:
    """Metric over a setting: lines of points, each of repeated runs."""

    table: Table
    """Runs to show."""
    x: str
    """Column of the axis."""
    headline: Headline
    """Metric, or another column of numbers."""
    by: tuple[str, ...] | None = None
    """Columns that distinguish lines; by default all settings in which the runs differ."""
    tune: tuple[str, ...] = ()
    """Settings whose best values together, by `judge`, each point shows."""
    title: str = ""

    def __post_init__(self) -> None:
        self.table.check_columns((self.x, self.headline.name, *(self.by or ())))
        if not self.table.frame[self.headline.name].dtype.is_numeric():
            raise ValueError(f"{self.headline.name} is not a number; choose another metric")
        if self.tune and self.headline.better is None:
            raise ValueError(
                f"tune needs to know which {self.headline.label} is better: give the sweep's file "
                f'a line headline = "{self.headline.name}", and better = "higher" or "lower"'
            )

    @property
    def judge(self) -> Headline:
        """Metric that chooses tuned settings: on validation rows, if measured there."""
        return self.headline.on_split("validation", self.table.metrics) or self.headline

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All points, line by line, ascending in x, runs without privacy last."""
        groups: dict[tuple[str, Any], dict[Any, list[dict[str, Any]]]] = {}
        for row, line in zip(self.table.rows, self._labels(), strict=True):
            tuned = tuple(row[name] for name in self.tune)
            groups.setdefault((line, self._place(row)), {}).setdefault(tuned, []).append(row)
        points = []
        for (line, x), candidates in groups.items():
            several = [Point(line, x, tuple(rows)) for rows in candidates.values()]
            judge = self.judge
            points.append(max(several, key=lambda p: p[judge.name].merit(judge)))
        order = list(dict.fromkeys(point.line for point in points))
        return tuple(sorted(points, key=lambda p: (order.index(p.line), self._rank(p.x))))

    def _place(self, row: dict[str, Any]) -> Any:
        without = self.x in _OF_PRIVACY and not row["noise_multiplier"]
        return None if without else row[self.x]

    def _rank(self, x: Any) -> float:
        if isinstance(x, str):
            return self.table.values(self.x).index(x)
        return math.inf if x is None else x

    @property
    def lines(self) -> dict[str, list[Point]]:
        """Points of each line, by its label."""
        points_by_line: dict[str, list[Point]] = {}
        for point in self.points:
            points_by_line.setdefault(point.line, []).append(point)
        return points_by_line

    @property
    def xs(self) -> list[Any]:
        """All positions on the axis, in order."""
        return sorted({point.x for point in self.points}, key=self._rank)

    @property
    def insecure(self) -> bool:
        """True if seeds are recorded, so that no run has a guarantee."""
        return bool(self.table.values("insecure_seed"))

    @property
    def terms(self) -> str:
        """Terms of its epsilons: delta, adjacency, unit; or the reason for none."""
        if self.insecure:
            return VOID
        terms = [
            f"delta {format_delta(row['delta'])}, {row['adjacency']} adjacency, unit: one "
            f"{row['unit']}"
            for point in self.points
            if point.epsilon
            for row in point.rows
        ]
        return "; ".join(dict.fromkeys(terms))

    def _labels(self) -> list[str]:
        """Returns the label of each run's line: its settings on all other varying axes."""
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
            words = [name] if {"sampler", "sampler_settings"} & {*varied} else []
            words += [_privacy(row)] if privacy else []
            words += [
                _written(setting, row[setting])
                for setting in varied
                if setting not in ("sampler", "sampler_settings")
                and row[setting] is not None
                and row[setting] is not False
            ]
            # An epsilon for one user and one for one example are not to be compared.
            unit = f" (unit: one {row['unit']})" if units else ""
            labels.append((", ".join(words) or name) + unit)
        return labels

    def tables(self, *, intervals: bool = False) -> dict[str, Cells]:
        """Returns tables by title, one row per x, one column per line.

        Args:
          intervals: True to print epsilon as an interval, False for its upper end alone.
        """
        tables = {self.headline.label: self._pivot(self._print)}
        if tune := self.tune:
            names = ", ".join(axis(name).symbol for name in tune)
            tables[f"{names}, best on {self.judge.rows}"] = self._pivot(
                lambda p: ", ".join(written(p.rows[0][name]) or "none" for name in tune)
            )
        if self.table.values("target_epsilon"):
            tables["noise multiplier σ"] = self._pivot(
                lambda p: f"{p.noise_multiplier:.4g}" if p.private else "none"
            )
        if self.x != CERTIFIED and any(point.epsilon for point in self.points):
            title = "epsilon [lower, upper]" if intervals else "proved upper bound on epsilon"
            tables[f"{title} of a single run ({self.terms})"] = self._pivot(
                lambda p: _epsilon(p.epsilon, intervals)
            )
        return tables

    def _print(self, point: Point) -> str:
        estimate = point[name := self.headline.name]
        bound = not estimate.sd and name.endswith(("_upper", "_lower"))
        return written(estimate.mean, name) if bound else str(estimate)

    def _pivot(self, show: Callable[[Point], str]) -> Cells:
        cells = {(point.line, point.x): show(point) for point in self.points}
        rows = []
        for x in self.xs:
            name = "no privacy" if x is None else written(x, self.x)
            rows.append([name, *(cells.get((line, x), "") for line in self.lines)])
        return [axis(self.x).symbol, *self.lines], rows

    def verdicts(self) -> list[str]:
        """Returns, for each epsilon, the best line and those not distinguishable from it.

        Single runs, which show no spread, have no verdict.
        """
        verdicts: list[str] = []
        comparable = len(self.lines) > 1 and any(len(point.rows) > 1 for point in self.points)
        if self.x != "target_epsilon" or not comparable or self.headline.better is None:
            return verdicts
        for x in self.xs:
            points = [p for p in self.points if p.x == x and not p.optimistic]
            by_line = {p.line: p[self.headline.name] for p in points}
            best = max(by_line, key=lambda line: by_line[line].merit(self.headline))
            tested = {
                line: estimate
                for line, estimate in by_line.items()
                if line != best and None not in (estimate.sd, by_line[best].sd)
            }
            near = [line for line, mean in tested.items() if not by_line[best].differs(mean)]
            if x is None:
                place = "without privacy"
            elif self.insecure:
                place = f"at the noise of epsilon {x:g} ({VOID})"
            elif any(point.exceeds for point in points):
                place = f"at epsilon {x:g} (which a run exceeds: see the table)"
            else:
                place = f"at epsilon {x:g}"
            verdict = f"{place}: {best} ({by_line[best]})"
            if near:
                verdict += f"; not told from it (Welch's t-test, {LEVEL:.0%}): {', '.join(near)}"
            verdicts.append(verdict)
        return verdicts


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
    """Returns a value of the column `name` for people; empty for null.

    Ends of intervals are rounded outward: no bound is printed tighter than proved.

    >>> written(0.30000000000000004), written(None)
    ('0.3', '')
    """
    if value is None:
        return ""
    if name.endswith("_upper"):
        return Bound(value, value).format_upper()
    if name.endswith("_lower"):
        return Bound(value, value).format_lower()
    return f"{value:g}" if isinstance(value, float) else digits(value)


def _epsilon(bound: Bound | None, interval: bool) -> str:
    if bound is None:
        return "none"
    return str(bound) if interval else bound.format_upper()
