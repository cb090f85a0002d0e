"""`dpsgd contributions`: how much users contribute, and where to cap it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ContributionsConfig:
    """Look at how much users contribute and what a cap on it would cost, or choose one privately.

    Without --private-quantile what is printed is NOT private: it is for your eyes alone.
    """

    table: tyro.conf.Positional[Path]
    """Parquet, or CSV or TSV with a header, gzipped or not; one example a row."""
    user: str
    """Column that names the user of an example."""
    loss: str | None = None
    """Column with a model's loss on the example, for the bound by the variance between users. The
    other bounds are for losses in [0, 1]."""
    caps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    """Caps to look at, or to choose from: a public list, made without the data."""
    target_epsilon: float = 1.0
    """Epsilon of a private count, whose best cap is named."""
    private_quantile: float | None = None
    """Print nothing but a cap, chosen near this quantile of users' numbers of examples under
    differential privacy."""
    quantile_epsilon: float = 0.1
    """What that choice costs; it adds to what training costs."""


def run(config: ContributionsConfig) -> None:
    """Runs `dpsgd contributions`."""
    from accounting.releases.contribution import private_quantile
    from experiments import contributions
    from experiments.cli.console import Console, going_on

    if not config.caps or min(config.caps) < 1:
        raise ValueError(f"--caps needs numbers >= 1, got {config.caps}")
    with going_on("reading the table"):
        usage = contributions.read(config.table, config.user, config.loss)
    with Console() as console:
        if config.private_quantile is not None:
            cap = private_quantile(
                usage.counts,
                config.private_quantile,
                epsilon=config.quantile_epsilon,
                candidates=config.caps,
            )
            cost = contributions.pure_guarantee(config.quantile_epsilon, "of this choice alone")
            console.line(f"cap {cap}: {cost}; add it to the epsilon of what is trained with it")
            return
        console.line(contributions.STAMP)
        for line in contributions.lines(usage, config.target_epsilon):
            console.line(line)
        console.line("how far a cap may move the mean loss of a model, at most:")
        console.table(*contributions.table(usage, config.caps))
