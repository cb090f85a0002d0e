"""Privacy cost of each sampler: epsilon over the noise multiplier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from accounting import Bound, PrivacyProfile, epsilon
from dpsgd.core.guarantee import ADJACENCY
from experiments.figures.drawing import COLORS, PALETTE, legend
from experiments.figures.records import computed
from experiments.papers.monte_carlo import MonteCarloProfile
from samplers import BallsAndBins, BatchSampler, Deterministic, Poisson, Shuffle

MONTE_CARLO = "balls-and-bins, Monte Carlo"

TERMS = f"{ADJACENCY} adjacency, unit: one example"
"""Adjacency and unit of every guarantee here."""

Profiles = Callable[[float], PrivacyProfile]
"""Profile of a run as a function of its noise multiplier; pickled, such as a sampler's method."""


@dataclass(frozen=True)
class Curve:
    """Bounds on epsilon over noise multipliers, or on delta over epsilons.

    Attributes:
      name: Name of the sampler or estimator.
      xs: Noise multipliers, or epsilons.
      bounds: Bound at each x.
      means: Sample mean at each x, for Monte Carlo bounds.
    """

    name: str
    xs: tuple[float, ...]
    bounds: tuple[Bound, ...]
    means: tuple[float, ...] = ()


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


def _epsilons(profiles: list[Profiles], delta: float, noise_multiplier: float) -> list[Bound]:
    """Returns each sampler's epsilon at one noise multiplier; samplers may share grids."""
    return [epsilon(profile(noise_multiplier), delta) for profile in profiles]


def curves(
    profiles: Mapping[str, Profiles],
    noise_multipliers: Sequence[float],
    delta: float,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Curve]:
    """Returns the curve of each sampler, computed on all processors."""
    compute = partial(_epsilons, list(profiles.values()), delta)
    bounds_by_sigma = computed(compute, noise_multipliers, progress)
    columns = zip(*(bounds_by_sigma[sigma] for sigma in noise_multipliers), strict=True)
    xs = tuple(noise_multipliers)
    return [Curve(name, xs, column) for name, column in zip(profiles, columns, strict=True)]


def table(found: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows), one row per noise multiplier and column per sampler."""
    header = ["sigma", *(curve.name for curve in found)]
    rows = [
        [f"{sigma:.4g}", *(str(curve.bounds[i]) for curve in found)]
        for i, sigma in enumerate(found[0].xs)
    ]
    return header, rows


def draw(
    axes: Axes,
    found: Sequence[Curve],
    title: str,
    x: str = "noise multiplier σ",
    y: str = "ε",
    floor: float = 1e-6,
    key: Figure | SubFigure | Axes | None = None,
    **how: Any,
) -> None:
    """Draws each interval as a band, Monte Carlo bounds as crosses."""
    loose, colors = False, iter(PALETTE[3:] + PALETTE[:3])
    for curve in found:
        color = COLORS.get(curve.name) or next(colors)
        lower = [max(bound.lower, floor) for bound in curve.bounds]
        upper, confidence = [bound.upper for bound in curve.bounds], curve.bounds[0].confidence
        if confidence < 1.0:
            label = f"{curve.name} ({100 * confidence:g} %)"
            axes.plot(curve.xs, upper, "x", color=color, label=label)
            axes.plot(curve.xs[: len(curve.means)], curve.means, "+", color=color)
            axes.plot(curve.xs, lower, ":", color=color, lw=1)
            continue
        # Shuffle's upper bound is deterministic's curve: a broad line beneath keeps both visible.
        width, alpha = (5, 0.35) if curve.name == "deterministic" else (1.5, 1)
        (line,) = axes.plot(curve.xs, upper, color=color, lw=width, alpha=alpha)
        line.set_label(curve.name)
        if any(high > 1.05 * low for low, high in zip(lower, upper, strict=True)):
            loose = True
            axes.plot(curve.xs, lower, color=color, lw=0.8, ls="--")
            axes.fill_between(curve.xs, lower, upper, color=color, alpha=0.12, lw=0)
    axes.set(yscale="log", xlabel=x, ylabel=f"{y} ({TERMS})")
    axes.set_title(title)
    how["handles"] = axes.get_legend_handles_labels()[0]
    legend(key or axes, title="solid: upper bound\ndashed: lower bound" if loose else None, **how)
