"""Figures of finished runs: quality over epsilon, and epsilon over delta."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from accounting import epsilon
from dpsgd import Mechanism
from dpsgd.runs.result import FinishedRun
from experiments.figures.drawing import COLORS, MARKERS, label_ones_twos_fives
from experiments.reports.metrics import Headline

Runs = Mapping[str, FinishedRun]
"""Runs by the names that they have on the page."""

DELTAS = tuple(10.0**-k for k in range(3, 11))
"""Where the epsilon of a run is shown besides its own delta."""

_LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Look:
    """How a run is drawn: its colour says the sampler, the rest tells runs of one sampler apart."""

    label: str
    color: str
    marker: str
    fillstyle: str
    line: str

    def dot(self) -> dict[str, Any]:
        """Returns what `Axes.plot` takes for the run's dot."""
        return {
            "color": self.color,
            "marker": self.marker,
            "fillstyle": self.fillstyle,
            "linestyle": "",
        }


def looks(runs: Runs) -> dict[str, Look]:
    """Returns the look of each run, by its name; no two of them are alike.

    A run is called by its sampler, unless another has the same one: then all have their names.
    """
    samplers = {name: run.record["sampler"] for name, run in runs.items()}
    alone = max(Counter(samplers.values()).values(), default=1) == 1
    units = {run.record["unit"] for run in runs.values()}
    before: Counter[str] = Counter()
    found = {}
    for name, sampler in samplers.items():
        number = before[sampler]
        before[sampler] += 1
        found[name] = Look(
            label=(sampler if alone or name == sampler else f"{name} ({sampler})")
            + (f", unit: one {runs[name].record['unit']}" if len(units) > 1 else ""),
            color=COLORS.get(sampler, "#666666"),
            marker=MARKERS[number % len(MARKERS)],
            fillstyle=("full", "none")[number // len(MARKERS) % 2],
            line=_LINES[(number + number // len(MARKERS)) % len(_LINES)],
        )
    return found


def quality(runs: Runs, headline: Headline) -> Figure:
    """Draws a metric over the certified interval; runs without privacy are lines across."""
    figure, axes = _one_panel()
    look = looks(runs)
    entries: list[Line2D] = []
    shown: list[FinishedRun] = []
    for name, run in runs.items():
        record = run.record
        value = record["metrics"].get(headline.name)
        if value is None:  # it diverged
            continue
        if record["epsilon_upper"] is not None:
            ends = [record["epsilon_lower"], record["epsilon_upper"]]
            axes.plot(ends, [value] * 2, color=look[name].color, lw=3, alpha=0.4)
            entries += axes.plot(ends[1], value, ms=6, **look[name].dot())
            entries[-1].set_label(look[name].label)
            shown.append(run)
        elif not record["noise_multiplier"]:
            line = "--" if look[name].line == "-" else look[name].line
            entries.append(axes.axhline(value, color=look[name].color, ls=line, lw=1))
            entries[-1].set_label(f"{look[name].label}, without privacy")
    axes.set(xscale="log", xlabel=f"ε, certified ({_terms(shown)})", ylabel=headline.label)
    label_ones_twos_fives(axes.xaxis)
    axes.ticklabel_format(axis="y", useOffset=False)
    _legend(figure, axes, entries)
    return figure


def curves(runs: Runs) -> Figure:
    """Draws the certified epsilon of runs over delta, runs of one mechanism as one curve.

    The dot is the guarantee.
    """
    figure, axes = _one_panel()
    look = looks(runs)
    alike: dict[tuple[Mechanism, float, str], list[str]] = {}
    for name, run in runs.items():
        assert run.mechanism is not None, "only runs of one mechanism have a curve"
        key = run.mechanism, run.record["delta"], run.record["unit"]
        alike.setdefault(key, []).append(name)
    entries = []
    units = len({unit for _, _, unit in alike}) > 1
    for (mechanism, at, unit), names in alike.items():
        first = look[names[0]]
        bounds = zip(DELTAS, _uppers(mechanism), strict=True)
        finite = [(delta, upper) for delta, upper in bounds if math.isfinite(upper)]
        deltas, uppers = [delta for delta, _ in finite], [upper for _, upper in finite]
        axes.plot(deltas, uppers, color=first.color, ls=first.line, lw=1.4)
        dot = {**first.dot(), "ms": 5}
        axes.plot(at, runs[names[0]].record["epsilon_upper"], **dot)
        entry = Line2D([], [], lw=1.4, **{**dot, "linestyle": first.line})
        sampler = runs[names[0]].record["sampler"]
        several = f"{_listed(names)} ({sampler})" + (f", unit: one {unit}" if units else "")
        entry.set_label(first.label if len(names) == 1 else several)
        entries.append(entry)
    axes.set(xscale="log", yscale="log", xlabel="δ", ylabel="ε, certified upper end")
    axes.set_title(_terms(runs.values()), fontsize="medium")
    label_ones_twos_fives(axes.yaxis)
    _legend(figure, axes, entries)
    return figure


@functools.lru_cache(maxsize=256)
def _uppers(mechanism: Mechanism) -> tuple[float, ...]:
    """Returns the certified epsilon at each of `DELTAS`: once for all pages of a process."""
    profile = mechanism.privacy()
    return tuple(epsilon(profile, delta).upper for delta in DELTAS)


def _listed(names: list[str]) -> str:
    """Returns names for a legend, where there are many the first ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _one_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(which="both", alpha=0.25, lw=0.5)
    return figure, axes


def _legend(figure: Figure, axes: Axes, entries: list[Line2D]) -> None:
    """Adds a legend; where it would hide what is drawn, below."""
    if len(entries) <= 4:
        axes.legend(handles=entries, frameon=False, fontsize="small")
        return
    columns = 2 if max(len(str(entry.get_label())) for entry in entries) <= 45 else 1
    rows = math.ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def _terms(runs: Iterable[FinishedRun]) -> str:
    """Returns the adjacency and unit of guarantees; where they differ, all."""
    terms = (f"{r.record['adjacency']} adjacency, unit: one {r.record['unit']}" for r in runs)
    return "; ".join(dict.fromkeys(terms))
