"""Where the curves of balls-and-bins and of Poisson sampling cross: epsilon*(sigma, T), certified.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), theorem D.1: neither sampler is
always better. At the lower end of each interval balls-and-bins is certified worse, and at the upper
end better. Left the interval, right delta there; dashed, what many steps tend to.
Proof: docs/explanation/balls-and-bins-against-poisson.md.
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
"""Beyond the crossing signs are looked at while delta is not below this."""


@dataclass(frozen=True)
class Config(Picture):
    """Where the curves of balls-and-bins and of Poisson sampling cross."""

    steps: tuple[int, ...] = (2, 3, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000, 36_000)
    noise_multipliers: tuple[float, ...] = (
        0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0,
    )  # fmt: skip

    SMALL: ClassVar = {
        "steps": (2, 100),
        "noise_multipliers": (0.25, 0.5, 1.0, 2.0, 5.0),
    }


def many_steps(sigma: float, steps: int) -> float:
    """Returns what epsilon* tends to as T grows: (m / (2 v) + v / 12) / T; not a bound.

    Args:
      sigma: The noise multiplier; v and m are the variance and third central moment of X_t.
      steps: T.
    """
    v = math.expm1(sigma**-2)
    return ((v + 3.0) * v / 2.0 + v / 12.0) / steps


def point(job: tuple[float, int]) -> dict[str, Any]:
    """Bounds the crossing at (noise multiplier, T).

    Returns:
      'epsilon', the two ends; 'delta', balls-and-bins' at the upper one, bounded; 'zero', by how
      much its delta at epsilon 0 is certified to exceed Poisson's, relatively; 'signs' at 0, at
      1/16, 1/4 and 1 times the lower end, and at 1, 4, 16, ... times the upper end: '>' where
      balls-and-bins is certified worse, '<' better, '?' undecided.
    """
    sigma, steps = job
    pair = BallsAndBinsProfile(sigma, steps), PoissonProfile(sigma, 1.0 / steps, steps)
    guess = min(many_steps(sigma, steps), max(0.5 / sigma**2 - math.log(steps), 0.1))
    ends = crossing(*pair, guess)
    zero, there = compare(*pair, 0.0), compare(*pair, ends.upper).first
    orders = [zero, *(compare(*pair, ends.lower / k) for k in (16, 4, 1))]
    epsilon = ends.upper
    while min((order := compare(*pair, epsilon)).first.upper, order.second.upper) > FLOOR:
        orders.append(order)
        epsilon *= 4.0
    return {
        "epsilon": [float(ends.format_lower(".4e")), float(ends.format_upper(".4e"))],
        "delta": [float(there.format_lower(".3e")), float(there.format_upper(".3e"))],
        "zero": float(f"{0.999 * (zero.first.lower / zero.second.upper - 1.0):.2e}"),
        "signs": "".join("?><"[order.sign] for order in orders),
    }


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints the intervals."""
    jobs = product(config.noise_multipliers, config.steps)
    found = computed(point, jobs, console.progress, config.out)
    console.line(f"epsilon at which balls-and-bins becomes better than Poisson sampling ({TERMS})")
    console.table(
        ["sigma", *(f"T = {steps:,}" for steps in config.steps)],
        [
            [f"{sigma:g}", *(str(Bound(*found[sigma, steps]["epsilon"])) for steps in config.steps)]
            for sigma in config.noise_multipliers
        ],
    )
    once = sum(one["signs"].lstrip(">").lstrip("?").strip("<") == "" for one in found.values())
    console.line(f"signs that were certified change once at {once} of {len(found)} points")
    figure = blank(11, 4.8, TERMS)
    left, right = panels(figure, 1, 2)
    colors = mpl.colormaps["viridis"].resampled(len(config.steps) + 1)
    for i, steps in enumerate(config.steps):
        for axes, of in ((left, "epsilon"), (right, "delta")):
            low, high = zip(*(found[s, steps][of] for s in config.noise_multipliers), strict=True)
            axes.plot(config.noise_multipliers, high, color=colors(i), label=f"T = {steps:,}")
            axes.fill_between(config.noise_multipliers, low, high, color=colors(i), alpha=0.5)
        near = [s for s in config.noise_multipliers
                if many_steps(s, steps) < 3.0 * found[s, steps]["epsilon"][1]]  # fmt: skip
        limits = [many_steps(s, steps) for s in near]
        left.plot(near, limits, "--", color=colors(i), lw=0.8)
    for axes, label in ((left, "ε* where the curves cross"), (right, "δ(ε*)")):
        axes.set(xscale="log", yscale="log", xlabel="noise multiplier σ", ylabel=label)
        label_ones_twos_fives(axes.xaxis)
    left.set_title("balls-and-bins: worse below, better above")
    right.set_title("balls-and-bins: worse above, better below")
    legend(left, fontsize="x-small")
    return figure
