"""How much users contribute, and what a cap on it costs. NOT PRIVATE: it reads the data exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from accounting.releases.contribution import bias_bounds, sum_error, sum_sweet_spot

STAMP = "NOT PRIVATE: computed from the data exactly, for your eyes alone; do not publish"


class Usage(NamedTuple):
    """What each user contributes."""

    counts: np.ndarray
    """Number of examples: int64[users]."""
    losses: np.ndarray | None
    """Mean loss of a model over a user's examples: float64[users]."""


def read(path: Path, user: str, loss: str | None = None) -> Usage:
    """Reads a table of which each row is one example: Parquet, or CSV or TSV with a header.

    Args:
      path: The file; by its name it may be gzipped.
      user: Column that names the user.
      loss: Column with a model's loss on the example.

    Raises:
      ValueError: If the file is no such table, lacks a column, or a user or a loss is missing.
      OSError: If the file can not be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    wanted = [user] if loss is None else [user, loss]
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    try:
        if suffixes[-1:] == [".parquet"]:
            table = parquet.read_table(path)
        else:
            delimiter = "\t" if suffixes[-1:] == [".tsv"] else ","
            table = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not table.num_rows:
        raise ValueError(f"{path} has no rows")
    for name in wanted:
        if (found := table.column_names.count(name)) != 1:
            count = "no column" if not found else f"{found} columns"
            raise ValueError(f"{path} has {count} {name!r}: {', '.join(table.column_names)}")
        column = table.column(name)
        if pa.types.is_nested(column.type):
            raise ValueError(f"{path}, column {name}: {column.type}, expected single values")
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise ValueError(f"{path}, row {row + 1}, column {name}: empty")
    _, who, counts = np.unique(
        table.column(user).to_numpy(), return_inverse=True, return_counts=True
    )
    if loss is None:
        return Usage(counts, None)
    try:
        values = table.column(loss).to_numpy().astype(float)
    except ValueError as error:
        raise ValueError(f"{path}, column {loss}: {error}") from None
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"{path}, row {row + 1}, column {loss}: {values[row]} is no finite loss")
    return Usage(counts, np.bincount(who, values) / counts)


def lines(usage: Usage, epsilon: float) -> list[str]:
    """Returns what contributions there are, and the best cap of a private sum of them."""
    counts = usage.counts
    quantiles = ", ".join(f"{q:.0%}: {np.quantile(counts, q):.0f}" for q in (0.5, 0.9, 0.99))
    best = sum_sweet_spot(counts, epsilon)
    return [
        f"{counts.size:,} users hold {counts.sum():,} examples; of a user, by quantile: "
        f"{quantiles}, most: {counts.max():,}",
        f"a private count of the examples at epsilon {epsilon:g} has the least bound on its error "
        f"at a cap of {best:.0f}: {sum_error(counts, best, epsilon):,.1f} expected, "
        f"{sum_error(counts, float(counts.max()), epsilon):,.1f} without a cap",
    ]


def table(usage: Usage, caps: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows): how far each cap may move the mean loss, at most.

    Source: Propositions 1 and 2, and two sharper bounds; see
    `accounting.releases.contribution.bias_bounds`.
    """
    header = ["cap", "kept", "Prop. 1", "Prop. 2", "entropy", "distance"]
    rows = []
    for cap in caps:
        found = bias_bounds(usage.counts, cap, usage.losses)
        kept = np.minimum(usage.counts, cap).sum() / usage.counts.sum()
        numbers = ("-" if math.isnan(bound) else f"{bound:.4f}" for bound in found)
        rows.append([f"{cap:,}", f"{kept:.1%}", *numbers])
    return header, rows
