"""`dpsgd prepare`: raw data to a store of columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class PrepareCriteoDisplay:
    """Prepare the Criteo Display Ads data (`train.txt` or `train.txt.gz`) for training."""

    source: tyro.conf.Positional[Path]
    """Raw file: label, 13 counts, 26 hexadecimal categoricals, tab separated."""
    out: tyro.conf.Positional[Path]
    """Store to create."""
    hash_seed: int = 0
    """Public seed of the hash that maps categorical values to buckets."""


@dataclass(frozen=True)
class PrepareSynthetic:
    """Generate click data of Criteo's shape, whose best reachable AUC is known, as a store."""

    out: tyro.conf.Positional[Path]
    """Store to create."""
    num_rows: int = 1_000_000
    """Rows to generate."""
    seed: int = 0
    """Seed of the generator."""


@dataclass(frozen=True)
class Prepare:
    """Turn raw data into a store that `dpsgd train` reads."""

    format: (
        Annotated[PrepareCriteoDisplay, tyro.conf.subcommand("criteo-display", prefix_name=False)]
        | Annotated[PrepareSynthetic, tyro.conf.subcommand("synthetic", prefix_name=False)]
    )
    """What the data come from."""


def run(config: Prepare) -> None:
    """Runs `dpsgd prepare`."""
    from experiments.console import Console
    from experiments.criteo import display, synthetic

    with Console() as console:

        def progress(rows: int) -> None:
            console.progress(f"{rows:,} rows")

        match config.format:
            case PrepareCriteoDisplay(source, out, hash_seed):
                store = display.prepare(source, out, hash_seed=hash_seed, progress=progress)
            case PrepareSynthetic(out, num_rows, seed):
                store, summary = synthetic.write_store(out, num_rows, seed, progress=progress)
                console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
        console.line(f"{store.num_rows:,} rows in {config.format.out}")
