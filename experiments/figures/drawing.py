"""Common style of all figures: colours of samplers, panels, axes, legends, files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np
import tyro
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


@dataclass(frozen=True)
class Picture:
    """Options of every figure."""

    out: tyro.conf.Positional[Path]
    """Picture to write, .png, .pdf or .svg."""

    SMALL: ClassVar[Mapping[str, Any]] = {}
    """Defaults of other fields where a small version is asked for, which takes a minute or two."""


@dataclass(frozen=True)
class RatingsPicture(Picture):
    """Options of a figure of ratings."""

    ratings: Path | None = None
    """`u.data` of MovieLens 100K, gzipped or not; by default a synthetic population."""

    seeds: int = 5
    """Number of runs, or of series of draws, of each setting: by seeds 0, 1, ..."""

    SMALL: ClassVar[Mapping[str, Any]] = {"seeds": 2}

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"--seeds must be at least 2, for a deviation; got {self.seeds}")


def blank(width: float, height: float, title: str = "") -> Figure:
    """Returns an empty figure; width and height are inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def panels(figure: Figure | SubFigure, rows: int = 1, columns: int = 1, **how: Any) -> list[Axes]:
    """Returns the axes of new panels in a figure, row by row."""
    with mpl.rc_context(STYLE):
        return list(np.ravel(figure.subplots(rows, columns, squeeze=False, **how)))


def legend(axes: Axes | Figure | SubFigure, **how: Any) -> None:
    """Adds a legend; of long labels it shows the ends."""
    added = axes.legend(**{"frameon": False, "fontsize": "small", **how})
    for text in added.get_texts():
        if len(text.get_text()) > LONGEST:
            text.set_text("…" + text.get_text()[1 - LONGEST :])


def label_ones_twos_fives(axis: Axis) -> None:
    """Labels a short logarithmic axis at 1, 2, 5, 10, ..."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def content(figure: Figure, kind: str) -> bytes:
    """Returns the figure as a file; equal figures give equal SVGs."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure atomically, in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = content(figure, path.suffix.removeprefix("."))
    write_atomically(path, lambda file: file.write(picture))
