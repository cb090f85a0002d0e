"""The Monte Carlo bounds of balls-and-bins at equal time, beside the certified curve.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figures 3 and 4: with and without
importance sampling (left), and order statistics (middle). Right: both, and ours that samples the
other bins alone (other bins), by two inequalities.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from matplotlib.figure import Figure

from accounting.estimates.monte_carlo import MonteCarloProfile, geometric_ranks
from experiments.cli.console import Console
from experiments.figures.delta import Curve, Setting, certified, figure, sampled
from experiments.figures.drawing import Picture

SETTINGS = (Setting("small", 0.35, 1_000, 12.0), Setting("Display, batch 8,192", 0.5, 4_492, 8.0))

PUBLISHED_RANKS = (*range(1, 100), *range(100, 500, 10), *range(500, 1_000, 50))
"""The authors' orders for 1,000 steps: their published code, google-research/google-research,
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
"""What is compared: the options of each curve's estimator, by its name; ranks or their growth."""


def in_seconds(
    profile: MonteCarloProfile, epsilons: Sequence[float], seconds: float
) -> MonteCarloProfile:
    """Returns the estimator with as many samples as it draws, for all epsilons, in this time."""
    pilot = replace(profile, num_samples=max(100, 2**18 // profile.bins))
    began = time.process_time()
    list(pilot.estimates(epsilons))
    share = seconds / max(time.process_time() - began, 1e-3)
    return replace(profile, num_samples=max(100, int(pilot.num_samples * share)))


def estimators(
    seconds: float, options: dict[str, dict[str, Any]], setting: Setting, epsilons: Sequence[float]
) -> Iterator[Curve]:
    """Yields the certified curve, and one for each estimator."""
    yield from certified(setting, epsilons, "balls-and-bins")
    for name, given in options.items():
        growth = given.get("ranks")
        ranks = geometric_ranks(setting.bins, growth) if isinstance(growth, float) else growth
        profile = MonteCarloProfile(
            setting.noise_multiplier, setting.bins, **{**given, "ranks": ranks}
        )
        profile = in_seconds(profile, epsilons, seconds)
        yield sampled(f"{name}, {profile.num_samples:,} samples", profile, epsilons)


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints a table for each panel."""
    shown = [
        (name, setting, partial(estimators, config.seconds, options))
        for setting in SETTINGS
        for name, options in PANELS.items()
    ]
    return figure(shown, config.points, config, console)
