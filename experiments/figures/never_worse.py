"""Certified comparison of balls-and-bins and Poisson sampling, cell by cell.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), ask in their discussion if
balls-and-bins is ever worse in practice. Both deltas are bounded from below and above at equal
noise, batch size and epsilon, on the sizes of two click data sets. A number is the largest epsilon
at which balls-and-bins is certified worse; its colour is Poisson's delta there, too large for any
guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from accounting import BallsAndBinsProfile, PoissonProfile
from experiments.cli.console import Console
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Picture, blank, panels
from experiments.figures.records import computed
from experiments.papers.order import compare

NUM_EXAMPLES = {"Criteo Display Ads": 36_800_512, "Criteo Sponsored Search": 12_800_000}
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
FLOOR = 1e-12
"""Least Poisson delta that is compared: no guarantee needs a smaller one."""


@dataclass(frozen=True)
class Config(Picture):
    """Where balls-and-bins is certified better than Poisson sampling, and where worse."""

    batch_sizes: tuple[int, ...] = tuple(2**k for k in range(10, 17))
    noise_multipliers: tuple[float, ...] = (
        0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0,
    )  # fmt: skip
    epochs: tuple[int, ...] = (1, 5)

    SMALL: ClassVar = {
        "batch_sizes": (2**14, 2**16),
        "noise_multipliers": (0.3, 0.5),
    }


def cells(job: tuple[int, float, int]) -> dict[str, Any]:
    """Compares both samplers at each of EPSILONS.

    Args:
      job: Number T of steps per epoch, with Poisson sampling rate 1 / T; noise multiplier; epochs.

    Returns:
      'signs', a character for each epsilon: '<' if balls-and-bins is certified better, '>' worse,
      '?' undecided, '.' below FLOOR; 'bounds' at '>' and '?', by epsilon: lower and upper end of
      balls-and-bins' delta, and of Poisson's; 'ratio' over '<': a lower bound on Poisson's delta
      over balls-and-bins'.
    """
    steps, sigma, epochs = job
    bins = BallsAndBinsProfile(sigma, steps, epochs)
    poisson = PoissonProfile(sigma, 1.0 / steps, steps * epochs)
    signs, bounds, ratios = "", {}, []
    for epsilon in EPSILONS:
        if signs.endswith(".") or poisson.delta(epsilon, 1e-2).upper < FLOOR:
            signs += "."
            continue
        order = compare(bins, poisson, epsilon)
        signs += "?><"[order.sign]
        if signs[-1] in ">?":
            printed = [s for b in order for s in (b.format_lower(".6e"), b.format_upper(".6e"))]
            bounds[f"{epsilon:g}"] = [float(text) for text in printed]
        elif signs[-1] == "<":
            ratios.append(order.second.lower / order.first.upper)
    ratio = {"ratio": round(min(ratios) - 5e-7, 6)} if ratios else {}
    return {"signs": signs, **ratio, **({"bounds": bounds} if bounds else {})}


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints numbers of certified cells, and the exceptions."""
    runs, grid = (NUM_EXAMPLES, config.epochs), (config.batch_sizes, config.noise_multipliers)
    jobs = starmap(_job, product(*runs, *grid))
    results = computed(cells, jobs, console.progress, config.out)
    figure = blank(11, 7, f"largest ε where balls-and-bins costs more; colour: δ there ({TERMS})")
    table, axes = [], panels(figure, len(NUM_EXAMPLES), len(config.epochs))
    for (data_set, epochs), axis in zip(product(*runs), axes, strict=True):
        cell = {key: results[_job(data_set, epochs, *key)] for key in product(*grid)}
        table.append([data_set, str(epochs), *_summary(list(cell.values()))])
        _draw(axis, cell, config)
        axis.set_title(f"{data_set}, {epochs} epoch{'s' if epochs > 1 else ''}")
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.6, label="Poisson's δ there")
    console.line(f"balls-and-bins and Poisson sampling at equal noise ({TERMS})")
    console.table(
        ["data set", "epochs", "better", "worse", "undecided", f"below {FLOOR:g}",
         "largest epsilon where worse", "smallest delta where worse", "ratio elsewhere at least"],
        table,
    )  # fmt: skip
    return figure


def _job(data_set: str, epochs: int, batch_size: int, sigma: float) -> tuple[int, float, int]:
    return int(NUM_EXAMPLES[data_set] / batch_size + 0.5), sigma, epochs


def _summary(found: list[dict[str, Any]]) -> list[str]:
    signs = "".join(cell["signs"] for cell in found)
    worse = [
        (float(epsilon), bounds[2])
        for cell in found
        for epsilon, bounds in cell.get("bounds", {}).items()
        if bounds[0] > bounds[3]
    ]
    return [
        *(str(signs.count(sign)) for sign in "<>?."),
        f"{max((epsilon for epsilon, _ in worse), default=0):g}",
        f"{min((delta for _, delta in worse), default=0):.2g}",
        f"{min((cell['ratio'] for cell in found if 'ratio' in cell), default=0):.4f}",
    ]


def _draw(axes: Axes, cell: dict[tuple[int, float], dict[str, Any]], config: Config) -> None:
    deltas = np.full((len(config.batch_sizes), len(config.noise_multipliers)), np.nan)
    for place, result in zip(np.ndindex(deltas.shape), cell.values(), strict=True):
        text, last = "?" if "?" in result["signs"] else "", result["signs"].rfind(">")
        if last >= 0:
            text += f"{EPSILONS[last]:g}"
            deltas[place] = result["bounds"][f"{EPSILONS[last]:g}"][3]
        axes.text(place[1], place[0], text or "·", ha="center", va="center", fontsize="small")
    axes.imshow(deltas, norm=LogNorm(1e-2, 1), cmap="YlOrRd", alpha=0.7, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(deltas.shape[1]), [f"{s:g}" for s in config.noise_multipliers])
    axes.set_yticks(range(deltas.shape[0]), [f"{b:,}" for b in config.batch_sizes])
    axes.set(xlabel="noise multiplier σ", ylabel="batch size")
