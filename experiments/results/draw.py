"""Figures of runs: any metric over any setting with its standard errors, and epsilon over delta.

The axis of noise multipliers is linear above and logarithmic below a dotted line, so that large
noise is to scale and small noise visible; runs without clipping and noise are at the left (Chua et
al., "Balls-and-Bins Sampling for DP-SGD", figure 1).
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import NullLocator

from accounting import epsilon
from dpsgd import Mechanism
from dpsgd.runs.result import FinishedRun
from experiments.figures.drawing import (
    COLORS,
    MARKERS,
    PALETTE,
    blank,
    draw_curves,
    label_short,
    legend,
    panels,
)
from experiments.results.points import collect
from experiments.results.views import CERTIFIED, VOID, View, axis, conditions_of, written

DELTAS = tuple(10.0**-k for k in range(3, 11))
"""Values of delta at which the curve of epsilon is drawn."""
WIDTH = 52
"""Characters of a line under a panel."""


def draw(views: Sequence[View], title: str = "", *, columns: int = 2) -> Figure:
    """Returns a figure of views, one panel each.

    Args:
      views: Views to draw.
      title: Title of the figure.
      columns: Largest number of panels side by side.
    """
    return draw_rows([(title, views)], min(len(views), columns))


def draw_rows(groups: Sequence[tuple[str, Sequence[View]]], columns: int | None = None) -> Figure:
    """Returns a figure of views, one below the other by title.

    Args:
      groups: Views of each title.
      columns: Largest number of panels side by side; None for all of a title.
    """
    columns = columns or max(len(views) for _, views in groups)
    heights = [math.ceil(len(views) / columns) for _, views in groups]
    figure = blank(0.6 + 4.8 * columns, 4.1 * sum(heights))
    subfigures: list[Any] = [figure]
    if len(groups) > 1:
        subfigures = [
            *figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights).ravel()
        ]
    for subfigure, height, (title, views) in zip(subfigures, heights, groups, strict=True):
        places = subfigure.subfigures(height, columns, squeeze=False).ravel()
        for place, view in zip(places, views, strict=False):
            draw_view(place, view)
        insecure = f"\n{VOID}" if any(view.insecure for view in views) else ""
        subfigure.suptitle((title + insecure).strip())
    return figure


def draw_view(figure: Figure | SubFigure, view: View) -> None:
    """Draws the metric of each curve over the axis.

    Runs without a position on it are at the left.

    Args:
      figure: Figure or subfigure of the panel.
      view: View to draw.
    """
    places = [x for x in view.xs if x is not None]
    if len(places) < len(view.xs) and places:
        apart, main = panels(figure, 1, 2, sharey=True, width_ratios=(1, 7))
        main.tick_params(left=False)
    else:
        [main] = panels(figure)
        apart = main
    apart.set_ylabel(_quality(view))
    main.set_title(view.title)
    if None in view.xs:
        _draw_without_privacy(apart, view)
    if not places:
        return
    named = isinstance(places[0], str)  # names have no values in between
    points = [{**p, "x": places.index(p["x"]) if named else p["x"]}
              for p in view.points if p["x"] is not None]  # fmt: skip
    styles = {name: _style(view, name) | ({"ls": ""} if named else {}) for name in view.curves}
    columns = {"curve": "curve", "x": "x", "value": "value", "standard_error": view.error}
    lines = collect([{name: p[source] for name, source in columns.items()} for p in points])
    draw_curves(main, lines, lambda point: styles[point["curve"]])
    if view.x == CERTIFIED:
        for p in points:
            interval = [p["epsilon_lower"], p[CERTIFIED]]
            color = styles[p["curve"]]["color"]
            main.plot(interval, [p["value"] or math.nan] * 2, color=color, lw=3, alpha=0.4)
    _hatch(main, view)
    if named:
        main.set_xticks(range(len(places)), places, fontsize="small")
    else:
        _set_axis(main, view, places)
    main.set_xlabel(_label(view), fontsize="small")
    main.ticklabel_format(axis="y", useOffset=False)
    if len(view.curves) <= 6:
        legend(main)
    else:  # inside it would hide curves
        handles, _ = main.get_legend_handles_labels()
        legend(figure, handles=handles, loc="outside lower center", ncols=2)


def _hatch(axes: Axes, view: View) -> None:
    """Hatches the area between the noise of epsilon's lower and upper end."""
    curves = view.curves
    for name, points in curves.items():
        honest = {p["x"]: p["value"] for p in curves.get(points[0]["family"], ())}
        pairs = [(p["x"], p["value"], honest[p["x"]]) for p in points
                 if p["optimistic"] and p["x"] in honest]  # fmt: skip
        if pairs:
            xs, low, high = np.array(pairs, float).T
            color = _style(view, name)["color"]
            width = 0 if len(xs) > 1 else 3  # the band of a single point is a line
            axes.fill_between(xs, low, high, fc="none", ec=color, hatch="///", lw=width)


def composite_scale(joint: float):
    """Returns a scale, linear above `joint`, and its inverse.

    Below `joint` the scale is joint (1 + log(x / joint)). Value and slope agree at `joint`, so a
    smooth curve stays smooth.

    >>> forward, inverse = composite_scale(1.0)
    >>> float(forward(2.0)), round(float(inverse(forward(0.1))), 12)
    (2.0, 0.1)
    """

    def forward(x):
        x = np.maximum(np.asarray(x, float), 1e-300)
        return np.where(x >= joint, x, joint * (1 + np.log(x / joint)))

    def inverse(y):
        y = np.asarray(y, float)
        return np.where(y >= joint, y, joint * np.exp(np.minimum(y / joint - 1, 0)))

    return forward, inverse


