"""Rating models private for whole users: their loss over the cap on a user's ratings.

A small cap loses ratings, a large one needs more noise, and the best one lies between (Amin et al.,
"Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy", ICML 2019). Left:
the exponential mechanism draws one of finitely many linear models by the losses of the first
ratings of each user; its expected loss on all ratings above the least, with the proved bound.
Middle: its test error, and DP-SGD's with the same cap and epsilon. Right: a factorization by
DP-SGD; a star marks runs that chose their cap privately, and paid for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting.profile import format_delta
from experiments.cli.console import Console
from experiments.figures.contributions import TERMS
from experiments.figures.drawing import RatingsPicture, blank, legend, panels
from experiments.papers.contribution import excess_bounds, privacy_excess
from experiments.tasks.ratings import ratings
from experiments.tasks.ratings.linear import CLASS, LinearRatings
from experiments.tasks.ratings.study import (
    QUANTILE,
    QUANTILE_EPSILON,
    FactorizedRatings,
    Study,
    split,
)

CAPS = (5, 10, 20, 50, 100, 200, 400, 700)
"""Candidate caps, a public list, up to the size of the catalogue."""
COLORS = {0.1: "#CC79A7", 1.0: "#D55E00", 3.0: "#0072B2", 8.0: "#009E73"}
LINEAR, FACTORIZED = (0.1, 1.0, 3.0), (1.0, 3.0, 8.0)
"""Epsilons of the linear and of the factorized models."""
BOUNDED, FAILURE = 1.0, 0.05
"""Epsilon of the bound, and its failure probability."""
DELTA = 1e-5


class Curves:
    """Curves over the caps on some axes, with the table of their points."""

    def __init__(self, axes: Axes, caps: Sequence[int], title: str, label: str) -> None:
        self.axes, self._caps = axes, caps
        self._header, self._columns = ["cap"], [[str(cap) for cap in caps]]
        axes.set(xscale="log", xlabel="cap τ on a user's ratings (ratings)", ylabel=label)
        axes.set_xticks(caps, self._columns[0])
        axes.minorticks_off()
        axes.set_title(title)

    def add(
        self, name: str, mean: Any, spread: Any = None, *, least: bool = True, **how: Any
    ) -> None:
        """Draws a curve, its least point circled, with optional error bars."""
        self.axes.errorbar(self._caps, mean, spread, capsize=3, label=name, **how)
        best = int(np.argmin(mean))
        if least:
            self.axes.plot(
                self._caps[best], mean[best], "o", ms=12, mfc="none", mec=how["color"], mew=1.8
            )
        spreads = [""] * len(mean) if spread is None else [f" ± {x:.4f}" for x in spread]
        self._header.append(name)
        self._columns.append([f"{x:.4f}{s}" for x, s in zip(mean, spreads, strict=True)])

    def finish(self, console: Console) -> None:
        """Adds the legend, and prints the table."""
        self.axes.plot([], [], "o", ms=12, mfc="none", mec="gray", mew=1.8, label="its best cap")
        legend(self.axes, loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=2)
        console.table(self._header, [list(row) for row in zip(*self._columns, strict=True)])


def draw_bounds(curves: Curves, model: LinearRatings, study: Study) -> None:
    """Draws the exponential mechanism's proved bounds, and measurements."""
    options: Any = {"user_losses": model.user_losses, "failure": FAILURE}
    bounds = [
        excess_bounds(study.counts, cap, BOUNDED, len(CLASS), **options) for cap in study.caps
    ]
    total = [bound.on_data for bound in bounds]
    curves.add(f"bound at ε = {BOUNDED:g}, sum of", total, color="black", lw=2)
    for term, style in (("bias", ":"), ("choice", "-."), ("privacy", "--")):
        values = [getattr(bound, term) for bound in bounds]
        curves.add(f"its {term} term", values, least=False, color="gray", ls=style)
    users = [np.minimum(study.counts, cap).sum() / cap for cap in study.caps]
    size = (CLASS.shape[1] + 1) * math.log(3.0)
    published = [8.0 * privacy_excess(m, BOUNDED, size, failure=FAILURE) for m in users]
    curves.add("privacy term as published", published, least=False, color="#E69F00", ls="--")
    for target in LINEAR:
        excess = [model.law(cap, target) @ model.excess for cap in study.caps]
        curves.add(f"measured, ε = {target:g}", excess, color=COLORS[target], marker=".")


