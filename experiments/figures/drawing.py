"""Common style of all figures: colours of samplers, panels, axes, legends, files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from dpsgd.files import write_atomically

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, distinct with any colour vision."""

COLORS = {
    "deterministic": "#000000",
    "shuffle": "#D55E00",
    "poisson": "#0072B2",
    "balls-and-bins": "#009E73",
    "multistage": "#CC79A7",
    "user-poisson": "#56B4E9",
    "units-then-poisson": "#E69F00",
}
"""Colour of each sampler, in all figures."""

MARKERS = "osD^vP*X"

LONGEST = 48
"""Most characters of a label in a legend."""

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "svg.hashsalt": "dpsgd",
}
"""Settings of matplotlib; equal figures give equal bytes."""


def blank(width: float, height: float, title: str = "") -> Figure:
    """Returns an empty figure.

    Args:
      width: Width in inches.
      height: Height in inches.
      title: Title above all panels.

    >>> blank(6, 4).get_size_inches().tolist()
    [6.0, 4.0]
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def panels(figure: Figure | SubFigure, rows: int = 1, columns: int = 1, **how: Any) -> list[Axes]:
    """Adds panels to a figure; returns their axes by row.

    Args:
      figure: Figure or subfigure.
      rows: Number of rows.
      columns: Number of columns.
      **how: Options of `Figure.subplots`.
    """
    with mpl.rc_context(STYLE):
        return list(np.ravel(figure.subplots(rows, columns, squeeze=False, **how)))


BELOW = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.14)}
"""Options of a legend below its panel."""


def legend(axes: Axes | Figure | SubFigure, **how: Any) -> None:
    """Adds a legend; long labels lose their beginnings."""
    added = axes.legend(**{"frameon": False, "fontsize": "small", **how})
    for text in added.get_texts():
        if len(text.get_text()) > LONGEST:
            text.set_text("…" + text.get_text()[1 - LONGEST :])


def label_short(axis: Axis) -> None:
    """Labels short logarithmic axes at 1, 2, 5, 10, ..."""
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or high > 300 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def draw_curves(
    axes: Axes,
    points: pl.DataFrame,
    style: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda point: {},
) -> None:
    """Draws curves of values or bounds.

    Values have error bars, proved bounds a band, and sampled bounds crosses.

    Args:
      axes: Axes of the panel.
      points: Rows of `experiments.results.points`.
      style: Options of matplotlib for a curve, by its first point; they may hide its label.
    """
    palette = cycle(PALETTE[3:] + PALETTE[:3])
    for (curve,), line in points.group_by("curve", maintain_order=True):
        first = line.row(0, named=True)
        options = style(first)
        color = options.get("color") or COLORS.get(str(curve)) or next(palette)
        look = {"label": curve, **options, "color": color}
        xs, lower, upper, value = (line[name] for name in ("x", "lower", "upper", "value"))
        if first["lower"] is None:
            error = line["standard_error"]
            bars = None if error.is_null().all() else error.to_numpy()
            axes.errorbar(xs, value.cast(float).to_numpy(), bars, capsize=3, **look)
        elif first["confidence"] < 1.0:
            label = f"{look['label']} ({100 * first['confidence']:g} %)"
            axes.plot(xs, upper, "x", color=color, label=label)
            axes.plot(xs, value, "+", color=color)
            axes.plot(xs, lower, ":", color=color, lw=1)
        else:
            axes.plot(xs, upper, **{"lw": 1.5, **look})
            if (upper > 1.05 * lower).any():
                axes.plot(xs, lower, color=color, lw=0.8, ls="--")
                axes.fill_between(xs, lower, upper, color=color, alpha=0.12, lw=0)


@dataclass(frozen=True)
class Layout:
    """Layout of a figure whose panels are curves."""

    size: tuple[float, float]
    """Width and height, inches."""
    columns: int
    """Number of panels side by side."""
    axes: Mapping[str, Mapping[str, Any]]
    """Properties of the axes of each panel, in order; "" for all panels."""
    title: str = ""
    style: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda point: {}
    """Options of a curve, by its first point."""
    legend: Mapping[str, Any] = field(default_factory=dict)
    """Options of the legend of each panel."""
    shared: bool = False
    """True for one legend, below all panels."""
    floor: str = ""
    """Curve whose least lower end, over 100, is the bottom of each panel; by default none."""


def draw_layout(table: pl.DataFrame, layout: Layout) -> Figure:
    """Returns a figure with the panels of a table.

    Args:
      table: Rows of `experiments.results.points`.
      layout: Layout of the figure.
    """
    names = table["panel"].unique(maintain_order=True).to_list()
    figure = blank(*layout.size, layout.title)
    all_axes = panels(figure, -(-len(names) // layout.columns), layout.columns)
    for name, axes in zip(names, all_axes, strict=False):
        points = table.filter(panel=name)
        draw_curves(axes, points, layout.style)
        properties = {"title": name, **layout.axes.get("", {}), **layout.axes.get(name, {})}
        with mpl.rc_context(STYLE):
            axes.set(**properties)
        if properties.get("yscale") == "log":
            axes.set_yscale("log", nonpositive="mask")
        if layout.floor:
            axes.set_ylim(bottom=points.filter(curve=layout.floor)["lower"].to_numpy().min() / 100)
        label_short(axes.xaxis)
        label_short(axes.yaxis)
        if not layout.shared:
            legend(axes, **layout.legend)
    if layout.shared:
        handles, _ = all_axes[0].get_legend_handles_labels()
        legend(figure, handles=handles, loc="outside lower center", **layout.legend)
    return figure


def content(figure: Figure, kind: str) -> bytes:
    """Returns a figure's file; equal figures give equal SVGs.

    Args:
      figure: Figure to write.
      kind: Format: "png", "pdf" or "svg".
    """
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes a figure atomically, in the format of the suffix.

    Args:
      figure: Figure to write.
      path: File: .png, .pdf or .svg.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = content(figure, path.suffix.removeprefix("."))
    write_atomically(path, lambda file: file.write(picture))
