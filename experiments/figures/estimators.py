"""Monte Carlo bounds of balls-and-bins at equal time, beside the certified curve.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figures 3 and 4: with and without
importance sampling (left), and order statistics (middle). Right: both, and ours that samples the
other bins alone (other bins), by two inequalities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.figures import Options
from experiments.figures.delta import AXES, NOTES, compute, panel_of
from experiments.figures.drawing import BELOW, Layout
from experiments.results.points import Job

__all__ = ["LAYOUT", "NOTES", "compute", "jobs"]

PUBLISHED_RANKS = (*range(1, 100), *range(100, 500, 10), *range(500, 1_000, 50))
"""The authors' orders for 1,000 steps, from their code, google-research/google-research,
dpsgd_batch_sampler_accounting/example.py (sigma 0.35, one epoch)."""

PANELS: dict[str, dict[str, dict[str, Any]]] = {
    "importance sampling": {"without": {"sampled": "losses"}, "with": {}},
    "order statistics": {
        "without": {"sampled": "losses"},
        "published orders": {"sampled": "losses", "ranks": PUBLISHED_RANKS},
        "geometric orders": {"sampled": "losses", "ranks": 1.02},
    },
    "two inequalities": {
        "both, Hoeffding": {"ranks": 1.02},
        "both, Bennett": {"ranks": 1.02, "inequality": "bennett"},
        "other bins, Hoeffding": {"ranks": 1.02, "sampled": "other bins"},
        "other bins, Bennett": {"ranks": 1.02, "sampled": "other bins", "inequality": "bennett"},
    },
}
"""Options of each curve's estimator, by panel and curve; `ranks` are a list, or their growth."""
LAYOUT = Layout((13, 9.2), 3, AXES, "one epoch", legend=BELOW)


def jobs(options: Options) -> Iterator[Job]:
    """Yields one job per curve.

    Each estimator takes samples for a fixed number of CPU seconds.
    """
    points, seconds = (5, 1.0) if options.small else (8, 5.0)
    for run in ((0.35, 1_000, 12.0), (0.5, 4_492, 8.0)):
        for name, estimators in PANELS.items():
            panel = panel_of((name, *run), points)
            yield {**panel, "curve": "balls-and-bins"}
            for curve, estimator in estimators.items():
                yield {**panel, "curve": curve, "estimator": estimator, "seconds": seconds}
