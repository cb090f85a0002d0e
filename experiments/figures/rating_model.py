"""A rating model, private for whole users: its test error over the cap on a user's ratings.

A small cap loses ratings (bias: the line without noise), a large one needs more noise, as the
clipping norm grows with it. The best cap lies between, and moves up as epsilon grows (Amin et al.,
"Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy", ICML 2019). A star
marks a run that chose its cap privately, and paid for the choice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting import format_delta
from experiments.cli.console import Console
from experiments.figures.drawing import RatingsPicture, blank, legend, panels
from experiments.tasks.ratings import ratings
from experiments.tasks.ratings.study import (
    QUANTILE,
    QUANTILE_EPSILON,
    FactorizedRatings,
    Study,
    split,
)

CAPS = (5, 10, 20, 50, 100, 200, 400, 700)
"""Those up to the size of the catalogue are tried: a public list."""
EPSILONS = {1.0: "#D55E00", 3.0: "#0072B2", 8.0: "#009E73"}
DELTA = 1e-5
SEEDED = "the runs' noise is seeded, to be repeated: the epsilons are those of fresh noise"


def curve(axes: Axes, caps: list[int], mean: Any, spread: Any, name: str, **how: Any) -> list[str]:
    """Draws means and deviations over the caps; returns their column of the table."""
    axes.errorbar(caps, mean, spread, capsize=3, label=name, **how)
    if how["ls"] == "-":
        best = int(np.argmin(mean))
        axes.plot(caps[best], mean[best], "o", ms=12, mfc="none", mec=how["color"], mew=1.8)
    return [f"{m:.4f} ± {s:.4f}" for m, s in zip(mean, spread, strict=True)]


def mean_and_spread(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation of what was measured with each seed: [..., seeds]."""
    return np.mean(found, axis=-1), np.std(found, axis=-1, ddof=1)


def label_caps(axes: Axes, caps: list[int]) -> None:
    """Labels the horizontal axis by the caps that were tried."""
    axes.set(xscale="log", xlabel="cap τ on a user's ratings (ratings)")
    axes.set_xticks(caps, [str(cap) for cap in caps])
    axes.minorticks_off()


def draw(config: RatingsPicture, console: Console) -> Figure:
    """Returns the figure; prints its numbers, and what each run cost."""
    table, seeds = ratings.load(config.ratings), range(config.seeds)
    caps = [cap for cap in CAPS if cap <= table.num_items]
    study = Study(FactorizedRatings(table, split(table)), caps, DELTA)
    figure = blank(8, 5.6)
    [axes] = panels(figure)

    def errors(name: str, sigma: float, tried: list[int]) -> list[float]:
        console.progress(f"{name}: cap {tried[0]}")
        return [study.test_error(sigma, cap, seed) for seed, cap in enumerate(tried)]

    def columns(name: str, sigma: float, **how: Any) -> list[str]:
        found = [errors(name, sigma, [cap for _ in seeds]) for cap in caps]
        return curve(axes, caps, *mean_and_spread(found), name, **how)

    rows, lines = [columns("no noise (bias alone)", 0.0, color="black", ls="--")], []
    for target, color in EPSILONS.items():
        sigma = study.noise_multiplier(target)
        rows.append(columns(f"ε = {target:g}", sigma, color=color, ls="-"))
        lines.append(f"sigma {sigma:.4g}: epsilon in {study.price(sigma):.4f}")
        # The choice of tau costs privacy too: more noise for the rest.
        sigma = study.noise_multiplier(target, QUANTILE_EPSILON)
        chosen = [study.choose_cap() for _ in seeds]
        found = np.array(errors(f"ε = {target:g}, cap chosen privately", sigma, chosen))
        axes.errorbar(
            np.median(chosen), found.mean(), found.std(ddof=1), color=color, fmt="*", ms=15,
            mec="black", capsize=3, zorder=5,
        )  # fmt: skip
        lines.append(
            f"sigma {sigma:.4g} after a private choice of the cap ({sorted(chosen)}): epsilon "
            f"in {study.price(sigma, QUANTILE_EPSILON):.4f}, RMSE {found.mean():.4f} ± "
            f"{found.std(ddof=1):.4f}"
        )
    untrained = study.model.error(study.model.start)
    axes.axhline(untrained, color="gray", lw=0.8, ls=":", label="users' own ratings alone")
    axes.plot([], [], "o", ms=12, mfc="none", mec="gray", mew=1.8, label="best cap")
    axes.plot(
        [], [], "*", ms=15, color="gray", mec="black",
        label=f"cap near the {QUANTILE:.0%} quantile,\nchosen with {QUANTILE_EPSILON:g} of ε",
    )  # fmt: skip
    label_caps(axes, caps)
    axes.set_ylabel("test RMSE (stars of 5)")
    axes.set_title(
        f"{study.sampler.num_examples:,} users; each whole user is protected, "
        f"δ = {format_delta(DELTA)}; mean ± s.d. of {config.seeds} seeds"
    )  # fmt: skip
    legend(axes)
    for line in [f"delta {format_delta(DELTA)}, zero-out adjacency, unit: one user", *lines]:
        console.line(line)
    console.table(
        ["cap", "no noise", *(f"epsilon {target:g}" for target in EPSILONS)],
        [[str(cap), *row] for cap, row in zip(caps, zip(*rows, strict=True), strict=True)],
    )
    console.line(f"untrained: {untrained:.4f}")
    console.line("NOT PRIVATE: the errors, and settings and caps chosen by looking at them")
    console.line(SEEDED)
    return figure
