"""Summary of a sweep's runs: views of their table, with the statements that belong beside them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpsgd.core.cost import WARM_START
from dpsgd.core.guarantee import INDEPENDENT
from experiments.results.metrics import Better, Headline
from experiments.results.render import render
from experiments.results.table import Table
from experiments.results.views import View
from experiments.sweeps.config import Sweep

TABLE = "runs.parquet"
"""File of the runs' table in a sweep's folder."""

NOT_COVERED = (
    "each guarantee is that of its own run alone: to compare runs and release one of them, or what "
    "they show together, is to learn from all of them; choose on public data, or pay for the "
    "choice (`accounting.SelectionProfile`)",
    "validation and test rows are covered by no guarantee",
)
"""Exclusions once runs are compared."""

INSECURE = (
    "the seeds of these runs are written down, and with them the noise can be subtracted: no run "
    "has a guarantee, and the data must be public"
)


@dataclass(frozen=True)
class Summary:
    """All runs of a sweep, and a view of each grid."""

    sweep: Sweep
    task: Mapping[str, Any]
    """Record of the task: "name", "settings" and "description"."""
    table: Table
    cells: Mapping[str, str]
    """Cell of each run, by the run's name."""
    environments: tuple[dict[str, Any], ...] = ()
    """Distinct versions and hardware of the runs."""
    remarks: tuple[str, ...] = ()
    """Unplanned differences between the runs."""

    def showing(self, headline: str | None, better: Better | None) -> Summary:
        """Returns the same runs with another headline metric."""
        sweep = self.sweep
        if headline is not None:
            sweep = dataclasses.replace(sweep, headline=headline, better=None)
        if better is not None:
            sweep = dataclasses.replace(sweep, better=better)
        return dataclasses.replace(self, sweep=sweep)

    @cached_property
    def headline(self) -> Headline:
        """Headline metric.

        Raises:
          ValueError: If the file names a metric that the task lacks.
        """
        return Headline.choose(self.table, self.sweep.headline, self.sweep.better)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """View of each panel."""
        views = []
        for grids in self.sweep.panels:
            grid, cells = grids[0], {cell for g in grids for cell in g.cells()}
            runs = [run for run, cell in self.cells.items() if cell in cells]
            table = self.table.where(run=runs)
            views.append(View(table, grid.x, self.headline, tune=grid.tune, title=grid.title))
        return tuple(views)

    @property
    def generated(self) -> str:
        """Best reachable metric on generated rows, in words; empty for other rows."""
        best = self.task["description"].get("generated", {}).get(self.headline.name)
        if best is None:
            return ""
        return f"generated rows, of which the best reachable {self.headline.label} is {best:.4f}"

    @property
    def title(self) -> str:
        """Title of the figure."""
        return "\n".join(filter(None, (self.sweep.title, self.generated)))

    @property
    def setting(self) -> str:
        """Sentence on the runs that each number averages."""
        table = self.table

        def sizes(name: str) -> str:  # several only after a change
            numbers = table.values(name) if name in table.frame.columns else []
            return " or ".join(f"{size:,}" for size in sorted(numbers))

        runs = list(self.cells.values())
        counts = sorted({runs.count(cell) for cell in runs})
        tested = sizes(f"{self.headline.split}_num_examples")
        noise = {row["noise"] for row in table.rows if row["noise_multiplier"]}
        alike = len(noise) == 1 and INDEPENDENT not in noise
        each_count = " or ".join(map(str, counts))
        means = f"Mean ± one standard deviation over independent runs, {each_count} of each"
        return (
            f"{'Single runs' if counts == [1] else means}: models of {sizes('num_params')} "
            f"parameters, trained on {sizes('num_examples')} examples"
            f"{f', tested on {tested}' if tested else ''}{f', by {noise.pop()}' if alike else ''}"
            f"{self.generated and f': {self.generated}'}."
        )

    @property
    def repeated(self) -> bool:
        """True if a cell has several runs, and thus a spread."""
        return len(self.cells) > len({*self.cells.values()})

    @property
    def speed(self) -> str:
        """Sentence on the training time."""
        frame = self.table.frame
        rate = statistics.median(frame["examples_per_second"])
        return (
            f"Training took {frame['training_seconds'].sum():,.1f} s for all runs together, at a "
            f"median of {rate:,.0f} examples a second."
        )

    @property
    def statements(self) -> list[str]:
        """Statements that belong beside the numbers, without repeats."""
        judge = self.views[0].judge
        chosen = judge.rows
        if judge == self.headline:
            chosen += " themselves, so that what is shown is too good"
        lines = [INSECURE] if self.sweep.insecure_seeds else []
        lines += [
            f"a run of {self.cells[point.rows[0]['run']]} costs more than the target by which its "
            "noise was chosen"
            for view in self.views
            for point in view.points
            if point.exceeds
        ]
        metrics = self.table.metrics
        diverged = [r["run"] for r in self.table.rows if any(r[m] != r[m] for m in metrics)]
        if diverged:
            lines.append(f"the training of {', '.join(diverged)} diverged: means are of the others")
        lines += [*self.remarks, *NOT_COVERED]
        for row in self.table.rows:
            lines += row["not_covered"] if row["epsilon_upper"] is not None else []
            lines += [WARM_START] if WARM_START in row["notes"] else []
        lines += [
            f"the {' and the '.join(grid.tune).replace('_', ' ')} shown are, point by point, the "
            f"best on {chosen}"
            for grid in self.sweep.grid
            if grid.tune
        ]
        return list(dict.fromkeys(lines))

    def markdown(self) -> str:
        """Returns the summary as a page of Markdown."""
        return render("sweep.md.jinja", summary=self, level=1, figure="")
