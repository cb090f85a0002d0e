"""`dpsgd contributions`: how much users contribute, and where to cap it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ContributionsConfig:
    """Look at how much users contribute and what a cap on it would cost.

    What is printed is NOT private: it is for your eyes alone.
    """

    table: tyro.conf.Positional[Path]
    """CSV, TSV (with a header, gzipped or not) or Parquet file with one example per row."""
    user: str
    """Column with the user of each example."""
    loss: str | None = None
    """Column with a model's loss on each example, for the bound by the variance between users. The
    other bounds hold for losses in [0, 1]."""
    caps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    """Candidate caps on the examples of one user."""
    target_epsilon: float = 1.0
    """Epsilon of a private count whose best cap is printed."""


def run(config: ContributionsConfig) -> None:
    """Runs `dpsgd contributions`."""
    from experiments import contributions
    from experiments.cli.console import Console, going_on

    if not config.caps or min(config.caps) < 1:
        raise ValueError(f"--caps needs numbers >= 1, got {config.caps}")
    with going_on("reading the table"):
        usage = contributions.read(config.table, config.user, config.loss)
    with Console() as console:
        console.line(contributions.STAMP)
        for line in contributions.lines(usage, config.target_epsilon):
            console.line(line)
        console.line("how far a cap may move the mean loss of a model, at most:")
        console.table(*contributions.table(usage, config.caps))
