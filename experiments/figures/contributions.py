"""Error of a private sum over the cap on each user's contribution.

Amin et al., "Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy" (ICML
2019), section 3: user j contributes x_j ratings, each is capped at tau, and the sum gets Laplace
noise of scale tau / epsilon. Equation (2) bounds the expected error, and is least at the
ceil(1/epsilon)-th largest contribution. The figure looks at the data: it is not private.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from dpsgd.core.guarantee import ADJACENCY
from experiments.figures import Options
from experiments.figures.drawing import Layout
from experiments.papers.contribution import sum_error, sum_error_bound, sum_sweet_spot
from experiments.results.points import Cells, Job, text
from experiments.tasks.ratings import ratings

EPSILONS = (0.02, 0.1, 0.5)
DRAWS = 400
"""Number of noisy sums of each seed's mean error."""
TERMS = f"{ADJACENCY} adjacency, unit: one user"
NOTES = ("NOT PRIVATE: the ratings, exactly", f"epsilon of one such sum, delta 0 ({TERMS})")

BOUND, EXACT = "bound, equation (2)", "expected error, exactly"
MEASURED, RULE = "measured: mean ± standard error", "predicted sweet spot: the ⌈1/ε⌉-th largest"
STYLES: Mapping[str, dict[str, Any]] = {
    BOUND: {"color": "#D55E00"},
    EXACT: {"color": "#0072B2"},
    MEASURED: {"color": "black", "fmt": "o", "ms": 3, "lw": 1},
    RULE: {"color": "#D55E00", "fmt": "*", "ms": 14},
}
_AXES = {"xlabel": "cap τ on a user's ratings (ratings)", "ylabel": "mean |error| of their number"}
LAYOUT = Layout(
    size=(13, 4.8),
    columns=3,
    axes={"": {**_AXES, "xscale": "log", "yscale": "log"}},
    title=f"Laplace noise, δ = 0 ({TERMS})",
    style=lambda point: STYLES[point["curve"]],
    legend={"ncols": 4},
    shared=True,
)


def jobs(options: Options) -> Iterator[Job]:
    """Yields an epsilon at a time."""
    for epsilon in EPSILONS:
        sizes = {"seeds": options.num_seeds, "draws": DRAWS}
        yield {"ratings": options.ratings, "epsilon": epsilon, **sizes}


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns bounded, expected and measured errors over the cap."""
    counts = np.unique(ratings.load(job["ratings"]).user, return_counts=True)[1]
    largest, epsilon = float(counts.max()), job["epsilon"]
    best = float(sum_sweet_spot(counts, epsilon))
    points: list[dict[str, Any]] = []
    for cap in np.arange(min(10.0, largest), 1.3 * largest).tolist():
        points.append({"curve": BOUND, "x": cap, "value": sum_error_bound(counts, cap, epsilon)})
        points.append({"curve": EXACT, "x": cap, "value": sum_error(counts, cap, epsilon)})
    caps = {*np.geomspace(min(10.0, largest), 1.3 * largest, 25).tolist(), best, largest}
    for cap in sorted(caps):
        shortfall = float(np.minimum(counts, cap).sum()) - float(counts.sum())
        noise = [
            np.random.default_rng(seed).laplace(0.0, cap / epsilon, job["draws"])
            for seed in range(job["seeds"])
        ]
        errors = np.abs(shortfall + np.array(noise)).mean(axis=1)
        spread = {"standard_error": float(errors.std(ddof=1) / np.sqrt(errors.size))}
        points.append({"curve": MEASURED, "x": cap, "value": float(errors.mean()), **spread})
    points.append({"curve": RULE, "x": best, "value": sum_error_bound(counts, best, epsilon)})
    sizes = {"epsilon": epsilon, "largest": largest, "rank": int(np.sum(counts >= best))}
    panel = f"ε = {epsilon:g}: predicted τ = {best:.0f}"
    return [{"panel": panel, **sizes, **point} for point in points]


def lines(table: pl.DataFrame) -> Iterator[str | Cells]:
    """Yields the best caps and measured errors."""
    rows = []
    for _, points in table.group_by("panel", maintain_order=True):
        [rule], largest = points.filter(curve=RULE).to_dicts(), points["largest"][0]
        best = points.filter(curve=EXACT).sort("value")["x"][0]
        measured = {row["x"]: text(row) for row in points.filter(curve=MEASURED).to_dicts()}
        errors = [measured[cap] for cap in (min(10.0, largest), rule["x"], largest)]
        cells = [f"{rule['epsilon']:g}", f"{rule['x']:.0f}", f"{rule['rank']}", f"{best:.0f}"]
        rows.append([*cells, *errors])
    header = ["epsilon", "cap by the rule", "rank", "best cap"]
    yield [*header, "error at 10 or below", "at the rule's cap", "without a cap"], rows
