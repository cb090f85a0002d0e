"""Runs as rows of tables for people, on pages and in terminals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from accounting.profile import format_delta
from dpsgd.runs import report
from experiments.results.metrics import Headline
from experiments.results.table import AXES, PRIVACY, Table
from experiments.results.views import CERTIFIED, Cells, axis, written

Row = dict[str, Any]


def listed(table: Table, columns: Mapping[str, Callable[[Row], str] | None]) -> Cells:
    """Returns runs as rows, with columns by heading; None leaves one out."""
    included = {name: show for name, show in columns.items() if show is not None}
    return list(included), [[show(row) for show in included.values()] for row in table.rows]


def glance(table: Table, headline: Headline) -> Cells:
    """Returns runs as rows with epsilon and the headline metric."""

    def epsilon(row: Row) -> str:
        return "no guarantee" if row[CERTIFIED] is None else f"≤ {report.guaranteed(row)}"

    columns: dict[str, Callable[[Row], str] | None] = {
        "run": lambda row: row["run"],
        "ε": epsilon,
        headline.label: lambda row: measured(row, headline.name),
        "unit": (lambda row: f"one {row['unit']}") if len(table.values("unit")) > 1 else None,
        "sampler": lambda row: row["sampler"],
    }
    return listed(table, columns)


def details(table: Table, metrics: Sequence[str]) -> Cells:
    """Returns runs as rows with noise, certified intervals, metrics and times."""
    return listed(
        table,
        {
            "run": lambda row: row["run"],
            "σ": lambda row: f"{s:.4g}" if (s := row["noise_multiplier"]) else "none",
            "ε [lower, upper]": report.interval,
            "δ": lambda row: format_delta(row["delta"]),
            **{report.label(name): partial(measured, metric=name) for name in metrics},
            "time": lambda row: f"{_seconds(row)}{'' if row['seconds'] is None else ' s'}",
            "examples/s": lambda row: measured(row, "examples_per_second", "secret", ",.0f"),
        },
    )


def overview(table: Table, columns: Sequence[str]) -> Cells:
    """Returns runs as rows for a terminal.

    The columns are the settings in which the runs differ, epsilon, and `columns`.

    Args:
      table: Table of runs.
      columns: Names of further columns.

    Raises:
      ValueError: If a column is unknown.
    """
    table.check_columns(columns)
    deltas = len(table.values("delta")) > 1
    return listed(
        table,
        {
            "run": lambda row: row["run"],
            "sampler": lambda row: row["sampler"],
            **_settings(table),
            "sigma": lambda row: f"{row['noise_multiplier']:.4g}",
            "epsilon <=": report.guaranteed,
            "delta": (lambda row: format_delta(row["delta"])) if deltas else None,
            **{report.label(name): partial(measured, metric=name) for name in columns},
            "seconds": _seconds,
        },
    )


def settings(table: Table) -> Cells:
    """Returns runs as rows with the settings in which they differ, if any."""
    varied = _settings(table)
    header, rows = listed(table, {"run": lambda row: row["run"], **varied})
    return header, rows if varied else []


def _settings(table: Table) -> dict[str, Callable[[Row], str]]:
    varied = [name for name in table.varied() if name not in ("task", "sampler", *PRIVACY)]
    return {axis(name).symbol: partial(measured, metric=name) for name in varied}


def caption(table: Table) -> str:
    """Returns a line that explains the numbers of `overview`."""
    terms = {
        f"{row['adjacency']} adjacency, unit: one {row['unit']}, delta {format_delta(row['delta'])}"
        for row in table.rows
    }
    return f"epsilon: proved upper bounds for single runs ({'; '.join(sorted(terms))})"


def by_task(table: Table) -> list[Table]:
    """Returns a table for each task, as only its metrics compare."""
    tasks = dict.fromkeys(row["task"] for row in table.rows)
    return [table.where(task=task).measured() for task in tasks]


def measured(row: Row, metric: str, secret: str = "", form: str = "") -> str:
    """Returns a metric or another column of a run for people.

    Args:
      row: Row of the table.
      metric: Name of the column.
      secret: Text for null.
      form: Format of a float; by default the report's.
    """
    value = row.get(metric)
    bound = metric.endswith(("_upper", "_lower"))
    if isinstance(value, float) and metric not in AXES and not bound:
        undefined = math.isnan(value)
        return f"{value:{form}}" if form else report.metric(None if undefined else value)
    return secret if value is None else written(value, metric)


def _seconds(row: Row) -> str:
    return measured(row, "seconds", "secret", ".1f")
