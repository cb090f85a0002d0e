"""The trade-off of a cap on users' contributions: its bound, and what is measured.

Amin et al., "Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy" (ICML
2019): the exponential mechanism draws one of finitely many models by the sum of its losses on the
first tau ratings of each user. Left: how far its expected loss on all ratings is above the least,
and what is proved of it. Right: its test error, and that of DP-SGD with the same cap and epsilon.
What is drawn looks at the data: it is not private.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from accounting import format_delta
from accounting.releases.contribution import excess_bounds, published_privacy_excess
from experiments.cli.console import Console
from experiments.figures.contributions import TERMS
from experiments.figures.drawing import RatingsPicture, blank, legend, panels
from experiments.figures.rating_model import CAPS, DELTA, SEEDED, curve, label_caps, mean_and_spread
from experiments.tasks.ratings import ratings
from experiments.tasks.ratings.linear import CLASS, LinearRatings
from experiments.tasks.ratings.study import Study, split

BOUNDED = 1.0
"""Epsilon of the bound and its parts."""
EPSILONS = {0.1: "#009E73", BOUNDED: "#D55E00", 3.0: "#0072B2"}
FAILURE = 0.05


def draw(config: RatingsPicture, console: Console) -> Figure:
    """Returns the figure; prints its numbers."""
    table, seeds = ratings.load(config.ratings), range(config.seeds)
    caps = [cap for cap in CAPS if cap <= table.num_items]
    model = LinearRatings(table, split(table))
    study = Study(model, caps, DELTA)
    figure = blank(13, 6.4, f"{study.counts.size:,} users, {len(CLASS)} models ({TERMS})")
    left, right = panels(figure, 1, 2)
    console.progress("bounds")
    bounds = [
        excess_bounds(
            study.counts, cap, BOUNDED, len(CLASS), user_losses=model.user_losses, failure=FAILURE
        )
        for cap in caps
    ]
    users = [np.minimum(study.counts, cap).sum() / cap for cap in caps]
    published = [
        published_privacy_excess(m, BOUNDED, CLASS.shape[1], failure=FAILURE) for m in users
    ]
    total = [bound.on_data for bound in bounds]
    best = int(np.argmin(total))
    left.plot(caps, total, color="black", lw=2, label=f"bound at ε = {BOUNDED:g}: sum of")
    left.plot(caps[best], total[best], "*", color="black", ms=14)
    for part, style in (("bias", ":"), ("choice", "-."), ("privacy", "--")):
        values = np.array([getattr(bound, part) for bound in bounds])
        values[values == 0.0] = np.nan
        left.plot(caps, values, color="gray", ls=style, label=f"  its {part} term")
    left.plot(caps, published, color="#CC79A7", ls="--", label="privacy term as published")
    columns, lines, tests = [[f"{bound:.4f}" for bound in total]], [], model.error(CLASS)
    for target, color in EPSILONS.items():
        console.progress(f"epsilon {target:g}")
        laws = np.array([model.law(cap, target) for cap in caps])
        excess, mean = laws @ model.excess, laws @ tests
        left.plot(caps, excess, "o-", color=color, ms=4, label=f"measured at ε = {target:g}")
        lines.append(f"least excess at epsilon {target:g}: at cap {caps[int(np.argmin(excess))]}")
        spread = np.sqrt(np.maximum(laws @ np.square(tests) - np.square(mean), 0.0))
        sigma, name = study.noise_multiplier(target), f"ε = {target:g}"
        trained = [[study.test_error(sigma, cap, seed) for seed in seeds] for cap in caps]
        exponential, sgd = f"exponential mechanism, {name}, δ = 0", f"DP-SGD, {name}"
        columns += [
            [f"{one:.5f}" for one in excess],
            curve(right, caps, mean, spread, exponential, color=color, ls="-"),
            curve(right, caps, *mean_and_spread(trained), sgd, color=color, ls="--"),
        ]
        lines.append(f"DP-SGD, sigma {sigma:.4g}: epsilon in {study.price(sigma):.4f}")
    right.axhline(model.error(model.start), color="gray", lw=0.8, ls=":", label="untrained")
    left.set(yscale="log", ylabel="mean loss above the least of the class (losses in [0, 1])")
    left.set_title(f"bound (fails with probability {FAILURE:g}; ★ its least) and measurement")
    right.set_ylabel("test RMSE (stars of 5)")
    right.set_title(
        f"mean ± s.d.: exactly, and of {config.seeds} runs of DP-SGD (δ = {format_delta(DELTA)})"
    )
    for axes in (left, right):
        label_caps(axes, caps)
        legend(axes, loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=2)
    header = ["cap", "bound"]
    header += [f"{what} {e:g}" for e in EPSILONS for what in ("excess", "exponential", "DP-SGD")]
    for line in [*lines, f"the bound at epsilon {BOUNDED:g} is least at cap {caps[best]}"]:
        console.line(line)
    console.table(
        header,
        [[str(cap), *row] for cap, row in zip(caps, zip(*columns, strict=True), strict=True)],
    )
    console.line(
        f"the exponential mechanism: delta 0; DP-SGD: delta {format_delta(DELTA)}; {TERMS}"
    )
    console.line("the bound: of ratings kept at random; measured: of each user's first")
    console.line("NOT PRIVATE: errors, losses, bounds and numbers of ratings, exactly")
    console.line(SEEDED)
    return figure
