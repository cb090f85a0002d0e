"""Summary of a sweep's runs: views of their table, with the statements that belong beside them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpsgd.core.cost import WARM_START
from dpsgd.core.noise import INDEPENDENT
from dpsgd.runs.result import FinishedRun, environment_mismatch
from experiments.results.points import Better, Headline
from experiments.results.render import render
from experiments.results.table import Table
from experiments.results.views import CERTIFIED, View
from experiments.sweeps.config import Sweep

TABLE = "runs.parquet"
"""File of the runs' table in a sweep's folder."""

NOT_COVERED = (
    "each guarantee covers its own run alone: comparing runs, and releasing one of them or the "
    "comparison, learns from all of them; choose on public data, or pay for the choice "
    "(`accounting.SelectionProfile`)",
    "no guarantee covers validation and test rows",
)
"""Exclusions once runs are compared."""

INSECURE = (
    "the seeds of these runs are recorded, and whoever has them can subtract the noise: no run has "
    "a guarantee, and the data must be public"
)


@dataclass(frozen=True)
class Summary:
    """All runs of a sweep, and a view of each panel.

    Attributes:
      sweep: Sweep as its file describes it.
      task: Record of the task: "name", "settings" and "description".
      table: Table of the runs.
      cells: Cell of each run, by the run's name.
      environments: Distinct versions and hardware of the runs.
      remarks: Unplanned differences between the runs.
    """

    sweep: Sweep
    task: Mapping[str, Any]
    table: Table
    cells: Mapping[str, str]
    environments: tuple[dict[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()

    def showing(self, headline: str | None, better: Better | None) -> Summary:
        """Returns the summary with another headline metric.

        Args:
          headline: Name of the metric; None keeps it.
          better: Direction of better values; None keeps it.
        """
        return dataclasses.replace(self, sweep=self.sweep.showing(headline, better))

    @cached_property
    def headline(self) -> Headline:
        """Headline metric.

        Raises:
          ValueError: If the file names a metric that the task lacks.
        """
        return self.table.headline(self.sweep.headline, self.sweep.better)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """View of each panel."""
        views = []
        for grids in self.sweep.panels:
            grid, cells = grids[0], {cell for grid in grids for cell in grid.cells()}
            table = self.table.where(run=[run for run, cell in self.cells.items() if cell in cells])
            options: Any = {"tune": grid.tune, "title": grid.title, "error": self.sweep.error}
            views.append(View(table, grid.x, self.headline, **options))
        return tuple(views)

    @property
    def generated(self) -> str:
        """Sentence on generated rows' best reachable metric; else empty."""
        best = self.task["description"].get("generated", {}).get(self.headline.name)
        if best is None:
            return ""
        return f"generated rows (best reachable {self.headline.label}: {best:.4f})"

    @property
    def title(self) -> str:
        """Title of the figure."""
        return "\n".join(filter(None, (self.sweep.title, self.generated)))

    @property
    def repeats(self) -> list[int]:
        """Distinct numbers of runs of a cell, ascending."""
        runs = list(self.cells.values())
        return sorted({runs.count(cell) for cell in runs})

    @property
    def setting(self) -> str:
        """Sentence on the runs that each number averages."""

        def sizes(name: str) -> str:  # several only after a change
            is_column = name in self.table.frame.columns
            return (
                " or ".join(f"{n:,}" for n in sorted(self.table.values(name))) if is_column else ""
            )

        run_counts = " or ".join(map(str, self.repeats))
        error = self.sweep.error.replace("_", " ")
        means = f"Mean ± {error} over independent runs, {run_counts} of each"
        tested = sizes(f"{self.headline.split}_num_examples")
        noise = {row["noise"] for row in self.table.rows if row["noise_multiplier"]}
        correlated = len(noise) == 1 and INDEPENDENT not in noise
        clauses = [
            f"{'Single runs' if self.repeats == [1] else means}: models of {sizes('num_params')} "
            f"parameters, trained on {sizes('num_examples')} examples",
            f", tested on {tested}" if tested else "",
            f", by {noise.pop()}" if correlated else "",
            f": {self.generated}" if self.generated else "",
        ]
        return f"{''.join(clauses)}."

    @property
    def speed(self) -> str:
        """Sentence on the training time."""
        frame = self.table.frame
        seconds = frame["training_seconds"].sum()
        rate = statistics.median(frame["examples_per_second"])
        return (
            f"Training took {seconds:,.1f} s for all runs together, at a median of {rate:,.0f} "
            "examples a second."
        )

    @property
    def statements(self) -> list[str]:
        """Statements that belong beside the numbers, without repeats."""
        judge = self.views[0].judge
        too_good = " themselves, so the metrics shown are too good" * (judge == self.headline)
        lines = [INSECURE] if self.sweep.insecure_seeds else []
        lines += [
            f"a run of {self.cells[point['members'][0]]} costs more than the target by which its "
            "noise was chosen"
            for view in self.views
            for point in view.points
            if point["exceeds"]
        ]
        if diverged := self.table.diverged:
            lines.append(f"the training of {', '.join(diverged)} diverged: means leave them out")
        lines += [*self.remarks, *NOT_COVERED]
        for row in self.table.rows:
            if row[CERTIFIED] is not None:
                lines += [
                    f"not covered by a guarantee: {exclusion}" for exclusion in row["not_covered"]
                ]
            lines += [WARM_START] if WARM_START in row["notes"] else []
        lines += [
            f"the {' and the '.join(grid.tune).replace('_', ' ')} shown are, point by point, the "
            f"best on {judge.rows}{too_good}"
            for grid in self.sweep.grid
            if grid.tune
        ]
        return list(dict.fromkeys(lines))

    def markdown(self) -> str:
        """Returns the summary as a page of Markdown."""
        return render("sweep.md.jinja", summary=self, level=1, figure="")


def remarks_on(finished: Sequence[FinishedRun]) -> list[str]:
    """Returns the unplanned differences between runs."""
    changed = environment_mismatch(finished)
    remarks = [f"the runs differ in: {', '.join(changed)}"] if changed else []
    for run in finished:
        if (count := len(run.history.attempts)) > 1:
            notes = "; ".join(run.record["notes"])
            remarks.append(f"{run.path.name} took {count} attempts: {notes}")
    return remarks
