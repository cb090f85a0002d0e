"""How far amplification by subsampling carries: the noise of a sampled mean over the full mean's.

Left, p eps_p / eps over the epsilon of one release, for several sampling rates p: the Laplace noise
of the mean of all examples over that of a Poisson sample. Right, its inverse, the penalty of
sampling, over c = eps / p: all rates fall below one bound, c / log(1 + c). Gaussian noise over many
releases follows a milder law, here by the certified accountant at a final (1, 1e-6). Subsampling is
nearly free as long as one release costs less than p.

T. Steinke, "Limits of Privacy Amplification by Subsampling", DifferentialPrivacy.org, 2023.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting.estimates.amplification import (
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
)
from experiments.cli.console import Console
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Picture, blank, legend, panels

SAMPLING_PROBS = (0.3, 0.1, 0.01, 0.001)
COLORS = ("#D55E00", "#0072B2", "#009E73", "#000000")
EPSILONS = np.geomspace(1e-4, 10, 200)
RATIOS = np.geomspace(1e-2, 1e3, 200)

STEPS = 1_000
EPSILON, DELTA = 1.0, 1e-6
"""Final guarantee of the Gaussian releases."""


def draw_ratio(axes: Axes) -> None:
    """Draws p eps_p / eps over eps, and the rate p at which each curve has bent."""
    for prob, color in zip(SAMPLING_PROBS, COLORS, strict=True):
        ratios = [laplace_noise_ratio(float(e), prob) for e in EPSILONS]
        axes.plot(EPSILONS, ratios, color=color, label=f"p = {prob:g}")
        axes.plot(prob, laplace_noise_ratio(prob, prob), "o", color=color, ms=5)
    axes.set(xscale="log", ylim=(0, 1.05), xlabel="ε of one release", ylabel=r"$p\,ε_p / ε$")
    axes.set_title("Laplace: full mean's noise over sampled mean's\n(dots: ε = p)")
    legend(axes)


def gaussian_points(probs: np.ndarray) -> list[tuple[float, float]]:
    """Returns (c, penalty) of Gaussian noise at the final guarantee, for each sampling rate."""
    step_epsilon = 1.0 / full_batch_noise(STEPS, epsilon=EPSILON, delta=DELTA)
    return [
        (
            step_epsilon / prob,
            gaussian_noise_penalty(float(prob), STEPS, epsilon=EPSILON, delta=DELTA),
        )
        for prob in probs
    ]


def draw_penalty(axes: Axes, gaussian: list[tuple[float, float]]) -> None:
    """Draws the penalty over c = eps / p: exact curves, their bound, and the Gaussian's."""
    for prob, color in zip(SAMPLING_PROBS, COLORS, strict=True):
        exact = [1 / laplace_noise_ratio(c * prob, prob) for c in RATIOS]
        axes.plot(RATIOS, exact, color=color, lw=1.2, label=f"Laplace, p = {prob:g}")
    bound = [laplace_noise_penalty(c) for c in RATIOS]
    axes.plot(RATIOS, bound, color="#CC79A7", lw=4, alpha=0.45, label="bound c / log(1 + c)")
    limit = [gaussian_noise_penalty_many_steps(c) for c in RATIOS]
    axes.plot(RATIOS, limit, "--", color="#56B4E9", label="Gaussian, many releases (estimate)")
    axes.plot(
        *zip(*gaussian, strict=True),
        "s",
        color="#56B4E9",
        ms=5,
        label=f"Gaussian, {STEPS:,} releases, certified",
    )
    axes.set(xscale="log", yscale="log", ylim=(0.9, 200))
    axes.set(xlabel="c = ε of one release / p", ylabel="sampled mean's noise over full mean's")
    axes.set_title("What sampling costs in noise at equal guarantee")
    legend(axes)


def draw(config: Picture, console: Console) -> Figure:
    """Returns the figure; prints the points that are certified."""
    title = f"{TERMS}; Laplace noise: δ = 0, Gaussian noise: δ = {DELTA:g}"
    figure = blank(11, 4.8, title)
    left, right = panels(figure, 1, 2)
    console.progress("calibrating Gaussian noise")
    gaussian = gaussian_points(np.geomspace(3e-4, 1.0, 9))
    console.line(
        f"Gaussian noise, {STEPS:,} releases, together epsilon {EPSILON:g} at delta {DELTA:g} "
        f"({TERMS})"
    )
    console.table(
        ["c", "certified", "many releases"],
        [[f"{c:.3g}", f"{r:.3f}", f"{gaussian_noise_penalty_many_steps(c):.3f}"]
         for c, r in gaussian],
    )  # fmt: skip
    draw_ratio(left)
    draw_penalty(right, gaussian)
    return figure
