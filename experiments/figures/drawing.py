"""What figures share: what is asked for, colours that tell samplers apart, axes, and the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from dpsgd.files import write_atomically

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by readers with any colour vision."""

COLORS = {
    "deterministic": "#000000",
    "shuffle": "#D55E00",
    "poisson": "#0072B2",
    "balls-and-bins": "#009E73",
    "multistage": "#CC79A7",
    "user-poisson": "#56B4E9",
    "units-then-poisson": "#E69F00",
}
"""Of each sampler, in all figures."""

BUFFERED = "#D55E00"
"""Of noise that keeps buffers, beside bands."""

MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Picture:
    """What every figure is asked for."""

    out: tyro.conf.Positional[Path]
    """Picture to write, .png, .pdf or .svg."""


@dataclass(frozen=True)
class RatingsPicture(Picture):
    """What a figure of ratings is asked for."""

    ratings: Path | None = None
    """`u.data` of MovieLens 100K, gzipped or not; by default a synthetic population."""


def label_ones_twos_fives(axis: Axis) -> None:
    """Labels a logarithmic axis at 1, 2, 5, 10, ...: readable where it spans a decade or two."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Writes the figure, the whole of it or nothing; the ending of `path` names the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".")
    write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150))
