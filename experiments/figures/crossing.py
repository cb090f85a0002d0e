"""Crossing of balls-and-bins' and Poisson sampling's curves: epsilon*(sigma, T), certified.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), theorem D.1: neither sampler is
always better. At the lower end of each interval balls-and-bins is certified worse, and at the upper
end better. Left the interval, right delta there; dashed, the limit for many steps. Proof:
docs/explanation/balls-and-bins-against-poisson.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import matplotlib as mpl

from accounting import BallsAndBinsProfile, PoissonProfile
from experiments.figures import Options
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Layout
from experiments.papers.order import compare, crossing
from experiments.results.points import Job, ends

FLOOR = 1e-10
"""Least delta at which signs beyond the crossing are certified."""
STEPS = (2, 3, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000, 36_000)
NOISE_MULTIPLIERS = (
    0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0,
)  # fmt: skip
NOTES = (f"epsilon at which balls-and-bins becomes better than Poisson sampling ({TERMS})",)
CROSSING, DELTA = (
    "balls-and-bins: worse below, better above",
    "balls-and-bins: worse above, better below",
)


def style(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the style of a curve by steps.

    Limits are dashed lines without labels.
    """
    shade = STEPS.index(point["steps"]) / len(STEPS)
    limit = {"ls": "--", "lw": 0.8, "label": None} if point["lower"] is None else {}
    return {"color": mpl.colormaps["viridis"](shade), **limit}


_SHARED = {"xscale": "log", "yscale": "log", "xlabel": "noise multiplier σ"}
LAYOUT = Layout(
    size=(11, 4.8),
    columns=2,
    axes={
        CROSSING: {**_SHARED, "ylabel": "ε* where the curves cross"},
        DELTA: {**_SHARED, "ylabel": "δ(ε*)"},
    },
    title=TERMS,
    style=style,
    legend={"fontsize": "x-small"},
)


def many_steps(sigma: float, steps: int) -> float:
    """Returns epsilon*'s limit for many steps, not a bound.

    It is (m / (2 v) + v / 12) / T, with v and m the variance and third central moment of X_t.

    Args:
      sigma: Noise multiplier.
      steps: Number T of steps.
    """
    v = math.expm1(sigma**-2)
    return ((v + 3.0) * v / 2.0 + v / 12.0) / steps


def jobs(options: Options) -> Iterator[Job]:
    """Yields noise multipliers with numbers of steps."""
    sizes = (STEPS, NOISE_MULTIPLIERS)
    for steps, sigma in product(
        *(((2, 100), (0.25, 0.5, 1.0, 2.0, 5.0)) if options.small else sizes)
    ):
        yield {"sigma": sigma, "steps": steps}


def compute(job: Job) -> list[dict[str, Any]]:
    """Bounds the crossing at given noise and steps.

    Returns:
      Points of epsilon*, its limit, and balls-and-bins' delta at the upper end; "zero", a certified
      relative excess of its delta at epsilon 0 over Poisson's; "signs" at 0, at 1/16, 1/4 and 1
      times the lower end, and at 1, 4, 16, ... times the upper end: ">" if balls-and-bins is
      certified worse, "<" better, "?" undecided.
    """
    sigma, steps = job["sigma"], job["steps"]
    pair = BallsAndBinsProfile(sigma, steps), PoissonProfile(sigma, 1.0 / steps, steps)
    limit = many_steps(sigma, steps)
    interval = crossing(*pair, min(limit, max(0.5 / sigma**2 - math.log(steps), 0.1)))
    zero, delta = compare(*pair, 0.0), compare(*pair, interval.upper).first
    orders = [zero, *(compare(*pair, interval.lower / k) for k in (16, 4, 1))]
    epsilon = interval.upper
    while min((order := compare(*pair, epsilon)).first.upper, order.second.upper) > FLOOR:
        orders.append(order)
        epsilon *= 4.0
    excess = zero.first.lower / zero.second.upper - 1.0
    signs = "".join("?><"[order.sign] for order in orders)
    point = {"curve": f"T = {steps:,}", "x": sigma, "steps": steps}
    points = [
        {"panel": CROSSING, **point, **ends(interval), "zero": 0.999 * excess, "signs": signs},
        {"panel": DELTA, **point, **ends(delta)},
    ]
    if limit < 3.0 * interval.upper:
        points.append(
            {"panel": CROSSING, **point, "curve": f"T = {steps:,}, limit", "value": limit}
        )
    return points
