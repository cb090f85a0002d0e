"""Figures of the papers, one command each: `scripts/figures NAME OUT`, or `all OUT`.

Their relation to the papers: docs/explanation/papers.md.
"""

from __future__ import annotations

import importlib
from typing import Any, get_type_hints

FIGURES = {
    "epsilon": "Epsilon over the noise of every sampler, at the sizes of two click data sets.",
    "delta": "Delta over epsilon of every sampler (balls-and-bins paper, figure 2).",
    "estimators": "Monte Carlo bounds at equal time (balls-and-bins paper, figures 3 and 4).",
    "never_worse": "Where balls-and-bins is certified better than Poisson sampling, and where not.",
    "crossing": "The epsilon at which balls-and-bins becomes better than Poisson sampling.",
    "amplification": "How far privacy amplification by subsampling carries.",
    "contributions": "The error of a private sum over the cap on users' contributions.",
    "rating_model": "Models private for whole users over the cap: bound, loss and test error.",
    "episodes": "Few-shot episodes over the noise: honest epsilons, accuracy on new classes.",
}
"""Description of each figure module, for `scripts/figures --help`.

A module's function `draw(config, console)` computes, prints a table, and returns the figure; the
type of its first argument, a `Picture`, has the options, and its `SMALL` those of a small version.
"""


def figure_of(name: str) -> tuple[Any, Any]:
    """Returns a figure's configuration type and its draw function."""
    draw = importlib.import_module(f"experiments.figures.{name}").draw
    return get_type_hints(draw)["config"], draw
