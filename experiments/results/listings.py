"""Runs as rows of tables for people, on pages and in terminals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.profile import format_delta
from dpsgd.runs import report
from experiments.results.points import Cells, Headline
from experiments.results.table import AXES, PRIVACY, Table
from experiments.results.views import CERTIFIED, axis, terms_of, written

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str] | None]
"""Text of a run in each column, by heading; None leaves a column out."""


def listed(table: Table, columns: Columns) -> Cells:
    """Returns a printed table with one row per run.

    Args:
      table: Table of runs.
      columns: Function that prints each column, by heading; None leaves the column out.
    """
    included = {name: show for name, show in columns.items() if show is not None}
    return list(included), [[show(row) for show in included.values()] for row in table.rows]


def cell(name: str, null: str = "", form: str = "") -> Callable[[Row], str]:
    """Returns a function that shows a column of a run.

    Args:
      name: Name of the column.
      null: Text for null.
      form: Format of a float; by default the report's.
    """

    def show(row: Row) -> str:
        value = row.get(name)
        bound = name.endswith(("_upper", "_lower"))
        if isinstance(value, float) and name not in AXES and not bound:
            undefined = math.isnan(value)
            return f"{value:{form}}" if form else report.metric(None if undefined else value)
        return null if value is None else written(value, name)

    return show


def glance(table: Table, headline: Headline) -> Cells:
    """Returns runs as rows with epsilon and the headline metric.

    Args:
      table: Table of runs.
      headline: Metric to show.
    """

    def epsilon(row: Row) -> str:
        return "no guarantee" if row[CERTIFIED] is None else f"≤ {report.guaranteed(row)}"

    units = len(table.values("unit")) > 1
    columns: Columns = {
        "run": cell("run"),
        "ε": epsilon,
        headline.label: cell(headline.name),
        "unit": (lambda row: f"one {row['unit']}") if units else None,
        "sampler": cell("sampler"),
    }
    return listed(table, columns)


def overview(table: Table, columns: Sequence[str]) -> Cells:
    """Returns runs as rows, with noise, certified interval and times.

    Args:
      table: Table of runs.
      columns: Names of further columns, beside the settings in which the runs differ.

    Raises:
      ValueError: If a column is unknown.
    """
    table.check_columns(columns)
    varied = [name for name in table.varied() if name not in ("task", "sampler", *PRIVACY)]
    columns_by_heading: Columns = {
        "run": cell("run"),
        "sampler": cell("sampler"),
        **{axis(name).symbol: cell(name) for name in varied},
        "σ": lambda row: f"{s:.4g}" if (s := row["noise_multiplier"]) else "none",
        "ε [lower, upper]": report.interval,
        "δ": lambda row: format_delta(row["delta"]),
        **{report.label(name): cell(name) for name in columns},
        "seconds": cell("seconds", "secret", ".1f"),
    }
    return listed(table, columns_by_heading)


def caption(table: Table) -> str:
    """Returns a line that explains the numbers of `overview`."""
    terms = "; ".join(sorted({terms_of(row) for row in table.rows}))
    return f"ε: certified intervals of single runs, the upper end proved ({terms})"


def by_task(table: Table) -> list[Table]:
    """Splits a table by task: only one task's metrics compare."""
    tasks = dict.fromkeys(row["task"] for row in table.rows)
    return [table.where(task=task).measured() for task in tasks]