def _draw_without_privacy(axes: Axes, view: View) -> None:
    names = list(view.curves)
    for p in view.points:
        if p["x"] is None and p["value"] is not None:
            style, place = _style(view, p["curve"]), names.index(p["curve"])
            axes.errorbar([place], [p["value"]], [p[view.error] or 0.0], capsize=3, **style)
    text = "no clipping,\nno noise" if view.without == "no privacy" else view.without
    axes.set_xticks([(len(names) - 1) / 2], [text], fontsize="small")
    axes.set_xlim(-1, len(names))
    axes.grid(axis="x", visible=False)


def _style(view: View, curve: str) -> dict[str, Any]:
    """Returns the style of a curve, by its sampler or its index."""
    i, point = list(view.curves).index(curve), view.curves[curve][0]
    return {
        "ls": "--" if point["optimistic"] else "-",
        "color": COLORS.get(point["sampler"]) or PALETTE[i % len(PALETTE)],
        "marker": MARKERS[i % len(MARKERS)],
        "ms": 4.5,
        "lw": 1.4,
    }


def _set_axis(axes: Axes, view: View, places: Sequence[float]) -> None:
    """Scales and labels an axis of numbers."""
    low, high = min(places), max(places)
    if view.x == "noise_multiplier" and high > 10 * low:
        joint = min(places, key=lambda place: abs(math.log(10 * place / high)))
        axes.set_xscale("function", functions=composite_scale(joint))
        axes.axvline(joint, color="grey", ls=":", lw=1)
        for side, words in (("right", "logarithmic ← "), ("left", " → linear")):
            note = axes.annotate(words, (joint, 0.015), xycoords=("data", "axes fraction"))
            note.set(horizontalalignment=side, fontsize="x-small", color="grey")
    elif low > 0 and high > 4 * low:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    screen_x = {place: axes.transScale.transform((place, 0.5))[0] for place in sorted(places)}
    least = 0.045 * (screen_x[high] - screen_x[low])
    labelled: list[float] = []  # labels that do not overlap
    for place, position in screen_x.items():
        if not labelled or position - screen_x[labelled[-1]] >= least:
            labelled.append(place)
    axes.set_xticks(labelled, [_tick(place, view.x) for place in labelled], fontsize="small")


def _tick(place: float, name: str) -> str:
    if name.endswith(("_upper", "_lower")):
        return written(place, name)
    return f"{place:,}" if isinstance(place, int) else f"{place:.3g}"


def _quality(view: View) -> str:
    """Returns the label of the metric's axis."""
    counts = {len(point["members"]) for point in view.points}
    if counts == {1}:
        return f"{view.headline.label} (single runs)"
    num_runs = " or ".join(map(str, sorted(counts)))
    error = {"standard_error": "s.e.", "standard_deviation": "s.d."}[view.error]
    return f"{view.headline.label} (mean ± {error} of {num_runs} runs)"


def _label(view: View) -> str:
    """Returns the axis label, with tuned settings and the terms of epsilons."""
    lines = [axis(view.x).label]
    if view.x in ("target_epsilon", CERTIFIED):
        if not (view.insecure or any(point["exceeds"] for point in view.points)):
            lines = ["ε, certified for each run"]
        lines.append(f"({view.terms})")
    elif view.table.values("target_epsilon"):
        lines.append(f"(ε: {view.terms})")
    if view.tune:
        tuned = " and ".join(axis(name).label for name in view.tune)
        lines.append(f"(at each point the best {tuned} on {view.judge.rows})")
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def curves(runs: Mapping[str, FinishedRun]) -> Figure:
    """Draws the certified epsilon of runs over delta.

    Runs of one mechanism share a curve; the dot is the guarantee.
    """
    figure = blank(5.4, 3.6)
    [axes] = panels(figure)
    names_by_curve: dict[tuple[Mechanism, float, str], list[str]] = {}
    for name, run in runs.items():
        assert run.mechanism is not None, "only runs of one mechanism have a curve"
        key = run.mechanism, run.record["delta"], run.record["unit"]
        names_by_curve.setdefault(key, []).append(name)
    units = {unit for _, _, unit in names_by_curve}
    for i, ((mechanism, delta, unit), names) in enumerate(names_by_curve.items()):
        pairs = zip(DELTAS, _uppers(mechanism), strict=True)
        finite = [pair for pair in pairs if math.isfinite(pair[1])]
        further = f" and {len(names) - 3} more" if len(names) > 3 else ""
        unit_text = f", unit: one {unit}" if len(units) > 1 else ""
        record = runs[names[0]].record
        label = f"{', '.join(names[:3])}{further} ({record['sampler']}{unit_text})"
        color, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        axes.plot(*zip(*finite, strict=True), color=color, lw=1.4)
        dot: dict[str, Any] = {"ls": "", "ms": 5, "color": color, "marker": marker}
        axes.plot(delta, record[CERTIFIED], label=label, **dot)
    records = [run.record for run in runs.values()]
    terms = "; ".join(dict.fromkeys(map(conditions_of, records)))
    axes.set(xscale="log", yscale="log", xlabel="δ", ylabel="ε, certified upper end")
    axes.set_title(textwrap.fill(terms, WIDTH))
    label_short(axes.yaxis)
    legend(axes)
    return figure


@functools.lru_cache(maxsize=256)
def _uppers(mechanism: Mechanism) -> tuple[float, ...]:
    """Returns the certified epsilon at each of `DELTAS`."""
    profile = mechanism.privacy()
    return tuple(epsilon(profile, delta).upper for delta in DELTAS)
