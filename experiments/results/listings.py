"""Runs as rows of tables for people, on pages and in terminals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.profile import format_delta
from dpsgd.runs import report
from experiments.results.points import Cells
from experiments.results.table import AXES, PRIVACY, Table
from experiments.results.views import CERTIFIED, axis, terms_of, written

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""Text of a run in each column, by heading."""


def listed(table: Table, columns: Columns) -> Cells:
    """Returns a printed table with one row per run.

    Args:
      table: Table of runs.
      columns: Function that prints each column, by heading.
    """
    return list(columns), [[show(row) for show in columns.values()] for row in table.rows]


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
    """Returns a line that explains the epsilons of `overview`; empty without one."""
    terms = sorted({terms_of(row) for row in table.rows if row[CERTIFIED] is not None})
    start = "ε: certified intervals of single runs, the upper end proved"
    return f"{start} ({'; '.join(terms)})" if terms else ""


def by_task(table: Table) -> list[Table]:
    """Splits a table by task: only one task's metrics compare."""
    tasks = dict.fromkeys(row["task"] for row in table.rows)
    return [table.where(task=task).measured() for task in tasks]
