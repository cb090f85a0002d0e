"""Crossing of balls-and-bins' and Poisson sampling's curves: epsilon*(sigma, T), certified.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), theorem D.1: neither sampler is
always better. At the lower end of each interval balls-and-bins is certified worse, and at the upper
end better. Left the interval, right delta there; dashed, the limit for many steps. Proof:
docs/explanation/balls-and-bins-against-poisson.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import matplotlib as mpl
from matplotlib.figure import Figure

from accounting import BallsAndBinsProfile, Bound, PoissonProfile
from experiments.cli.console import Console
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Picture, blank, label_ones_twos_fives, legend, panels
from experiments.figures.records import computed
from experiments.papers.order import compare, crossing

FLOOR = 1e-10
"""Least delta at which signs beyond the crossing are certified."""


@dataclass(frozen=True)
class Config(Picture):
    """Crossing of the curves of balls-and-bins and Poisson sampling."""

    steps: tuple[int, ...] = (2, 3, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000, 36_000)
    noise_multipliers: tuple[float, ...] = (
        0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0,
    )  # fmt: skip

    SMALL: ClassVar = {
        "steps": (2, 100),
        "noise_multipliers": (0.25, 0.5, 1.0, 2.0, 5.0),
    }


def many_steps(sigma: float, steps: int) -> float:
    """Returns the limit of epsilon* for many steps; not a bound.

    It is (m / (2 v) + v / 12) / T, with v and m the variance and third central moment of X_t.

    Args:
      sigma: Noise multiplier.
      steps: Number T of steps.
    """
    v = math.expm1(sigma**-2)
    return ((v + 3.0) * v / 2.0 + v / 12.0) / steps


def point(job: tuple[float, int]) -> dict[str, Any]:
    """Bounds the crossing at (noise multiplier, T).

    Returns:
      'epsilon', both ends; 'delta', bounds on balls-and-bins' delta at the upper end; 'zero', a
      certified relative excess of its delta at epsilon 0 over Poisson's; 'signs' at 0, at 1/16, 1/4
      and 1 times the lower end, and at 1, 4, 16, ... times the upper end: '>' if balls-and-bins is
      certified worse, '<' better, '?' undecided.
    """
    sigma, steps = job
    pair = BallsAndBinsProfile(sigma, steps), PoissonProfile(sigma, 1.0 / steps, steps)
    guess = min(many_steps(sigma, steps), max(0.5 / sigma**2 - math.log(steps), 0.1))
    interval = crossing(*pair, guess)
    zero, delta = compare(*pair, 0.0), compare(*pair, interval.upper).first
    orders = [zero, *(compare(*pair, interval.lower / k) for k in (16, 4, 1))]
    epsilon = interval.upper
    while min((order := compare(*pair, epsilon)).first.upper, order.second.upper) > FLOOR:
        orders.append(order)
        epsilon *= 4.0
    return {
        "epsilon": [float(interval.format_lower(".4e")), float(interval.format_upper(".4e"))],
        "delta": [float(delta.format_lower(".3e")), float(delta.format_upper(".3e"))],
        "zero": float(f"{0.999 * (zero.first.lower / zero.second.upper - 1.0):.2e}"),
        "signs": "".join("?><"[order.sign] for order in orders),
    }


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints the intervals."""
    jobs = product(config.noise_multipliers, config.steps)
    points = computed(point, jobs, console.progress, config.out)
    console.line(f"epsilon at which balls-and-bins becomes better than Poisson sampling ({TERMS})")
    console.table(
        ["sigma", *(f"T = {steps:,}" for steps in config.steps)],
        [
            [f"{sigma:g}", *(str(Bound(*points[sigma, n]["epsilon"])) for n in config.steps)]
            for sigma in config.noise_multipliers
        ],
    )
    once = sum(p["signs"].lstrip(">").lstrip("?").strip("<") == "" for p in points.values())
    console.line(f"signs that were certified change once at {once} of {len(points)} points")
    figure = blank(11, 4.8, TERMS)
    first, right = panels(figure, 1, 2)
    colors = mpl.colormaps["viridis"].resampled(len(config.steps) + 1)
    for i, steps in enumerate(config.steps):
        for axes, key in ((first, "epsilon"), (right, "delta")):
            low, high = zip(*(points[s, steps][key] for s in config.noise_multipliers), strict=True)
            axes.plot(config.noise_multipliers, high, color=colors(i), label=f"T = {steps:,}")
            axes.fill_between(config.noise_multipliers, low, high, color=colors(i), alpha=0.5)
        near = [s for s in config.noise_multipliers
                if many_steps(s, steps) < 3.0 * points[s, steps]["epsilon"][1]]  # fmt: skip
        limits = [many_steps(s, steps) for s in near]
        first.plot(near, limits, "--", color=colors(i), lw=0.8)
    for axes, label in ((first, "ε* where the curves cross"), (right, "δ(ε*)")):
        axes.set(xscale="log", yscale="log", xlabel="noise multiplier σ", ylabel=label)
        label_ones_twos_fives(axes.xaxis)
    first.set_title("balls-and-bins: worse below, better above")
    right.set_title("balls-and-bins: worse above, better below")
    legend(first, fontsize="x-small")
    return figure
