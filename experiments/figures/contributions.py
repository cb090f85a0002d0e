"""Error of a private sum over the cap on each user's contribution.

Amin et al., "Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy" (ICML
2019), section 3: user j contributes x_j ratings, each is capped at tau, and the sum gets Laplace
noise of scale tau / epsilon. Equation (2) bounds the expected error, and is least at the
ceil(1/epsilon)-th largest contribution. The figure looks at the data: it is not private.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsgd.core.guarantee import ADJACENCY
from experiments.cli.console import Console
from experiments.figures.drawing import RatingsPicture, blank, legend, panels
from experiments.papers.contribution import sum_error, sum_error_bound, sum_sweet_spot
from experiments.tasks.ratings import ratings

EPSILONS = (0.02, 0.1, 0.5)
DRAWS = 400
"""Number of noisy sums for each seed's mean error."""

TERMS = f"{ADJACENCY} adjacency, unit: one user"


def measured(counts: np.ndarray, cap: float, epsilon: float, seeds: int) -> np.ndarray:
    """Returns the mean |error| of simulated private sums, [seeds]."""
    capped, total = float(np.minimum(counts, cap).sum()), float(counts.sum())
    errors = [
        np.abs(capped + np.random.default_rng(seed).laplace(0.0, cap / epsilon, DRAWS) - total)
        for seed in range(seeds)
    ]
    return np.mean(errors, axis=1)


def draw_epsilon(axes: Axes, counts: np.ndarray, epsilon: float, seeds: int) -> list[str]:
    """Draws one epsilon; returns its row of the table."""
    caps = np.geomspace(10.0, 1.3 * counts.max(), 25)
    fine = np.arange(10.0, 1.3 * counts.max())
    bound = [sum_error_bound(counts, cap, epsilon) for cap in fine]
    exact = np.array([sum_error(counts, cap, epsilon) for cap in fine])
    errors = np.array([measured(counts, cap, epsilon, seeds) for cap in caps])
    best = sum_sweet_spot(counts, epsilon)
    axes.plot(fine, bound, color="#D55E00", label="bound, equation (2)")
    axes.plot(fine, exact, color="#0072B2", label="expected error, exactly")
    axes.errorbar(
        caps, errors.mean(axis=1), 2 * errors.std(axis=1, ddof=1), color="black", fmt="o", ms=3,
        capsize=2, lw=1, label=f"measured: mean of {seeds} seeds ± 2 s.d.",
    )  # fmt: skip
    axes.axvline(best, color="#D55E00", ls=":", lw=1.5)
    rank = int(np.sum(counts >= best))
    axes.plot(
        best, sum_error_bound(counts, best, epsilon), "*", color="#D55E00", ms=14,
        label="predicted sweet spot: the ⌈1/ε⌉-th largest",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="cap τ on a user's ratings (ratings)")
    axes.set_title(f"ε = {epsilon:g}: predicted τ = {best:.0f}")
    error = [
        np.mean(measured(counts, cap, epsilon, seeds)) for cap in (10.0, best, float(counts.max()))
    ]
    return [f"{epsilon:g}", f"{best:.0f}", f"{rank}", f"{fine[exact.argmin()]:.0f}",
            *(f"{e:,.0f}" for e in error)]  # fmt: skip


def draw(config: RatingsPicture, console: Console) -> Figure:
    """Returns the figure; prints the best caps."""
    counts = np.unique(ratings.load(config.ratings).user, return_counts=True)[1]
    figure = blank(13, 4.8, f"Laplace noise, δ = 0 ({TERMS})")
    first, *other_axes = panels(figure, 1, len(EPSILONS), sharey=True)
    pairs = zip((first, *other_axes), EPSILONS, strict=True)
    rows = [draw_epsilon(axes, counts, epsilon, config.seeds) for axes, epsilon in pairs]
    console.line(f"NOT PRIVATE: {counts.size:,} users with {counts.sum():,} ratings, exactly")
    console.line(f"epsilon of one such sum, delta 0 ({TERMS})")
    header = ["epsilon", "cap by the rule", "rank", "best cap"]
    console.table([*header, "error at 10", "at the rule's cap", "without a cap"], rows)
    first.set_ylabel("mean |error| of the number of ratings")
    legend(first, loc="lower left")
    return figure
