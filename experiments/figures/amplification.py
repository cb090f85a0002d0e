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

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from experiments.figures import Options
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Layout
from experiments.papers.amplification import (
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
    laplace_noise_scale,
    mean_squared_error,
)
from experiments.results.points import Cells, Job

SAMPLING_PROBS, RATIOS, EPSILONS = (0.3, 0.1, 0.01, 0.001), (0.1, 1.0, 10.0, 100.0), (1, 0.1, 0.01)
"""Values of p, of c, and of the epsilon of one mean, each with a colour."""
COLORS = ("#D55E00", "#0072B2", "#009E73", "#000000")
STEPS, EPSILON, DELTA = 1_000, 1.0, 1e-6
"""Number and joint guarantee of the Gaussian releases."""
NUM_VALUES, DRAWS = 1_000, 2_000
"""Values of the simulated mean, and draws of each mean squared error."""

RATIO = "Laplace: full mean's noise over sampled mean's\n(dots: ε = p)"
PENALTY = "What sampling costs in noise at equal guarantee"
OVER_P = "Laplace: the same ratio at ε = c p"
ERROR = f"Mean of {NUM_VALUES:,} values in [0, 1]"
NOTES = (f"Gaussian noise, {STEPS:,} releases, jointly ({EPSILON:g}, {DELTA:g})-DP ({TERMS})",)
KINDS: dict[str, dict[str, Any]] = {
    "dot": {"marker": "o", "ms": 5, "ls": "", "label": None},
    "limit": {"ls": ":", "label": None},
    "bound": {"color": "#CC79A7", "lw": 4, "alpha": 0.45},
    "estimate": {"color": "#56B4E9", "ls": "--"},
    "certified": {"color": "#56B4E9", "marker": "s", "ms": 5, "ls": ""},
    "simulated": {"marker": ".", "ls": "", "label": None},
}
"""Style of each kind of curve but exact ones."""


def style(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the style of a curve by kind and colour."""
    return {"color": COLORS[point["color"] or 0], **KINDS.get(point["kind"], {})}


_AXES = {"xscale": "log", "ylim": (0, 1.05), "ylabel": r"$p\,ε_p / ε$"}
LAYOUT = Layout(
    size=(11, 9),
    columns=2,
    axes={
        RATIO: {**_AXES, "xlabel": "ε of one release"},
        PENALTY: {"xscale": "log", "yscale": "log", "ylim": (0.9, 200),
                  "xlabel": "c = ε of one release / p",
                  "ylabel": "sampled mean's noise over full mean's"},
        OVER_P: {**_AXES, "xlabel": "sampling rate p"},
        ERROR: {"xscale": "log", "yscale": "log", "ylim": (1e-7, 0.3),
                "xlabel": "sampling rate p", "ylabel": "mean squared error"},
    },
    title=f"{TERMS}; Laplace noise: δ = 0, Gaussian noise: δ = {DELTA:g}",
    style=style,
)  # fmt: skip


def jobs(options: Options) -> Iterator[Job]:
    """Yields closed forms, certified penalties and simulated errors."""
    yield {"kind": "exact"}
    for prob in np.geomspace(3e-4, 1.0, 9).tolist():
        yield {"kind": "certified", "sampling_prob": prob}
    for color in range(len(EPSILONS)):
        yield {"kind": "simulated", "color": color, "draws": DRAWS}


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns points of curves, with their kind and colour."""
    if job["kind"] == "exact":
        return list(_closed_forms())
    if job["kind"] == "simulated":
        return list(_errors(job["color"], job["draws"]))
    prob, budget = job["sampling_prob"], {"epsilon": EPSILON, "delta": DELTA}
    c = 1.0 / full_batch_noise(STEPS, **budget) / prob
    penalty = gaussian_noise_penalty(prob, STEPS, **budget)
    curve = f"Gaussian, {STEPS:,} releases, certified"
    return [{"panel": PENALTY, "curve": curve, "kind": "certified", "x": c, "value": penalty}]


def _closed_forms() -> Iterator[dict[str, Any]]:
    """Yields p eps_p / eps over eps, over p at eps = c p, and the penalties over c = eps / p."""
    cs = np.geomspace(1e-2, 1e3, 200).tolist()
    for color, p in enumerate(SAMPLING_PROBS):
        point = {"panel": RATIO, "curve": f"p = {p:g}", "color": color}
        for x in np.geomspace(1e-4, 10, 200).tolist():
            yield {**point, "x": x, "value": laplace_noise_ratio(x, p)}
        yield {**point, "curve": f"p = {p:g}, dot", "kind": "dot", "x": p,
               "value": laplace_noise_ratio(p, p)}  # fmt: skip
        for c in cs:
            yield {"panel": PENALTY, "curve": f"Laplace, p = {p:g}", "color": color, "x": c,
                   "value": 1 / laplace_noise_ratio(c * p, p)}  # fmt: skip
    penalties = {"bound": ("bound c / log(1 + c)", laplace_noise_penalty),
                 "estimate": ("Gaussian, many releases (estimate)",
                              gaussian_noise_penalty_many_steps)}  # fmt: skip
    for kind, (curve, penalty) in penalties.items():
        for c in cs:
            yield {"panel": PENALTY, "curve": curve, "kind": kind, "x": c, "value": penalty(c)}
    for color, c in enumerate(RATIOS):
        point = {"panel": OVER_P, "curve": f"c = {c:g}; dotted: log(1 + c) / c", "color": color}
        limit = {**point, "curve": f"c = {c:g}, limit", "kind": "limit"}
        for p in np.geomspace(1e-3, 1.0, 100).tolist():
            yield {**point, "x": p, "value": laplace_noise_ratio(c * p, p)}
            yield {**limit, "x": p, "value": 1.0 / laplace_noise_penalty(c)}


def _errors(color: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yields mean squared errors of the sampled and of the full mean over p."""
    rng, epsilon = np.random.default_rng(color), EPSILONS[color]
    values = np.random.default_rng(0).random(NUM_VALUES)
    for p in np.geomspace(0.01, 1.0, 13).tolist():
        sampled = (rng.random((draws, NUM_VALUES)) < p) @ values / (p * NUM_VALUES)
        noise = rng.laplace(0, laplace_noise_scale(epsilon, NUM_VALUES, p), draws)
        errors = {
            "exact": mean_squared_error(values, epsilon, p),
            "limit": mean_squared_error(values, epsilon),
            "simulated": float(np.mean((sampled + noise - values.mean()) ** 2)),
        }
        for kind, error in errors.items():
            curve = f"ε = {epsilon:g}; dotted: full mean" + f", {kind}" * (kind != "exact")
            point = {"panel": ERROR, "curve": curve, "kind": kind, "color": color}
            yield {**point, "x": p, "value": error}


def lines(table: pl.DataFrame) -> Iterator[str | Cells]:
    """Yields certified penalties and estimates for many releases."""
    points = table.filter(kind="certified").select("x", "value").iter_rows()
    yield (
        ["c", "certified", "many releases"],
        [[f"{c:.3g}", f"{value:.3f}", f"{gaussian_noise_penalty_many_steps(c):.3f}"]
         for c, value in points],
    )  # fmt: skip
