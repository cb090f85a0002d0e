"""`dpsgd score`: what a model says of rows, labelled or not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class ScoreConfig:
    """Write the probabilities that a model gives to the rows of a file, in their order, as CSV."""

    model: tyro.conf.Positional[Path]
    """Exported model, or the directory of a finished run."""
    data: tyro.conf.Positional[Path]
    """Raw file (or .gz) in the format the model was trained from, with labels or without; or a
    store."""
    out: Path
    """File to create, with a header and one line a row; compressed if it ends in .gz."""
    split: Literal["train", "validation", "test"] | None = None
    """Which rows of a store; by default all of them."""


def run(config: ScoreConfig) -> None:
    """Runs `dpsgd score`."""
    from experiments.cli.console import Console, counted

    with Console() as console:
        console.progress("starting")
        from experiments.tasks.clicks.score import score

        rows, undefined = score(
            config.model,
            config.data,
            config.out,
            split=config.split,
            progress=lambda rows: console.progress(f"{rows:,} rows"),
        )
        console.line(f"{counted(rows, 'row')} scored: {config.out}")
    if undefined:
        print(
            f"note: {counted(undefined, 'row')} without a probability (nan): the model's training "
            "diverged, or their values are too large for it",
            file=sys.stderr,
        )
