"""Views of the table of runs: points of a metric over a setting, averaged over repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl
import scipy.stats

from accounting import Bound
from accounting.profile import format_delta
from dpsgd.core.cost import WARM_START
from dpsgd.core.guarantee import IF_INDEPENDENT
from dpsgd.runs import report
from experiments.results.points import Cells, ErrorBar, Headline, pivot, text
from experiments.results.table import AXES, PRIVACY, Axis, Table, digits

VOID = "reproducible noise: no guarantee"
"""Text in place of epsilon for runs from recorded seeds."""
LEVEL = 0.05
"""Significance level of the test that distinguishes means."""
CERTIFIED = "epsilon_upper"
OF_PRIVACY = (*PRIVACY, "epsilon_lower", CERTIFIED)
"""Columns that a run without privacy does not have."""
_ALIKE = (*PRIVACY, "init_seed", "insecure_seed")
"""Settings in which the runs of one line may differ; privacy has its own label."""

Row = Mapping[str, Any]


def axis(name: str) -> Axis:
    """Returns the spellings of a column."""
    if name == CERTIFIED:
        return Axis("", "ε ≤", "ε, certified")
    words = report.label(name)
    return AXES.get(name, Axis(name, words, words))


def repeats(name: str) -> dict[str, pl.Expr]:
    """Returns expressions of mean, its errors and counts.

    They aggregate a column over independent runs, where NaN is a diverged run. Errors of a
    single run are null.
    """
    column = pl.col(name).cast(pl.Float64)
    defined = column.filter(column.is_not_nan())
    return {
        "value": defined.mean(),
        "standard_error": defined.std() / defined.count().sqrt(),
        "standard_deviation": defined.std(),
        "runs": defined.count(),
        "undefined": column.is_nan().sum(),
    }


def differ(first: Row, second: Row) -> bool:
    """Tests if two means differ, by Welch's t-test at `LEVEL`.

    Single runs never differ. The distance in standard errors would mislead: of three runs each,
    equal means are two standard errors apart one time in eight.

    Args:
      first: Point with the columns of `repeats`.
      second: Other point.

    >>> differ({"value": 0.5, "standard_error": None}, {"value": 0.9, "standard_error": None})
    False
    """
    errors = first["standard_error"], second["standard_error"]
    if None in errors:
        return False
    if errors == (0.0, 0.0):
        return bool(first["value"] != second["value"])
    (m, s, n), (m2, s2, n2) = (
        (point["value"], point["standard_error"] * math.sqrt(point["runs"]), point["runs"])
        for point in (first, second)
    )
    test = scipy.stats.ttest_ind_from_stats(m, s, n, m2, s2, n2, equal_var=False)
    return bool(test.pvalue < LEVEL)


@dataclass(frozen=True)
class View:
    """Metric over a setting: a curve per combination of all other settings.

    Attributes:
      table: Runs to show.
      x: Column of the axis.
      headline: Metric, or another column of numbers.
      by: Columns that distinguish curves; by default all settings in which the runs differ.
      tune: Settings whose best values together, by `judge`, each point shows.
      title: Title of the panel.
      error: Column of the points that error bars show.

    Raises:
      ValueError: If a column is unknown or holds no numbers, or a tuned metric has no direction.
    """

    table: Table
    x: str
    headline: Headline
    by: tuple[str, ...] | None = None
    tune: tuple[str, ...] = ()
    title: str = ""
    error: ErrorBar = "standard_error"

    def __post_init__(self) -> None:
        self.table.check_columns((self.x, self.headline.name, *(self.by or ())))
        if self.table.frame[self.x].dtype.is_nested():
            raise ValueError(f"{self.x} holds lists; choose another x")
        if not self.table.frame[self.headline.name].dtype.is_numeric():
            raise ValueError(f"{self.headline.name} is not a number; choose another metric")
        if self.tune and self.headline.better is None:
            raise ValueError(
                f"tune needs to know which {self.headline.label} is better: give the sweep's file "
                f'a line headline = "{self.headline.name}", and better = "higher" or "lower"'
            )

    @property
    def judge(self) -> Headline:
        """Metric that chooses tuned settings, on validation rows if measured."""
        return self.headline.on_split("validation", self.table.metrics) or self.headline

    @cached_property
    def points(self) -> tuple[dict[str, Any], ...]:
        """Points by curve and ascending x.

        Runs without privacy (x is None) are last. Beside the columns of `repeats`, a point has its
        "curve", "x", "tuned" settings, names of "members", largest "noise_multiplier", the interval
        of a single run's epsilon (None if one has no guarantee), "exceeds" (a run costs more than
        the target that chose its noise), "optimistic" (noise chosen by epsilon's lower end), the
        "family" of its curve regardless of "optimistic", and its "sampler", None if the label of
        its curve has further words.
        """
        sigma, upper = pl.col("noise_multiplier"), pl.col(CERTIFIED)
        certified = upper.is_not_null().all()
        plain = pl.Series(self._labels("optimistic", "unit"))
        frame = self.table.frame.with_columns(
            pl.Series("curve", self._labels()),
            pl.Series("family", self._labels("optimistic")),
            x=pl.when(sigma > 0).then(self.x) if self.x in OF_PRIVACY else self.x,
            tuned=pl.struct(self.tune) if self.tune else None,
            sampler=pl.when(plain == pl.col("sampler")).then("sampler"),
        )
        judged = {f"judged_{name}": x for name, x in repeats(self.judge.name).items()}
        first = {name: pl.col(name).first() for name in ("family", "sampler")}
        lower = self.judge.better == "lower"
        best = (
            frame.group_by("curve", "x", "tuned", maintain_order=True)
            .agg(
                **repeats(self.headline.name),
                **judged,
                **first,
                members="run",
                noise_multiplier=sigma.max(),
                epsilon_lower=pl.when(certified).then(pl.col("epsilon_lower").min()),
                epsilon_upper=pl.when(certified).then(upper.max()),
                exceeds=(upper > pl.col("target_epsilon")).any(),
                optimistic=pl.col("optimistic").fill_null(False).any(),
            )
            .sort(
                "judged_undefined", "judged_value", descending=[False, not lower],
                nulls_last=True, maintain_order=True,
            )
            .unique(["curve", "x"], keep="first", maintain_order=True)
            .to_dicts()
        )  # fmt: skip
        order = frame["curve"].unique(maintain_order=True).to_list()
        return tuple(sorted(best, key=lambda p: (order.index(p["curve"]), self._rank(p["x"]))))

    def _rank(self, x: Any) -> float:
        if isinstance(x, str):
            return self.table.values(self.x).index(x)
        return math.inf if x is None else x

    @property
    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """Points of each curve, by its label."""
        names = dict.fromkeys(point["curve"] for point in self.points)
        return {name: [p for p in self.points if p["curve"] == name] for name in names}

    @property
    def xs(self) -> list[Any]:
        """All positions on the axis, in order."""
        return sorted({point["x"] for point in self.points}, key=self._rank)

    @property
    def insecure(self) -> bool:
        """True if seeds are recorded: no run has a guarantee."""
        return bool(self.table.values("insecure_seed"))

    @property
    def terms(self) -> str:
        """Delta, adjacency and unit of epsilons, or `VOID`."""
        if self.insecure:
            return VOID
        runs = {run for p in self.points if p[CERTIFIED] is not None for run in p["members"]}
        terms = [terms_of(row) for row in self.table.rows if row["run"] in runs]
        return "; ".join(dict.fromkeys(terms))

    def _labels(self, *without: str) -> list[str]:
        """Returns the label of each run's curve: its settings on all other varying axes."""
        rows, varied = self.table.rows, self.table.varied()
        names = list(self.by or ())
        if self.by is None:
            names = ["sampler"] if {"sampler", "sampler_settings"} & {*varied} else []
            if self.x not in OF_PRIVACY and len({_privacy(row) for row in rows}) > 1:
                names.append("target_epsilon")
            skipped = (*_ALIKE, "sampler", "sampler_settings", self.x, *self.tune)
            names += [name for name in varied if name not in skipped]
        names = [name for name in names if name not in without]
        own_settings = self.by is None and "sampler_settings" in varied
        units = self.by is None and "unit" not in without and len(self.table.values("unit")) > 1
        labels = []
        for row in rows:
            words = [_word(name, row, own_settings) for name in names]
            if self.x in PRIVACY and row["noise_multiplier"] and row[self.x] is None:
                words.append(_privacy(row))  # or the run would be averaged with non-private ones
            # An epsilon for one user and one for one example are not to be compared.
            unit = f" (unit: one {row['unit']})" if units else ""
            labels.append((", ".join(filter(None, words)) or row["sampler"]) + unit)
        return labels

    def tables(self, *, intervals: bool = False) -> dict[str, Cells]:
        """Returns tables by title, with rows by x.

        Columns are curves.

        Args:
          intervals: True to print epsilon as an interval, False for its upper end alone.
        """

        def table(show: Any) -> Cells:
            points = sorted(self.points, key=lambda point: self._rank(point["x"]))
            curves, symbol = list(self.curves), axis(self.x).symbol
            return pivot(points, show, self._place, symbol, curves)

        def epsilon(point: Row) -> str:
            if point[CERTIFIED] is None:
                return "none"
            bound = Bound(point["epsilon_lower"], point[CERTIFIED])
            return str(bound) if intervals else bound.format_upper()

        tables = {self.headline.label: table(self._print)}
        if self.tune:
            names = ", ".join(axis(name).symbol for name in self.tune)
            tables[f"{names}, best on {self.judge.rows}"] = table(
                lambda p: ", ".join(written(p["tuned"][name]) or "none" for name in self.tune)
            )
        if self.table.values("target_epsilon"):
            tables["noise multiplier σ"] = table(
                lambda p: f"{s:.4g}" if (s := p["noise_multiplier"]) else "none"
            )
        if self.x != CERTIFIED and any(p[CERTIFIED] is not None for p in self.points):
            title = "epsilon [lower, upper]" if intervals else "proved upper bound on epsilon"
            tables[f"{title} of a single run ({self.terms})"] = table(epsilon)
        return tables

    def _place(self, x: Any) -> str:
        return self.without if x is None else written(x, self.x)

    @cached_property
    def without(self) -> str:
        """Label of the points without x; private runs may lack a setting, too."""
        if not any(point["noise_multiplier"] for point in self.points if point["x"] is None):
            return "no privacy"
        return "no guarantee" if self.x in ("epsilon_lower", CERTIFIED) else "not set"

    def _print(self, point: Row) -> str:
        bound = self.headline.name.endswith(("_upper", "_lower"))
        single = bound and not point["standard_error"]
        return written(point["value"], self.headline.name) if single else text(point, self.error)

    def verdicts(self) -> list[str]:
        """Returns the best curves for each epsilon.

        Curves that a test does not distinguish from the best are listed beside it.
        Single runs, which show no spread, have no verdict.
        """
        repeated = any(len(point["members"]) > 1 for point in self.points)
        comparable = repeated and len(self.curves) > 1 and self.headline.better is not None
        if self.x != "target_epsilon" or not comparable:
            return []
        verdicts = []
        for x in self.xs:
            points = [p for p in self.points if p["x"] == x and not p["optimistic"]]
            if not points:
                continue
            merits = [self.headline.merit(p["value"], p["undefined"]) for p in points]
            best = points[merits.index(max(merits))]
            near = [
                p["curve"] for p in points
                if p is not best and None not in (p["standard_error"], best["standard_error"])
                and not differ(best, p)
            ]  # fmt: skip
            if x is None:
                place = "without privacy" if self.without == "no privacy" else "without a target"
            elif self.insecure:
                place = f"at the noise of epsilon {x:g} ({VOID})"
            elif any(point["exceeds"] for point in points):
                place = f"at epsilon {x:g} (exceeded by a run, see the table)"
            else:
                place = f"at epsilon {x:g}"
            alike = f"; not significantly worse (Welch's t-test, {LEVEL:.0%}): {', '.join(near)}"
            verdicts.append(
                f"{place}: {best['curve']} ({self._print(best)}){alike if near else ''}"
            )
        return verdicts


def terms_of(row: Row) -> str:
    """Returns delta, and the conditions of a run's epsilon."""
    return f"delta {format_delta(row['delta'])}, {conditions_of(row)}"


def conditions_of(row: Row) -> str:
    """Returns the conditions of a run's epsilon at any delta."""
    warm = ", for rows that did not train the initial model" * (WARM_START in (row["notes"] or ()))
    interrupted = f", {IF_INDEPENDENT}" * (IF_INDEPENDENT in (row["guarantee"] or ""))
    return f"{row['adjacency']} adjacency, unit: one {row['unit']}{warm}{interrupted}"


def _privacy(row: Row) -> str:
    if not row["noise_multiplier"]:
        return "no clipping, no noise"
    name = "noise_multiplier" if row["target_epsilon"] is None else "target_epsilon"
    return f"{axis(name).symbol} {written(row[name], name)}"


def _word(name: str, row: Row, own_settings: bool) -> str:
    """Returns a setting of a run for a label; empty if it is not set."""
    value = row[name]
    if name in PRIVACY:
        return _privacy(row)
    if name == "sampler" and own_settings:
        return f"{value} {row['sampler_settings']}".strip()
    if value is None or value is False:
        return ""
    if value is True:
        return axis(name).symbol
    return (
        str(value) if name in ("run", "sampler") else f"{axis(name).symbol} {written(value, name)}"
    )


def written(value: Any, name: str = "") -> str:
    """Prints a value of a column; null is empty.

    Ends of intervals are rounded outward: no bound is printed tighter than proved.

    Args:
      value: Value of the column.
      name: Name of the column.

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
