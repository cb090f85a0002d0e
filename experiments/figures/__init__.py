"""Figures of the papers: `scripts/figures NAME OUT`, or `all OUT`.

Their relation to the papers: docs/explanation/papers.md.
"""

from __future__ import annotations

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
