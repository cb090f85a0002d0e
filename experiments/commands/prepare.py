"""`dpsgd prepare`: raw data to a store of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class PrepareCriteoDisplay:
    """Prepare the Criteo Display Ads data (`train.txt` or `train.txt.gz`) for training.

    The rows keep their order: the first 80 % train, the next 10 % validate, the last 10 % test.
    """

    source: tyro.conf.Positional[Path]
    """Raw file: label, 13 counts, 26 hexadecimal categoricals, tab separated."""
    out: tyro.conf.Positional[Path]
    """Store to create."""
    hash_seed: int = 0
    """Public seed of the hash that maps categorical values to buckets."""


@dataclass(frozen=True)
class PrepareCriteoSearch:
    """Prepare the Criteo Sponsored Search Conversion Log, to predict Sale from categories alone.

    A public random split: 80 % of the rows train, 10 % validate, 10 % test. SalesAmountInEuro,
    time_delay_for_conversion and product_price are left out: they are known only after a sale, or
    go with one, and a model that sees them reads the answer.
    """

    source: tyro.conf.Positional[Path]
    """Raw file: 23 columns, tab separated, -1 where missing; plain or .gz."""
    out: tyro.conf.Positional[Path]
    """Store to create."""
    hash_seed: int = 0
    """Public seed of the hash that maps categorical values to buckets."""
    include: tuple[
        Literal["SalesAmountInEuro", "time_delay_for_conversion", "product_price"], ...
    ] = ()
    """Outcome columns to add to the features all the same."""


@dataclass(frozen=True)
class PrepareSynthetic:
    """Generate rows like those of a Criteo data set, whose best reachable AUC is known."""

    out: tyro.conf.Positional[Path]
    """Store (or raw file) to create."""
    like: Literal["criteo-display", "criteo-search"] = "criteo-display"
    """The data set whose columns, cardinalities and missing rates the rows have."""
    num_rows: int = 1_000_000
    """Rows to generate."""
    seed: int = 0
    """Seed of the generator."""
    raw: bool = False
    """Write the raw file, as the publishers would, in place of a store."""


@dataclass(frozen=True)
class PrepareTfds:
    """Read a data set of TensorFlow Datasets, which lies on the disk as array_record, into a store.

    One row a record: the label is 0 or 1; numbers become numeric columns, class labels, booleans
    and texts categories; other features must be left out by name. Or blocks of rows, as
    CriteoDisplayBlocks and CriteoSearchBlocks of experiments.criteo.tfds_builders write them.
    Where there are no validation or test rows, the other or the training rows are split at random.
    """

    name: tyro.conf.Positional[str]
    """Name of the data set, or the directory of one version of it."""
    out: tyro.conf.Positional[Path]
    """Store to create."""
    data_dir: Path | None = None
    """Where data sets lie; by default where TensorFlow Datasets puts them."""
    label: str | None = None
    """Feature to predict; by default what the data set says, or "label"."""
    leave_out: tuple[str, ...] = ()
    """Features not to read."""
    text_buckets: int = 1 << 16
    """Hash buckets of a text feature; a power of two."""
    hash_seed: int = 0
    """Public seed of the hash that maps categorical values to buckets."""


@dataclass(frozen=True)
class Prepare:
    """Turn raw data into a store that `dpsgd train` reads."""

    format: (
        Annotated[PrepareCriteoDisplay, tyro.conf.subcommand("criteo-display", prefix_name=False)]
        | Annotated[PrepareCriteoSearch, tyro.conf.subcommand("criteo-search", prefix_name=False)]
        | Annotated[PrepareTfds, tyro.conf.subcommand("tfds", prefix_name=False)]
        | Annotated[PrepareSynthetic, tyro.conf.subcommand("synthetic", prefix_name=False)]
    )
    """What the data come from."""


def run(config: Prepare) -> None:
    """Runs `dpsgd prepare`."""
    from experiments.console import Console
    from experiments.criteo import display, schema, search, synthetic

    with Console() as console:

        def progress(rows: int) -> None:
            console.progress(f"{rows:,} rows")

        match config.format:
            case PrepareCriteoDisplay(source, out, hash_seed):
                store = display.prepare(source, out, hash_seed=hash_seed, progress=progress)
                rows = store.num_rows
            case PrepareCriteoSearch(source, out, hash_seed, include):
                format = replace(search.FORMAT, schema=schema.sponsored_search(include))
                store = format.prepare(source, out, hash_seed=hash_seed, progress=progress)
                rows = store.num_rows
            case PrepareTfds(name, out):
                from experiments.criteo import tfds_source

                options = {k: v for k, v in vars(config.format).items() if k not in ("name", "out")}
                rows = tfds_source.prepare(name, out, progress=progress, **options).num_rows
            case PrepareSynthetic(out, like, num_rows, seed, raw):
                write = synthetic.write_raw if raw else synthetic.write_store
                made = write(out, num_rows, seed, log=synthetic.LOGS[like], progress=progress)
                summary = made.summary if isinstance(made, synthetic.SyntheticStore) else made
                rows = summary.rows
                console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
                console.line(f"on the test rows: {summary.test_bayes_auc:.4f}")
        console.line(f"{rows:,} rows in {config.format.out}")