def draw_exponential(curves: Curves, model: LinearRatings, caps: Sequence[int]) -> None:
    """Draws mean and deviation of the test error, exactly by the law."""
    errors = model.error(CLASS)
    for target in LINEAR:
        laws = np.array([model.law(cap, target) for cap in caps])
        mean = laws @ errors
        spread = np.sqrt(np.maximum(laws @ np.square(errors) - np.square(mean), 0.0))
        name = f"exponential mechanism, ε = {target:g}, δ = 0"
        curves.add(name, mean, spread, color=COLORS[target])


def draw_sgd(
    curves: Curves,
    study: Study,
    epsilons: Sequence[float],
    seeds: int,
    console: Console,
    **how: Any,
) -> None:
    """Draws the test error of DP-SGD over seeds; prints its cost."""
    for target in (0.0, *epsilons):
        name = f"DP-SGD, ε = {target:g}" if target else "no noise (bias alone)"
        sigma, bound = study.calibrated(target) if target else (0.0, None)
        errors = []
        for cap in study.caps:
            console.progress(f"{name}: cap {cap}")
            errors.append([study.test_error(sigma, cap, seed) for seed in range(seeds)])
        style = {"color": COLORS[target], **how} if bound else {"color": "black", "ls": ":"}
        spread = np.std(errors, axis=1, ddof=1)
        curves.add(name, np.mean(errors, axis=1), spread, least=bool(bound), **style)
        if bound:
            console.line(f"{name}: sigma {sigma:.4g}, epsilon in {bound}")


def draw_private_caps(curves: Curves, study: Study, seeds: int, console: Console) -> None:
    """Draws runs with a private choice of the cap, paid by noise."""
    style: Any = {"fmt": "*", "ms": 15, "mec": "black", "capsize": 3, "zorder": 5}
    for target in FACTORIZED:
        sigma, bound = study.calibrated(target, QUANTILE_EPSILON)
        chosen = [study.choose_cap() for _ in range(seeds)]
        errors = [study.test_error(sigma, cap, seed) for seed, cap in enumerate(chosen)]
        mean, spread = np.mean(errors), np.std(errors, ddof=1)
        curves.axes.errorbar(np.median(chosen), mean, spread, color=COLORS[target], **style)
        console.line(
            f"sigma {sigma:.4g} after a private choice of the cap ({sorted(chosen)}): epsilon in "
            f"{bound}, RMSE {mean:.4f} ± {spread:.4f}"
        )
    label = f"cap near the {QUANTILE:.0%} quantile, for {QUANTILE_EPSILON:g} of ε"
    curves.axes.plot([], [], "*", ms=15, color="gray", mec="black", label=label)


def draw(config: RatingsPicture, console: Console) -> Figure:
    """Returns the figure; prints its numbers, and the cost of each run."""
    table, seeds = ratings.load(config.ratings), config.seeds
    held_out, caps = split(table), [cap for cap in CAPS if cap <= table.num_items]
    linear, factorized = LinearRatings(table, held_out), FactorizedRatings(table, held_out)
    studies = Study(linear, caps, DELTA), Study(factorized, caps, DELTA)
    terms = f"exponential mechanism: δ = 0; DP-SGD: δ = {format_delta(DELTA)}; {TERMS}"
    figure = blank(19, 6.6, f"{studies[0].counts.size:,} users, {seeds} seeds; {terms}")
    axes = panels(figure, 1, 3)
    console.line(terms)
    title = f"one of {len(CLASS)} linear models: bound (fails in {FAILURE:.0%}) and measurement"
    curves = Curves(axes[0], caps, title, "mean loss above the least (losses in [0, 1])")
    axes[0].set_yscale("log", nonpositive="mask")
    draw_bounds(curves, linear, studies[0])
    curves.finish(console)
    curves = Curves(axes[1], caps, "linear models: mean ± s.d.", "test RMSE (stars of 5)")
    draw_exponential(curves, linear, caps)
    draw_sgd(curves, studies[0], LINEAR, seeds, console, ls="--")
    curves.finish(console)
    curves = Curves(axes[2], caps, "a factorization: mean ± s.d.", "test RMSE (stars of 5)")
    draw_sgd(curves, studies[1], FACTORIZED, seeds, console)
    draw_private_caps(curves, studies[1], seeds, console)
    untrained = factorized.error(factorized.start)
    axes[2].axhline(untrained, color="gray", lw=0.8, ls=":", label="users' own ratings alone")
    curves.finish(console)
    console.line(f"untrained: {linear.error(linear.start):.4f} and {untrained:.4f}")
    console.line("the bound: of ratings kept at random; measured: of each user's first")
    console.line(
        "NOT PRIVATE: all but the epsilons; settings and caps were chosen by looking at it"
    )
    console.line("the runs' noise is seeded, to be repeated: the epsilons are those of fresh noise")
    return figure
