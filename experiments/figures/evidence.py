"""Utility over epsilon, a panel a data set: ours, peers in the same run, and what papers report.

All of it from the record of `scripts/bench evidence`; nothing is computed here. A program stands
at the epsilon that it prints, and is hollow if what its batches cost may be more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.cli.console import Console
from experiments.figures.drawing import (
    MARKERS,
    PALETTE,
    Picture,
    blank,
    label_ones_twos_fives,
    legend,
    panels,
)
from experiments.figures.records import RECORDS

ROW = re.compile(
    r"(?P<metric>[^,]+), (?P<kind>test rows|published), (?P<data>\w+), "
    r"(?:epsilon (?P<epsilon>[\d.]+)|no privacy)(?:, (?P<what>.+))?"
)
"""The name of a row of the record that this figure shows."""
OURS, PAPER = "ours", "published: "


@dataclass(frozen=True)
class Config(Picture):
    """Utility over epsilon by data set, beside peers and published figures."""

    record: Path = RECORDS / "evidence.json"
    """What `scripts/bench evidence --json` wrote."""


class Point(NamedTuple):
    """A figure of one model, or of several seeds of it; an epsilon of None is without privacy."""

    metric: str
    epsilon: float | None
    value: float
    error: float | None


def points(record: Mapping[str, Any]) -> dict[str, dict[str, list[Point]]]:
    """Returns the points of each curve of each data set, by epsilon, those without privacy last."""
    found: dict[str, dict[str, list[Point]]] = {}
    for row in (row for case in record["cases"] for row in case["rows"]):
        named = ROW.fullmatch(row["name"])
        if named is None or row["value"] is None:
            continue
        what = (named["what"] or OURS).split(" (")[0]
        what = re.sub(r"^delta [^,]+, ", PAPER, what) if named["kind"] == "published" else what
        epsilon = None if named["epsilon"] is None else float(named["epsilon"])
        of = found.setdefault(named["data"], {}).setdefault(what, [])
        of.append(Point(named["metric"], epsilon, row["value"], row["error"]))
    for curves in found.values():
        for of in curves.values():
            of.sort(key=lambda point: (point.epsilon is None, point.epsilon or 0.0))
    return found


def unearned(record: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Returns data set and model where batches may cost more than 1% above what was printed."""
    values = {row["name"]: row["value"] for case in record["cases"] for row in case["rows"]}
    found = set()
    for name, most in values.items():
        _, its_batches, place = name.partition(" batches, at most, ")
        place, *unbounded = place.split(" (was ")
        if its_batches and (unbounded or most > 1.01 * values[f"epsilon, printed, {place}"]):
            data, _, what = place.split(" (")[0].split(", ", 2)
            found.add((data, what))
    return found


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure, and prints its points.

    Raises:
      ValueError: if the record is none of this benchmark, or has no figure.
    """
    try:
        record = json.loads(config.record.read_text())
        found, hollow = points(record), unearned(record)
    except (OSError, ValueError, TypeError, KeyError):
        why = f"{config.record} is not a record of benchmarks: name another file"
        raise ValueError(why) from None
    of_all = [point for curves in found.values() for of in curves.values() for point in of]
    drawn = [point.epsilon for point in of_all if point.epsilon is not None]
    if not drawn:
        raise ValueError(f"{config.record} has no figures of scripts/bench evidence")
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = blank(4.2 * columns, 3.2 * rows + 0.8)
    axes = panels(figure, rows, columns)
    for extra in axes[len(found) :]:
        extra.remove()
    shown: list[list[str]] = []
    handles: dict[str, Any] = {}
    every = list(dict.fromkeys([OURS, *(what for curves in found.values() for what in curves)]))
    for ax, (data, curves) in zip(axes, found.items(), strict=False):
        for what, of in curves.items():
            number = every.index(what)
            color = PALETTE[number % len(PALETTE)]
            private = [point for point in of if point.epsilon is not None]
            style: dict[str, Any] = {
                "color": color,
                "marker": MARKERS[number % len(MARKERS)],
            }
            if (data, what) in hollow:
                style["markerfacecolor"] = "none"
            style["linestyle"] = "" if what.startswith(PAPER) else "-"
            x, y = [p.epsilon or 0.0 for p in private], [p.value for p in private]
            bars = [2 * (p.error or 0.0) for p in private]
            handles[what] = ax.errorbar(x, y, yerr=bars, **style)
            for point in of:
                if point.epsilon is None:
                    dotted = ax.axhline(point.value, color=color, linestyle=":")
                    handles["ours without privacy"] = dotted
                at = "" if point.epsilon is None else f"{point.epsilon:g}"
                error = "" if point.error is None else f"{point.error:.4f}"
                shown.append([data, what, at, point.metric, f"{point.value:.4f}", error])
        ax.set(title=data, xlabel="epsilon", ylabel=next(iter(curves.values()))[0].metric)
        ax.set_xscale("log")
        ax.set_xlim(0.8 * min(drawn), 1.25 * max(drawn))
        label_ones_twos_fives(ax.xaxis)
    told = {"handles": [*handles.values()], "labels": [*handles]}
    legend(figure, loc="outside lower center", ncols=min(4, len(handles)), **told)
    header = ["data", "model", "epsilon", "figure", "on test rows", "standard error"]
    console.table(header, shown)
    return figure
