"""Contributions of users, and the cost of a cap. NOT PRIVATE: it reads the data exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from accounting import Bound
from accounting.attack import implied_advantage
from dpsgd.core.guarantee import ADJACENCY, attack_in_words
from experiments.papers.contribution import bias_bounds, sum_error, sum_sweet_spot
from experiments.tasks.clicks.encoding import EMPTY
from experiments.tasks.files import open_rows
from experiments.tasks.kinds import Number, User
from experiments.tasks.splits import ColumnError
from experiments.tasks.streams import DataError

STAMP = "NOT PRIVATE: computed from the data exactly, for your eyes alone; do not publish"


def pure_guarantee(epsilon: float, terms: str) -> str:
    """Returns the guarantee's sentence for pure epsilon-DP releases.

    Args:
      epsilon: Epsilon of all releases of one user.
      terms: Conditions of the guarantee, as text.
    """
    attack = attack_in_words(Bound(0.0, implied_advantage(epsilon, 0.0)), "user")
    # Epsilon in full: `:g` would round a guarantee down.
    condition = f"delta 0 ({ADJACENCY} adjacency, unit: one user; {terms})"
    return f"epsilon <= {epsilon} at {condition}; {attack}"


class Usage(NamedTuple):
    """Examples and losses of each user."""

    counts: np.ndarray
    """Number of examples: int64[users]."""
    losses: np.ndarray | None
    """Mean loss of a model over a user's examples: float64[users]."""


def read(path: Path, user: str, loss: str | None = None) -> Usage:
    """Reads a table of examples, in a format of `dpsgd prepare csv`.

    Args:
      path: CSV, TSV or Parquet file; text may be gzipped.
      user: Column that names the user.
      loss: Column with a model's loss on the example.

    Raises:
      DataError: If the file is no such table, lacks a column, or a user or a loss is missing.
    """
    columns = [user] if loss is None else [user, loss]
    file, rows = open_rows(path, columns), 0
    users, losses = [np.zeros(0, object)], [np.zeros(0)]
    finite = Number(bounds=(-math.inf, math.inf))
    for batch in file.batches(dict.fromkeys(columns, pa.string())):
        try:
            users.append(User().decode(batch[user], user).values)
            if loss is not None:
                losses.append(finite.decode(batch[loss], loss).values)
        except ColumnError as error:
            raise file.located(error, rows) from None
        rows += len(users[-1])
    if not rows:
        raise DataError(path, EMPTY)
    names = pa.array(np.concatenate(users), pa.binary())
    user_ids = np.asarray(names.dictionary_encode().indices)
    counts = np.bincount(user_ids)
    return Usage(
        counts, None if loss is None else np.bincount(user_ids, np.concatenate(losses)) / counts
    )


def lines(usage: Usage, epsilon: float) -> list[str]:
    """Returns a summary of contributions, and a sum's best cap.

    Args:
      usage: Contributions of users.
      epsilon: Privacy cost of a private count of all examples, > 0.
    """
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
    """Returns a table of bounds on each cap's bias.

    Source: Propositions 1 and 2, and two sharper bounds; see
    `experiments.papers.contribution.bias_bounds`.

    >>> header, rows = table(Usage(np.array([1, 3]), losses=None), caps=[2])
    >>> rows
    [['2', '75.0%', '0.5887', '-', '0.3793', '0.0833']]

    Args:
      usage: Contributions of users.
      caps: Caps tau, one row of the table each.

    Returns:
      The header, and the rows.
    """
    header = ["cap", "kept", "Prop. 1", "Prop. 2", "entropy", "distance"]
    rows = []
    for cap in caps:
        bounds = bias_bounds(usage.counts, cap, usage.losses)
        share = np.minimum(usage.counts, cap).sum() / usage.counts.sum()
        numbers = ("-" if math.isnan(bound) else f"{bound:.4f}" for bound in bounds)
        rows.append([f"{cap:,}", f"{share:.1%}", *numbers])
    return header, rows
