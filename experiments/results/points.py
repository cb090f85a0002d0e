"""Tidy points: rows of curves in panels, each with a value or with certified bounds.

Figures, sweeps and reports print and draw the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import polars as pl

from accounting import Bound
from dpsgd.runs.report import UNDEFINED

Cells = tuple[list[str], list[list[str]]]
"""Header and rows of a printed table."""

ErrorBar = Literal["standard_error", "standard_deviation"]
"""Columns of the errors that a mean can be shown with."""

SCHEMA = {
    "panel": pl.String,
    "curve": pl.String,
    "x": pl.Float64,
    "value": pl.Float64,
    "standard_error": pl.Float64,
    "lower": pl.Float64,
    "upper": pl.Float64,
    "confidence": pl.Float64,
}
"""Columns of points: a value with its standard error, or bounds with their confidence."""
SPECIFICATION, CODE = "specification_sha256", "code_sha256"
"""Columns of the digests of a row's settings and code, in all tables."""


def ends(bound: Bound) -> dict[str, float]:
    """Returns the columns of a bound.

    >>> ends(Bound(0.5, 0.75))
    {'lower': 0.5, 'upper': 0.75, 'confidence': 1.0}
    """
    return {"lower": bound.lower, "upper": bound.upper, "confidence": bound.confidence}


def collect(*tables: pl.DataFrame | Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Joins rows and tables to one with `SCHEMA`'s columns."""
    frames = [pl.DataFrame(schema=SCHEMA)]
    for table in tables:
        rows = table if isinstance(table, pl.DataFrame) else list(table)
        frames.append(pl.DataFrame(rows, infer_schema_length=None))
    return pl.concat(frames, how="diagonal_relaxed")


def text(point: Mapping[str, Any], error_name: ErrorBar = "standard_error") -> str:
    """Prints a point: a bound rounded outward, or a mean.

    A mean has its error and the number of diverged runs, if known.

    Args:
      point: Columns of the point.
      error_name: Column of the error.

    >>> text({"value": 0.72, "standard_error": 0.00577, "runs": 3, "undefined": 1})
    '0.7200 ± 0.0058 (1 of 4 diverged)'
    >>> text({"value": 7100.0}), text({"value": None, "undefined": 2})
    ('7100', 'undefined')
    >>> text({"lower": 0.40371, "upper": 0.40376})
    '[0.403, 0.404]'
    """
    if point.get("lower") is not None:
        return str(Bound(point["lower"], point["upper"], point.get("confidence") or 1.0))
    value, error, lost = (point.get(name) for name in ("value", error_name, "undefined"))
    if value is None:
        return UNDEFINED if lost else ""
    form = ".4f" if value == 0 or 0.01 <= abs(value) < 100 else ".4g"
    diverged = f" ({lost} of {lost + point['runs']} diverged)" if lost else ""
    return f"{value:{form}}{'' if error is None else f' ± {error:{form}}'}{diverged}"


def pivot(
    points: Iterable[Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], str] = text,
    name: Callable[[Any], str] = lambda x: f"{x:.4g}",
    corner: str = "",
    curves: Iterable[str] = (),
) -> Cells:
    """Returns a table: rows by x, columns by curve.

    >>> pivot([{"x": 1, "curve": "a", "value": 0.5}, {"x": 2, "curve": "b", "value": 0.25}])
    (['', 'a', 'b'], [['1', '0.5000', ''], ['2', '', '0.2500']])

    Args:
      points: Points; an x appears once per curve.
      show: Text of a point.
      name: Text of an x.
      corner: Heading of the first column.
      curves: Order of the columns; by default the order of the points.
    """
    cells = {(point["x"], point["curve"]): show(point) for point in points}
    columns = dict.fromkeys([*curves, *(curve for _, curve in cells)])
    rows = [
        [name(x), *(cells.get((x, curve), "") for curve in columns)]
        for x in dict.fromkeys(x for x, _ in cells)
    ]
    return [corner, *columns], rows
