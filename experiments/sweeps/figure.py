"""The figure of a sweep: a panel a grid, its metric over its axis, a standard deviation as a band.

Noise multipliers lie on an axis that is linear above and logarithmic below a dotted line, so that
large noise is seen as it is and small noise is followed towards none; runs without clipping and
noise stand apart, at the left (Chua et al., "Balls-and-Bins Sampling for DP-SGD", figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import NullLocator

from experiments.figures.drawing import COLORS, MARKERS, PALETTE
from experiments.sweeps.config import AXES
from experiments.sweeps.summary import VOID, Estimate, Panel, Summary


def draw(summary: Summary) -> Figure:
    """Returns the figure of a sweep."""
    columns = min(len(summary.panels), 2)  # no wider than a page, where letters are to be read
    rows = math.ceil(len(summary.panels) / columns)
    figure = Figure(figsize=(0.8 + 5.2 * columns, 4.6 * rows), layout="constrained")
    parts = figure.subfigures(rows, columns, squeeze=False).ravel()
    for part, panel in zip(parts, summary.panels, strict=False):
        draw_panel(part, panel)
    insecure = f"\n{VOID}" if summary.sweep.insecure_seeds else ""
    figure.suptitle(summary.sweep.title + insecure)
    return figure


def draw_panel(figure: Figure | SubFigure, panel: Panel) -> None:
    """Draws the metric of each line over the panel's axis, and what has no place on it at the left.

    Args:
      figure: Where to draw; it gets one `Axes`, or two where some runs have no place on the axis.
      panel: What to draw.
    """
    private = [x for x in panel.xs if x is not None]
    if len(private) == len(panel.xs):
        main = figure.subplots()
        main.set_ylabel(_quality(panel))
    elif private:
        apart, main = figure.subplots(1, 2, sharey=True, width_ratios=(1, 7))
        main.tick_params(left=False)
        _draw_apart(apart, panel)
    else:
        main = figure.subplots()
        _draw_apart(main, panel)
        main.set_title(panel.grid.title, fontsize="medium")
        return
    for i, (label, line) in enumerate(panel.lines.items()):
        here = [result for result in line if panel.x(result) is not None]
        estimates = [panel.estimate(result) for result in here]
        _draw_band(main, [panel.x(result) for result in here], estimates, label, _style(i, label))
    _set_axis(main, panel, private)
    main.set_title(panel.grid.title, fontsize="medium")
    main.grid(alpha=0.25, lw=0.5)
    main.legend(frameon=False, fontsize="small")


def composite_scale(joint: float):
    """Returns (forward, inverse): x above `joint`, and joint (1 + log(x / joint)) below.

    Value and slope agree at the joint, so a smooth curve stays smooth.
    """

    def forward(x):
        x = np.maximum(np.asarray(x, float), 1e-300)
        return np.where(x >= joint, x, joint * (1 + np.log(x / joint)))

    def inverse(y):
        y = np.asarray(y, float)
        return np.where(y >= joint, y, joint * np.exp(np.minimum(y / joint - 1, 0)))

    return forward, inverse


def _draw_band(
    axes: Axes, xs: Sequence, estimates: Sequence[Estimate], label: str, style: dict
) -> None:
    means = np.array([estimate.mean for estimate in estimates], float)  # None is a gap
    sds = np.array([estimate.sd or 0.0 for estimate in estimates])
    axes.plot(xs, means, label=label, **style)
    axes.fill_between(xs, means - sds, means + sds, color=style["color"], alpha=0.18, lw=0)


def _draw_apart(axes: Axes, panel: Panel) -> None:
    """Draws the runs without clipping and noise, side by side."""
    for i, (label, line) in enumerate(panel.lines.items()):
        for result in line:
            found = panel.estimate(result)
            if panel.x(result) is None and found.mean is not None:
                axes.errorbar([i], [found.mean], [found.sd or 0.0], capsize=3, **_style(i, label))
    middle = (len(panel.lines) - 1) / 2
    axes.set_xticks([middle], ["no clipping,\nno noise"], fontsize="small")
    axes.set_xlim(-1, len(panel.lines))
    axes.set_ylabel(_quality(panel))
    axes.grid(axis="y", alpha=0.25, lw=0.5)


def _style(i: int, label: str) -> dict:
    color = COLORS.get(label.partition(" (")[0]) or PALETTE[i % len(PALETTE)]
    return {"color": color, "marker": MARKERS[i % len(MARKERS)], "ms": 4.5, "lw": 1.4}


def _set_axis(axes: Axes, panel: Panel, places: Sequence[float]) -> None:
    x = panel.grid.x
    low, high = min(places), max(places)
    if x == "noise_multiplier" and high > 10 * low:
        joint = min(places, key=lambda place: abs(math.log(10 * place / high)))
        forward, inverse = composite_scale(joint)
        axes.set_xscale("function", functions=(forward, inverse))
        axes.axvline(joint, color="grey", ls=":", lw=1)
        for side, text in (("right", "logarithmic ← "), ("left", " → linear")):
            note = axes.annotate(text, (joint, 0.015), xycoords=("data", "axes fraction"))
            note.set(horizontalalignment=side, fontsize="x-small", color="grey")
    elif high > 4 * low:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    shown = _apart(axes, places)
    axes.set_xticks(shown, [f"{place:g}" for place in shown], fontsize="small")
    axes.set_xlabel(_label(panel))


def _quality(panel: Panel) -> str:
    """Returns what the other axis shows."""
    counts = {len(result.reports) for result in panel.results}
    if counts == {1}:
        return f"{panel.headline.label} (single runs)"
    many = " or ".join(map(str, sorted(counts)))
    return f"{panel.headline.label} (mean ± s.d. of {many} runs)"


def _label(panel: Panel) -> str:
    """Returns what the axis shows, what is tuned, and what epsilons hold for, where any are."""
    x, tune = panel.grid.x, panel.grid.tune
    lines = [AXES[x].label]
    if x == "target_epsilon":
        certified = not (panel.insecure or any(r.exceeds for r in panel.results))
        lines = ["ε, certified for each sampler" if certified else AXES[x].label]
        lines.append(f"({panel.terms})")
    elif panel.grid.target_epsilon:
        lines.append(f"(ε: {panel.terms})")
    if tune:
        lines.append(f"(at each point the best {AXES[tune].label} on {panel.judge.rows})")
    return "\n".join(lines)


def _apart(axes: Axes, places: Sequence[float]) -> list[float]:
    """Returns those places whose labels do not run into each other."""
    transform = axes.transScale.transform
    at = {place: transform((place, 0.5))[0] for place in places}
    room = 0.045 * (max(at.values()) - min(at.values()))
    shown: list[float] = []
    for place in sorted(places):
        if not shown or at[place] - at[shown[-1]] >= room:
            shown.append(place)
    return shown
