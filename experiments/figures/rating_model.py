"""Rating models private for whole users: their loss over the cap on a user's ratings.

A small cap loses ratings, a large one needs more noise, and the best one lies between (Amin et al.,
"Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy", ICML 2019). Left:
the exponential mechanism draws one of finitely many linear models by the losses of the first
ratings of each user; its expected loss on all ratings above the least, with the proved bound.
Middle: its expected test error, and DP-SGD's with the same cap and epsilon. Right: a factorization
by DP-SGD; a star marks runs that chose their cap privately, and paid for the choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from accounting import Bound
from accounting.profile import format_delta
from experiments.figures import Options
from experiments.figures.contributions import TERMS
from experiments.figures.drawing import BELOW, Layout
from experiments.papers.contribution import excess_bounds, privacy_excess
from experiments.results.points import Cells, Job, pivot
from experiments.tasks.ratings import ratings
from experiments.tasks.ratings.study import (
    CLASS,
    QUANTILE,
    QUANTILE_EPSILON,
    FactorizedRatings,
    LinearRatings,
    Study,
    split,
)

CAPS, SMALL_CAPS = (5, 10, 20, 50, 100, 200, 400, 700), (5, 50, 200)
"""Candidate caps, a public list, up to the size of the catalogue."""
COLORS = {0.0: "black", 0.1: "#CC79A7", 1.0: "#D55E00", 3.0: "#0072B2", 8.0: "#009E73"}
LINEAR, FACTORIZED = (0.1, 1.0, 3.0), (1.0, 3.0, 8.0)
"""Epsilons of the linear and of the factorized models."""
BOUNDED, FAILURE, DELTA = 1.0, 0.05, 1e-5
"""Epsilon of the bound, its failure probability, and delta of DP-SGD."""

BOUND = f"one of {len(CLASS)} linear models: bound (fails in {FAILURE:.0%}), measured"
MODELS = {
    "linear models: mean ± standard error": (LinearRatings, LINEAR),
    "a factorization: mean ± standard error": (FactorizedRatings, FACTORIZED),
}
"""Model and epsilons of each panel of test errors."""
STYLES: dict[str, dict[str, Any]] = {
    "bound": {"color": "black", "lw": 2},
    "bias": {"color": "gray", "ls": ":"},
    "choice": {"color": "gray", "ls": "-."},
    "privacy": {"color": "gray", "ls": "--"},
    "published": {"color": "#E69F00", "ls": "--"},
    "law": {"marker": "."},
    "DP-SGD": {"ls": "--"},
    "chosen cap": {"fmt": "*", "ms": 15, "mec": "black", "zorder": 5},
    "untrained": {"color": "gray", "lw": 0.8, "ls": ":"},
}
"""Style of each kind of curve."""
NOTES = (
    f"exponential mechanism: δ = 0; DP-SGD: δ = {format_delta(DELTA)}; {TERMS}",
    "the bound: of ratings kept at random; measured: of each user's first",
    "NOT PRIVATE: all but the epsilons; settings and caps were chosen by looking at it",
    "the runs' noise is seeded, to be repeated: the epsilons are those of fresh noise",
)
_AXES = {"xscale": "log", "xlabel": "cap τ on a user's ratings (ratings)"}
LAYOUT = Layout(
    size=(19, 6.6),
    columns=3,
    axes={
        BOUND: {**_AXES, "yscale": "log", "ylabel": "mean loss above the least (in [0, 1])"},
        "": {**_AXES, "ylabel": "test RMSE (stars of 5)"},
    },
    title=NOTES[0],
    style=lambda point: {
        "color": COLORS.get(point["epsilon"] or 0.0), **STYLES.get(point["kind"], {})
    },
    legend={**BELOW, "ncols": 2},
)  # fmt: skip


def jobs(options: Options) -> Iterator[Job]:
    """Yields jobs of the exponential mechanism and DP-SGD."""
    shared: dict[str, Any] = {"ratings": options.ratings, "seeds": options.num_seeds}
    shared["caps"] = SMALL_CAPS if options.small else CAPS
    for panel, (model, epsilons) in MODELS.items():
        if model is LinearRatings:
            yield {**shared, "panel": panel, "kind": "law", "epsilons": epsilons}
        for epsilon in (0.0, *epsilons):
            yield {**shared, "panel": panel, "kind": "DP-SGD", "epsilon": epsilon}
        if model is FactorizedRatings:
            for epsilon in epsilons:
                yield {**shared, "panel": panel, "kind": "chosen cap", "epsilon": epsilon}


@functools.cache
def _study(panel: str, path: Path | None, caps: tuple[int, ...]) -> tuple[Any, Study]:
    """Returns a model of ratings and its runs, with one compiled program in a process."""
    table = ratings.load(path)
    model = MODELS[panel][0](table, split(table))
    return model, Study(model, [cap for cap in caps if cap <= table.num_items], DELTA)


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns points over the cap with kind and epsilon."""
    model, study = _study(job["panel"], job["ratings"], tuple(job["caps"]))
    if job["kind"] != "law":
        return [{"panel": job["panel"], **point} for point in _runs(model, study, job)]
    points: list[dict[str, Any]] = []
    errors = model.error(CLASS)
    for cap in study.caps:
        points += ({"x": cap, **term} for term in _bounds(model, study, cap))
        for epsilon in job["epsilons"]:
            law, point = model.law(cap, epsilon), {"kind": "law", "epsilon": epsilon, "x": cap}
            excess, error = float(law @ model.excess), float(law @ errors)
            points.append({"curve": f"measured, ε = {epsilon:g}", **point, "value": excess})
            point |= {"panel": job["panel"], "value": error}
            points.append({"curve": f"exponential mechanism, ε = {epsilon:g}, δ = 0", **point})
    return [{"panel": BOUND, **point} for point in points]


