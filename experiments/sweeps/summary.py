"""What the runs of a sweep show together: mean and standard deviation over the repetitions."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import scipy.stats

from accounting import Bound, format_delta
from dpsgd.core.guarantee import INDEPENDENT, words_on
from dpsgd.runs.report import UNDEFINED
from experiments.reports.metrics import Headline
from experiments.sweeps.config import AXES, PRIVACY, Grid, Sweep
from experiments.sweeps.plan import Cell, PlannedRun, cells

Report = dict[str, Any]

NOT_COVERED = (
    "each guarantee is that of its own run alone: whoever compares runs and releases one of them, "
    "or what they show together, has learned from all of them; choose on public data, or pay for "
    "the choice (`accounting.SelectionProfile`)",
    "validation and test rows are covered by no guarantee",
)
"""What no guarantee of a run covers, once runs are compared."""

INSECURE = (
    "the seeds of these runs are written down, so whoever reads them can subtract the noise: no "
    "run has a guarantee, and the data must be public"
)

VOID = "reproducible noise: no guarantee"
"""The same in short, for where an epsilon is read."""

LEVEL = 0.05
"""How often means that are equal may be told apart."""


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of a number over independent runs, of those that have it.

    >>> f"{Estimate.of([0.71, 0.72, 0.73])}"
    '0.7200 ± 0.0100'
    >>> f"{Estimate.of([7100])}"  # one run shows no spread
    '7100'
    >>> f"{Estimate.of([0.71, None, 0.73])}"  # the training of one diverged
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
        """Returns the estimate from the values of independent runs, None where it is undefined."""
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean, sd, len(known), len(values) - len(known))

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
            return UNDEFINED
        form = ".4f" if self.mean == 0 or 0.01 <= abs(self.mean) < 100 else ".4g"
        spread = "" if self.sd is None else f" ± {self.sd:{form}}"
        lost = f" ({self.undefined} of {self.undefined + self.count} diverged)"
        return f"{self.mean:{form}}{spread}{lost if self.undefined else ''}"


@dataclass(frozen=True)
class Result:
    """A cell, with what its runs reported."""

    cell: Cell
    runs: tuple[str, ...]
    """Names of their folders."""
    reports: tuple[Report, ...]

    def __getitem__(self, metric: str) -> Estimate:
        return Estimate.of([report["metrics"].get(metric) for report in self.reports])

    @property
    def noise_multiplier(self) -> float:
        """The largest of the runs, which differ only if calibration was changed meanwhile."""
        return max(report["noise_multiplier"] for report in self.reports)

    @property
    def epsilon(self) -> Bound | None:
        """What contains the epsilon of each single run; None where one has no guarantee."""
        ends = [(report["epsilon_lower"], report["epsilon_upper"]) for report in self.reports]
        if any(end is None for pair in ends for end in pair):
            return None
        return Bound(min(lower for lower, _ in ends), max(upper for _, upper in ends))

    @property
    def exceeds(self) -> bool:
        """Whether a run costs more than the target by which its noise was chosen.

        One does that went on after a change, with steps that count twice.
        """
        if (target := self.cell.target_advantage) is not None:
            ends = [report["attack_advantage_upper"] for report in self.reports]
            return any(end is not None and end > target for end in ends)
        target, found = self.cell.target_epsilon, self.epsilon
        return target is not None and found is not None and found.upper > target

    def record(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        found = self.epsilon
        return {
            "sampler": self.cell.sampler_name,
            **{axis: self.cell.value(axis) for axis in AXES},
            "noise_multiplier": self.noise_multiplier,
            "epsilon_lower": found and found.lower,
            "epsilon_upper": found and found.upper,
            "delta": self.reports[0]["delta"],
            "metrics": {name: dataclasses.asdict(self[name]) for name in metrics_of(self.reports)},
            "runs": list(self.runs),
        }


def metrics_of(reports: Sequence[Report]) -> list[str]:
    """Returns the names of all metrics that runs report, in their order."""
    return list(dict.fromkeys(name for report in reports for name in report["metrics"]))


@dataclass(frozen=True)
class Panel:
    """What one grid shows: lines of results over its x axis."""

    grid: Grid
    lines: dict[str, list[Result]]
    """By label; each ascends in x. Where x is a measure of privacy, runs without it come last."""
    headline: Headline
    """The metric that is shown."""
    judge: Headline
    """The metric by which a tuned axis is chosen: the same of validation rows, if there are any."""
    insecure: bool
    """Whether the seeds are written down, so that no run has a guarantee."""

    def estimate(self, result: Result) -> Estimate:
        """Returns what is shown of a result."""
        return result[self.headline.name]

    @property
    def terms(self) -> str:
        """What its epsilons hold for: delta, adjacency, unit; or why none holds."""
        if self.insecure:
            return VOID
        # Alike in all runs that differ in a grid's axes alone; if ever not, all are named.
        found = [
            f"delta {format_delta(report['delta'])}, {report['adjacency']} adjacency, unit: one "
            f"{report['unit']}"
            for result in self.results
            if result.epsilon
            for report in result.reports
        ]
        return "; ".join(dict.fromkeys(found))

    def x(self, result: Result) -> float | None:
        """Returns where a result lies; None for one without privacy on an axis that measures it."""
        return result.cell.value(self.grid.x)

    @property
    def results(self) -> list[Result]:
        """All that is shown, line by line."""
        return [result for line in self.lines.values() for result in line]

    @property
    def xs(self) -> list[float | None]:
        """Every place on the x axis, in order."""
        places = {self.x(result) for result in self.results}
        return sorted(places, key=lambda x: math.inf if x is None else x)

    def at(self, label: str, x: float | None) -> Result | None:
        """Returns the result of a line at a place, if it has one there."""
        return next((result for result in self.lines[label] if self.x(result) == x), None)


@dataclass(frozen=True)
class Summary:
    """All results of a sweep, and its panels."""

    sweep: Sweep
    task: Mapping[str, Any]
    """What was trained: its "name", "settings" and "description"."""
    results: tuple[Result, ...]
    environments: tuple[Report, ...] = ()
    """Versions and hardware that runs were at, each once."""
    remarks: tuple[str, ...] = ()
    """In what runs differ that should differ in the axes of their grids alone."""

    @property
    def reports(self) -> list[Report]:
        """Those of all runs."""
        return [report for result in self.results for report in result.reports]

    @cached_property
    def headline(self) -> Headline:
        """The metric that is shown.

        Raises:
          ValueError: if the file names one that the task has not.
        """
        return Headline.of(
            self.task["description"],
            metrics_of(self.reports),
            self.sweep.headline,
            self.sweep.better,
        )

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """What each grid shows."""
        return tuple(self._panel(grid) for grid in self.sweep.grid)

    def _panel(self, grid: Grid) -> Panel:
        named = {result.cell.name: result for result in self.results}
        lines: dict[str, list[Result]] = {}
        for result in self._tuned(grid, [named[cell.name] for cell in cells(grid)]):
            lines.setdefault(_label(grid, result.cell), []).append(result)
        lines = _with_units(lines)
        panel = Panel(
            grid, lines, self.headline, self._judge, insecure=bool(self.sweep.insecure_seeds)
        )
        order = panel.xs
        for line in lines.values():
            line.sort(key=lambda result: order.index(panel.x(result)))
        return panel

    @property
    def _judge(self) -> Headline:
        return self.headline.on("validation", metrics_of(self.reports)) or self.headline

    def _tuned(self, grid: Grid, results: Sequence[Result]) -> list[Result]:
        """Returns, of the results that differ in the tuned axis alone, the best."""
        if grid.tune is None:
            return list(results)
        if self.headline.better is None:
            raise ValueError(
                f"tune needs to know which {self.headline.label} is better: give the sweep's file "
                f'a line headline = "{self.headline.name}", and better = "higher" or "lower"'
            )
        judge = self._judge
        best: dict[Any, Result] = {}
        for result in results:
            others = tuple(result.cell.value(axis) for axis in AXES if axis != grid.tune)
            key = (result.cell.sampler_name, *others)
            rival = best.get(key)
            if rival is None or result[judge.name].merit(judge) > rival[judge.name].merit(judge):
                best[key] = result
        return list(best.values())

    @property
    def setting(self) -> str:
        """What each number is a mean of, in a sentence."""
        reports = self.reports

        def sizes(found: Sequence[int]) -> str:  # alike, but for what was changed meanwhile
            return " or ".join(f"{size:,}" for size in sorted(set(found)))

        counts = " or ".join(map(str, sorted({len(result.reports) for result in self.results})))
        rows = f"{self.headline.split}_num_examples"
        tested = [report["metrics"][rows] for report in reports if report["metrics"].get(rows)]
        return (
            f"Mean ± one standard deviation over independent runs, {counts} of each: models of "
            f"{sizes([report['num_params'] for report in reports])} parameters, trained on "
            f"{sizes([report['num_examples'] for report in reports])} examples"
            f"{f', tested on {sizes(tested)}' if tested else ''}{self._noise()}."
        )

    def _noise(self) -> str:
        """Returns how the noise of all runs is correlated, where they have it in common."""
        found = {words_on(r["noise"]) for r in self.reports if r["noise_multiplier"]}
        return f", by {found.pop()}" if len(found) == 1 and INDEPENDENT not in found else ""

    @property
    def statements(self) -> list[str]:
        """What must stand beside the numbers."""
        chosen = self._judge.rows
        if self._judge == self.headline:
            chosen += " themselves, so that what is shown is too good"
        tuned = [
            f"the {grid.tune.replace('_', ' ')} shown is, point by point, the best on {chosen}"
            for grid in self.sweep.grid
            if grid.tune
        ]
        insecure = [INSECURE] if self.sweep.insecure_seeds else []
        left_out = [
            item
            for result in self.results
            if result.epsilon
            for report in result.reports
            for item in report["not_covered"]
        ]
        exceeded = [
            f"a run of {result.cell.name} costs more than the target by which its noise was chosen"
            for result in self.results
            if result.exceeds
        ]
        diverged = [
            run
            for result in self.results
            for run, report in zip(result.runs, result.reports, strict=True)
            if None in report["metrics"].values()
        ]
        left = [f"the training of {', '.join(diverged)} diverged: means are of the other runs"]
        return [
            *(*insecure, *exceeded, *(left if diverged else []), *self.remarks, *NOT_COVERED),
            *dict.fromkeys([*left_out, *tuned]),
        ]

    def record(self) -> dict[str, Any]:
        """Returns the summary as JSON values; the same runs give the same ones."""
        return {
            "title": self.sweep.title,
            "setting": self.setting,
            "task": dict(self.task),
            "headline": self.headline.name,
            "better": self.headline.better,
            "environments": list(self.environments),
            "run": dict(self.sweep.run),
            "repetitions": self.sweep.repetitions,
            "insecure_seeds": list(self.sweep.insecure_seeds),
            "not_covered": self.statements,
            "cells": {result.cell.name: result.record() for result in self.results},
            "panels": [
                {
                    "title": panel.grid.title,
                    "x": panel.grid.x,
                    "tuned": panel.grid.tune,
                    "lines": {
                        label: [result.cell.name for result in line]
                        for label, line in panel.lines.items()
                    },
                }
                for panel in self.panels
            ],
        }


def summarize(
    sweep: Sweep,
    task: Mapping[str, Any],
    finished: Sequence[tuple[PlannedRun, Report]],
    environments: Sequence[Report] = (),
    remarks: Sequence[str] = (),
) -> Summary:
    """Returns what the finished runs of a sweep show.

    Args:
      sweep: What was asked for.
      task: What was trained, as the runs' configuration has it.
      finished: All of its runs with their reports.
      environments: Versions and hardware of the runs.
      remarks: In what runs differ that should differ in the axes of their grids alone.
    """
    groups: dict[str, list[tuple[PlannedRun, Report]]] = {}
    for run, report in finished:
        groups.setdefault(run.cell.name, []).append((run, report))
    results = [
        Result(
            group[0][0].cell,
            tuple(run.name for run, _ in group),
            tuple(report for _, report in group),
        )
        for group in groups.values()
    ]
    places = {json.dumps(place, sort_keys=True): place for place in environments}
    return Summary(sweep, task, tuple(results), tuple(places.values()), tuple(remarks))


def _with_units(lines: dict[str, list[Result]]) -> dict[str, list[Result]]:
    """Returns lines by labels that say what is protected, where that is not alike on all of them.

    An epsilon for one user and one for one example are not to be compared.
    """
    units = {
        label: " or ".join(dict.fromkeys(r["unit"] for result in line for r in result.reports))
        for label, line in lines.items()
    }
    if len(set(units.values())) == 1:
        return lines
    return {f"{label} (unit: one {units[label]})": line for label, line in lines.items()}


def _label(grid: Grid, cell: Cell) -> str:
    """Returns the name of the line that a cell lies on: where it is on all other axes that vary."""
    names = [sampler.name for sampler in grid.samplers()]
    # Its settings tell a sampler from the others only where the grid has it twice.
    name = cell.sampler.name if names.count(cell.sampler.name) == 1 else cell.sampler_name
    parts = [name] if len(names) > 1 else []
    for axis, (_, symbol, _) in AXES.items():
        values, value = getattr(grid, axis), cell.value(axis)
        if axis in (grid.x, grid.tune) or value is None:
            continue
        if len(values) > 1 or (axis in PRIVACY and grid.non_private):
            parts.append(f"{symbol} {value:g}")
    others = any(getattr(grid, axis) for axis in PRIVACY)
    if cell.non_private and others and grid.x not in PRIVACY:
        parts.append("no clipping, no noise")
    return ", ".join(parts) or name
