"""Certified comparison of balls-and-bins and Poisson sampling, cell by cell.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), ask in their discussion if
balls-and-bins is ever worse in practice. Both deltas are bounded from below and above at equal
noise, batch size and epsilon, on the sizes of two click data sets. A number is the largest epsilon
at which balls-and-bins is certified worse; its colour is Poisson's delta there, too large for any
guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import polars as pl
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from accounting import BallsAndBinsProfile, PoissonProfile
from experiments.figures import Options
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import blank, panels
from experiments.papers.order import compare
from experiments.results.points import Cells, Job, ends

NUM_EXAMPLES = {"Criteo Display Ads": 36_800_512, "Criteo Sponsored Search": 12_800_000}
BATCH_SIZES = tuple(2**k for k in range(10, 17))
NOISE_MULTIPLIERS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0)
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
FLOOR = 1e-12
"""Least Poisson delta that is compared: no guarantee needs a smaller one."""
NOTES = (f"balls-and-bins and Poisson sampling at equal noise ({TERMS})",)


def jobs(options: Options) -> Iterator[Job]:
    """Yields a cell of a panel at a time."""
    cells = ((2**14, 2**16), (0.3, 0.5)) if options.small else (BATCH_SIZES, NOISE_MULTIPLIERS)
    for data_set, epochs, batch_size, sigma in product(NUM_EXAMPLES, (1, 5), *cells):
        panel = f"{data_set}, {epochs} epoch{'s' if epochs != 1 else ''}"
        steps = int(NUM_EXAMPLES[data_set] / batch_size + 0.5)
        sizes = {"batch_size": batch_size, "steps": steps, "epochs": epochs}
        yield {"panel": panel, **sizes, "sigma": sigma}


def compute(job: Job) -> list[dict[str, Any]]:
    """Compares both samplers at each of `EPSILONS`.

    Returns:
      A point for each epsilon: bounds on balls-and-bins' delta and on Poisson's, and a sign, "<" if
      balls-and-bins is certified better, ">" worse, "?" undecided, "." if Poisson's delta is below
      `FLOOR`.
    """
    steps, sigma, epochs = job["steps"], job["sigma"], job["epochs"]
    bins = BallsAndBinsProfile(sigma, steps, epochs)
    poisson = PoissonProfile(sigma, 1.0 / steps, steps * epochs)
    points: list[dict[str, Any]] = []
    for epsilon in EPSILONS:
        point = {**job, "x": epsilon, "sign": "."}
        below = points and points[-1]["sign"] == "."
        if not below and poisson.delta(epsilon, 1e-2).upper >= FLOOR:
            order = compare(bins, poisson, epsilon)
            poisson_bounds = {
                "poisson_lower": order.second.lower,
                "poisson_upper": order.second.upper,
            }
            point |= {**ends(order.first), **poisson_bounds, "sign": "?><"[order.sign]}
        points.append(point)
    return points


def lines(table: pl.DataFrame) -> Iterator[str | Cells]:
    """Yields the numbers of certified cells, and the exceptions."""
    worse, better = pl.col("sign") == ">", pl.col("sign") == "<"
    summary = table.group_by("panel", maintain_order=True).agg(
        *((pl.col("sign") == sign).sum().cast(pl.String).alias(sign) for sign in "<>?."),
        epsilon=pl.col("x").filter(worse).max(),
        delta=pl.col("poisson_lower").filter(worse).min(),
        ratio=(pl.col("poisson_lower") / pl.col("upper")).filter(better).min() - 5e-5,
    )
    counts = ["", "better", "worse", "undecided", f"below {FLOOR:g}"]
    extremes = ["largest epsilon where worse", "smallest delta where worse", "ratio elsewhere"]
    forms = {"epsilon": "{:g}", "delta": "{:.2g}", "ratio": ">= {:.4f}"}
    rows = [
        [forms.get(name, "{}").format(x) if x is not None else "none" for name, x in row.items()]
        for row in summary.iter_rows(named=True)
    ]
    yield [*counts, *extremes], rows


def draw(table: pl.DataFrame) -> Figure:
    """Draws a panel for each data set and epochs."""
    figure = blank(11, 7, f"largest ε where balls-and-bins costs more; colour: δ there ({TERMS})")
    all_axes = panels(figure, 2, 2)
    groups = table.group_by("panel", maintain_order=True)
    for axes, ((name,), panel) in zip(all_axes, groups, strict=True):
        sizes = panel["batch_size"].unique(maintain_order=True).to_list()
        sigmas = panel["sigma"].unique(maintain_order=True).to_list()
        deltas = np.full((len(sizes), len(sigmas)), np.nan)
        for (size, sigma), cell in panel.group_by("batch_size", "sigma"):
            row, column = sizes.index(size), sigmas.index(sigma)
            worse = cell.filter(sign=">").sort("x").tail(1)
            text = "?" * ("?" in cell["sign"]) + "".join(f"{x:g}" for x in worse["x"])
            axes.text(column, row, text or "·", ha="center", va="center", fontsize="small")
            deltas[row, column] = worse["poisson_upper"].max() or np.nan
        axes.imshow(deltas, norm=LogNorm(1e-2, 1), cmap="YlOrRd", alpha=0.7, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(sigmas)), [f"{sigma:g}" for sigma in sigmas])
        axes.set_yticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set(xlabel="noise multiplier σ", ylabel="batch size", title=name)
    figure.colorbar(all_axes[0].images[0], ax=all_axes, shrink=0.6, label="Poisson's δ there")
    return figure
