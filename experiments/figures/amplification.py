"""Limits of amplification by subsampling: noise of a sampled mean over the full mean's.

Left, p eps_p / eps over the epsilon of one release, for several sampling rates p: the Laplace noise
of the mean of all examples over the noise of a Poisson sample's mean. Right, its inverse, the
penalty of sampling, over c = eps / p: all rates fall below one bound, c / log(1 + c). Gaussian
noise over many releases follows a milder law, here by the certified accountant at a final (1,
1e-6). Below, the ratio over p at eps = c p, and mean squared errors of both means, simulated (dots)
and in closed form. Subsampling is nearly free as long as one release costs less than p.

T. Steinke, "Limits of Privacy Amplification by Subsampling", DifferentialPrivacy.org, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cli.console import Console
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Picture, blank, legend, panels
from experiments.papers.amplification import (
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
    laplace_noise_scale,
    mean_squared_error,
)

SAMPLING_PROBS = (0.3, 0.1, 0.01, 0.001)
COLORS = ("#D55E00", "#0072B2", "#009E73", "#000000")
EPSILONS = np.geomspace(1e-4, 10, 200)
RATIOS = np.geomspace(1e-2, 1e3, 200)

STEPS = 1_000
EPSILON, DELTA = 1.0, 1e-6
"""Joint guarantee of the Gaussian releases."""

NUM_VALUES, DRAWS = 1_000, 2_000


def draw_laplace(axes: Sequence[Axes]) -> None:
    """Draws p eps_p / eps over eps, its inverse, and over p.

    The inverse is over c = eps / p, the third ratio at eps = c p.
    """
    ratio, penalty, over_p = axes
    for prob, color in zip(SAMPLING_PROBS, COLORS, strict=True):
        ratios = [laplace_noise_ratio(float(e), prob) for e in EPSILONS]
        ratio.plot(EPSILONS, ratios, color=color, label=f"p = {prob:g}")
        ratio.plot(prob, laplace_noise_ratio(prob, prob), "o", color=color, ms=5)
        exact = [1 / laplace_noise_ratio(c * prob, prob) for c in RATIOS]
        penalty.plot(RATIOS, exact, color=color, lw=1.2, label=f"Laplace, p = {prob:g}")
    bound = [laplace_noise_penalty(c) for c in RATIOS]
    penalty.plot(RATIOS, bound, color="#CC79A7", lw=4, alpha=0.45, label="bound c / log(1 + c)")
    probs = np.geomspace(1e-3, 1.0, 100)
    for c, color in zip((0.1, 1.0, 10.0, 100.0), COLORS, strict=True):
        over_p.plot(probs, [laplace_noise_ratio(c * p, p) for p in probs], color=color)
        limit = over_p.axhline(1.0 / laplace_noise_penalty(c), color=color, ls=":")
        limit.set_label(f"c = {c:g}; dotted: log(1 + c) / c")
    ratio.set(ylim=(0, 1.05), xlabel="ε of one release", ylabel=r"$p\,ε_p / ε$")
    ratio.set_title("Laplace: full mean's noise over sampled mean's\n(dots: ε = p)")
    over_p.set(ylim=(0, 1.05), xlabel="sampling rate p", ylabel=r"$p\,ε_p / ε$")
    over_p.set_title("Laplace: the same ratio at ε = c p")


def draw_gaussian(axes: Axes, console: Console) -> None:
    """Draws and prints Gaussian noise's penalty over c, and its limit."""
    console.progress("calibrating Gaussian noise")
    budget = {"epsilon": EPSILON, "delta": DELTA}
    step_epsilon = 1.0 / full_batch_noise(STEPS, **budget)
    probs = np.geomspace(3e-4, 1.0, 9).tolist()
    points = [(step_epsilon / p, gaussian_noise_penalty(p, STEPS, **budget)) for p in probs]
    limit, color = [gaussian_noise_penalty_many_steps(c) for c in RATIOS], "#56B4E9"
    axes.plot(RATIOS, limit, "--", color=color, label="Gaussian, many releases (estimate)")
    label = f"Gaussian, {STEPS:,} releases, certified"
    axes.plot(*zip(*points, strict=True), "s", color=color, ms=5, label=label)
    axes.set(yscale="log", ylim=(0.9, 200))
    axes.set(xlabel="c = ε of one release / p", ylabel="sampled mean's noise over full mean's")
    axes.set_title("What sampling costs in noise at equal guarantee")
    console.line(
        f"Gaussian noise, {STEPS:,} releases, together epsilon {EPSILON:g} at delta {DELTA:g} "
        f"({TERMS})"
    )
    rows = [[f"{c:.3g}", f"{r:.3f}", f"{gaussian_noise_penalty_many_steps(c):.3f}"]
            for c, r in points]  # fmt: skip
    console.table(["c", "certified", "many releases"], rows)


def draw_errors(axes: Axes) -> None:
    """Draws mean squared errors of sampled and full mean over p."""
    rng, probs = np.random.default_rng(0), np.geomspace(0.01, 1.0, 13)
    values = rng.random(NUM_VALUES)
    for epsilon, color in zip((1.0, 0.1, 0.01), COLORS, strict=False):
        errors = [mean_squared_error(values, epsilon, p) for p in probs]
        axes.plot(probs, errors, color=color, label=f"ε = {epsilon:g}; dotted: full mean")
        axes.axhline(mean_squared_error(values, epsilon), color=color, ls=":")
        for p in probs:
            sampled = (rng.random((DRAWS, NUM_VALUES)) < p) @ values / (p * NUM_VALUES)
            noise = rng.laplace(0, laplace_noise_scale(epsilon, NUM_VALUES, float(p)), DRAWS)
            axes.plot(p, np.mean((sampled + noise - values.mean()) ** 2), ".", color=color)
    axes.set(yscale="log", xlabel="sampling rate p", ylabel="mean squared error")
    axes.set_title(f"Mean of {NUM_VALUES:,} values in [0, 1]")


def draw(config: Picture, console: Console) -> Figure:
    """Returns the figure; prints the certified points."""
    figure = blank(11, 9, f"{TERMS}; Laplace noise: δ = 0, Gaussian noise: δ = {DELTA:g}")
    ratio, penalty, over_p, errors = all_axes = panels(figure, 2, 2)
    for axes in all_axes:
        axes.set_xscale("log")
    draw_laplace([ratio, penalty, over_p])
    draw_gaussian(penalty, console)
    draw_errors(errors)
    for axes in all_axes:
        legend(axes)
    return figure
