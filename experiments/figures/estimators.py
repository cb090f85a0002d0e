"""Monte Carlo bounds of balls-and-bins at equal time, beside the certified curve.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figures 3 and 4: with and without
importance sampling (left), and order statistics (middle). Right: both, and ours that samples the
other bins alone (other bins), by two inequalities.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from experiments.cli.console import Console
from experiments.figures.delta import Setting, figure
from experiments.figures.drawing import Picture
from experiments.papers.monte_carlo import MonteCarloProfile

PUBLISHED_RANKS = (*range(1, 100), *range(100, 500, 10), *range(500, 1_000, 50))
"""The authors' orders for 1,000 steps, from their code, google-research/google-research,
dpsgd_batch_sampler_accounting/example.py (sigma 0.35, one epoch)."""


@dataclass(frozen=True)
class Config(Picture):
    """Monte Carlo bounds at equal time (Balls-and-Bins paper, figures 3 and 4)."""

    seconds: float = 5.0
    """CPU time of each curve: it takes as many samples as it draws meanwhile."""

    points: int = 8
    """Epsilons of each curve."""

    SMALL: ClassVar[Mapping[str, Any]] = {"seconds": 1.0, "points": 5}

    def __post_init__(self) -> None:
        if not (self.seconds > 0.0 and self.points >= 1):
            raise ValueError("--seconds must be greater than 0, and --points at least 1")

    def sized(
        self, name: str, profile: MonteCarloProfile, epsilons: Sequence[float]
    ) -> tuple[str, MonteCarloProfile]:
        """Returns a curve's name, and its estimator sized to the time limit."""
        pilot = replace(profile, num_samples=max(100, 2**18 // profile.bins))
        began = time.process_time()
        list(pilot.estimates(epsilons))
        share = self.seconds / max(time.process_time() - began, 1e-3)
        count = max(100, int(pilot.num_samples * share))
        return f"{name}, {count:,} samples", replace(profile, num_samples=count)


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
"""Options of each curve's estimator, by panel and name; `ranks` are a list, or their growth."""


SETTINGS = tuple(
    Setting(name, *run, ("balls-and-bins",), estimators)
    for run in ((0.35, 1_000, 12.0), (0.5, 4_492, 8.0))
    for name, estimators in PANELS.items()
)


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints a table for each panel."""
    return figure(SETTINGS, config, console)
