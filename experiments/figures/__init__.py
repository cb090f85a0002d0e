"""Figures of the papers: `scripts/figures NAME OUT`, or `all OUT`.

Their relation to the papers: docs/explanation/papers.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accounting.records import Count, Ge
from experiments.cli.options import PLACE

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
"""Description of each figure module.

A module has `jobs(options)`, the settings of its computations; `compute(job)`, the points of one of
them, see `experiments.results.points`; `LAYOUT`, its panels, or `draw(table)`; `NOTES`, lines of
text; and `lines(table)` where its points are not printed as they are.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command that draws figures.

    Attributes:
      name: Figure to draw, or all.
      out: Picture, or folder of all.
      small: Draw a small version.
      seeds: Seeds of each random setting. Default: 5, or 2 of a small version.
      ratings: u.data of MovieLens 100K. Default: synthetic ratings.
      images: NumPy archive x, y. Default: digits.
      num_classes: Classes of --images.
    """

    name: Annotated[str, PLACE]
    out: Annotated[Path, PLACE]
    small: bool = False
    seeds: Annotated[int, Ge(2)] | None = None
    ratings: Path | None = None
    images: Path | None = None
    num_classes: Count | None = None

    @property
    def num_seeds(self) -> int:
        """Number of seeds; a standard error needs at least 2."""
        return self.seeds or (2 if self.small else 5)
