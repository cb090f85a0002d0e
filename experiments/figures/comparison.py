"""Bounds of samplers' privacy costs as points of curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from accounting import PrivacyProfile, epsilon
from dpsgd.core.guarantee import ADJACENCY
from experiments.figures.drawing import Layout, draw_layout
from experiments.papers.monte_carlo import MonteCarloProfile
from experiments.processes import each
from experiments.results.points import collect, ends
from samplers import BallsAndBins, BatchSampler, Deterministic, Poisson, Shuffle

MONTE_CARLO = "balls-and-bins, Monte Carlo"

TERMS = f"{ADJACENCY} adjacency, unit: one example"
"""Adjacency and unit of every guarantee here."""

Profiles = Callable[[float], PrivacyProfile]
"""Profile of a run as a function of its noise multiplier; pickled, such as a sampler's method."""


def all_samplers(num_examples: int, batch_size: int, epochs: int) -> dict[str, BatchSampler]:
    """Returns every sampler, by name, for runs of equal sizes.

    Oversize batches take several passes, so that the figures compare the cost of sampling alone.
    """
    sizes = (num_examples, batch_size, epochs)
    return {
        "deterministic": Deterministic(*sizes),
        "shuffle": Shuffle(*sizes),
        "poisson": Poisson(*sizes, overflow="accumulate"),
        "balls-and-bins": BallsAndBins(*sizes, overflow="accumulate"),
    }


def monte_carlo(bins: int, num_samples: int) -> Profiles:
    """Returns an estimator of one balls-and-bins epoch: confidence, not proof.

    It samples other bins: bounds from sampled losses are infinite for delta below the inverse
    number of samples.
    """
    return partial(MonteCarloProfile, bins=bins, num_samples=num_samples, sampled="other bins")


def epsilons(
    profiles: Mapping[str, Profiles], delta: float, noise_multiplier: float
) -> list[dict[str, Any]]:
    """Returns each sampler's bound on epsilon at one noise multiplier; samplers may share grids."""
    return [
        {"curve": name, "x": noise_multiplier, **ends(epsilon(profile(noise_multiplier), delta))}
        for name, profile in profiles.items()
    ]


def curves(
    profiles: Mapping[str, Profiles],
    noise_multipliers: Sequence[float],
    delta: float,
    progress: Callable[[str], None],
) -> pl.DataFrame:
    """Returns the bounds of each sampler, computed on all processors.

    Args:
      profiles: Profiles by the name of the sampler.
      noise_multipliers: Noise multipliers of the curves.
      delta: Delta of the guarantees.
      progress: Function of one line of text.
    """
    rows: list[dict[str, Any]] = []
    for found in each(partial(epsilons, dict(profiles), delta), list(noise_multipliers)):
        rows += found
        progress(f"{len(rows)} of {len(noise_multipliers) * len(profiles)}")
    return collect(rows)


def style(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a broad line for deterministic batches, whose curve is shuffling's upper bound."""
    return {"lw": 5, "alpha": 0.35} if point["curve"] == "deterministic" else {}


LAYOUT = Layout(
    size=(11, 9),
    columns=2,
    axes={"": {"yscale": "log", "xlabel": "noise multiplier σ", "ylabel": f"ε ({TERMS})"}},
    style=style,
    legend={"title": "solid: upper bound\ndashed: lower bound"},
)
"""Layout of panels of epsilon over the noise multiplier."""


def draw(points: pl.DataFrame, title: str) -> Figure:
    """Returns a figure of one panel."""
    layout = dataclasses.replace(LAYOUT, size=(7, 5), columns=1)
    return draw_layout(points.with_columns(panel=pl.lit(title)), layout)