def _bounds(model: LinearRatings, study: Study, cap: int) -> Iterator[dict[str, Any]]:
    """Yields the exponential mechanism's proved bound at a cap, and its terms."""
    options: Any = {"user_losses": model.user_losses, "failure": FAILURE}
    bound = excess_bounds(study.counts, cap, BOUNDED, len(CLASS), **options)
    users = np.minimum(study.counts, cap).sum() / cap
    size = (CLASS.shape[1] + 1) * math.log(3.0)
    yield {"kind": "bound", "curve": f"bound at ε = {BOUNDED:g}, sum of", "value": bound.on_data}
    for term in ("bias", "choice", "privacy"):
        yield {"kind": term, "curve": f"its {term} term", "value": getattr(bound, term)}
    published = 8.0 * privacy_excess(users, BOUNDED, size, failure=FAILURE)
    yield {"kind": "published", "curve": "privacy term as published", "value": published}


def _runs(model: Any, study: Study, job: Job) -> Iterator[dict[str, Any]]:
    """Yields DP-SGD's mean test error over seeds, with the cost of a run."""
    target, seeds, chosen = job["epsilon"], range(job["seeds"]), job["kind"] == "chosen cap"
    point = {"kind": job["kind"], "epsilon": target, "curve": f"DP-SGD, ε = {target:g}"}
    sigma = 0.0
    if target:
        sigma, bound = study.calibrated(target, QUANTILE_EPSILON if chosen else 0.0)
        point |= {"sigma": sigma, "epsilon_lower": bound.lower, "epsilon_upper": bound.upper}
    else:
        untrained = {
            "kind": "untrained",
            "curve": "untrained",
            "value": float(model.error(model.start)),
        }
        yield from ({**untrained, "x": cap} for cap in study.caps)
        point |= {"kind": "no noise", "curve": "no noise (bias alone)"}
    if chosen:
        budget = f"{QUANTILE_EPSILON:g} for a cap near the {QUANTILE:.0%} quantile"
        point["curve"] = f"DP-SGD, ε = {target:g}, {budget}"
    caps = (
        [[study.choose_cap() for _ in seeds]]
        if chosen
        else [[cap] * len(seeds) for cap in study.caps]
    )
    for run_caps in caps:
        errors = [
            study.test_error(sigma, cap, seed) for cap, seed in zip(run_caps, seeds, strict=True)
        ]
        error = float(np.std(errors, ddof=1) / math.sqrt(len(errors)))
        value = {"value": float(np.mean(errors)), "standard_error": error}
        yield {**point, "x": float(np.median(run_caps)), **value}


def lines(table: pl.DataFrame) -> Iterator[str | Cells]:
    """Yields points of panels and costs of runs."""
    for (panel,), points in table.group_by("panel", maintain_order=True):
        yield str(panel)
        yield pivot(points.sort("x", maintain_order=True).to_dicts(), corner="cap")
    for row in table.drop_nulls("sigma").unique("curve", maintain_order=True).to_dicts():
        bound = Bound(row["epsilon_lower"], row["epsilon_upper"])
        yield f"{row['curve']}: sigma {row['sigma']:.4g}, epsilon in {bound}"
