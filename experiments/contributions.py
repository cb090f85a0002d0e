"""How much users contribute, and what a cap on it costs. NOT PRIVATE: it reads the data exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accounting import Bound
from accounting.attack import implied_advantage
from dpsgd.core.guarantee import ADJACENCY, attack_in_words
from experiments.papers.contribution import bias_bounds, sum_error, sum_sweet_spot
from experiments.tasks.clicks.files import DataError, open_rows
from experiments.tasks.clicks.formats import EMPTY, texts
from experiments.tasks.clicks.kinds import Number
from experiments.tasks.splits import ColumnError

STAMP = "NOT PRIVATE: computed from the data exactly, for your eyes alone; do not publish"


def pure_guarantee(epsilon: float, terms: str) -> str:
    """Returns the sentence that says what pure epsilon-DP releases cost a user, on some terms."""
    attack = attack_in_words(Bound(0.0, implied_advantage(epsilon, 0.0)), "user")
    # As it was given: `:g` would round a guarantee down.
    at = f"delta 0 ({ADJACENCY} adjacency, unit: one user; {terms})"
    return f"epsilon <= {epsilon} at {at}; {attack}"


class Usage(NamedTuple):
    """What each user contributes."""

    counts: np.ndarray
    """Number of examples: int64[users]."""
    losses: np.ndarray | None
    """Mean loss of a model over a user's examples: float64[users]."""


def read(path: Path, user: str, loss: str | None = None) -> Usage:
    """Reads a table of which each row is one example: a file that `dpsgd prepare csv` reads.

    Args:
      path: CSV, TSV or Parquet; text may be gzipped.
      user: Column that names the user.
      loss: Column with a model's loss on the example.

    Raises:
      DataError: If the file is no such table, lacks a column, or a user or a loss is missing.
    """
    wanted = [user] if loss is None else [user, loss]
    file, rows = open_rows(path, wanted), 0
    users, losses = [pa.array([], pa.string())], [np.zeros(0)]
    for batch in file.batches(dict.fromkeys(wanted, pa.string())):
        try:
            users.append(texts(batch[user], user))
            _refuse_missing(np.asarray(pc.equal(users[-1].fill_null(""), "")), user, "a user")
            if loss is not None:
                found = Number().decode(batch[loss], loss)
                _refuse_missing(found.missing, loss, "a finite number")
                losses.append(found.values)
        except ColumnError as error:
            raise file.located(error, rows) from None
        rows += len(users[-1])
    if not rows:
        raise DataError(path, EMPTY)
    who = np.asarray(pa.concat_arrays(users).dictionary_encode().indices)
    counts = np.bincount(who)
    return Usage(
        counts, None if loss is None else np.bincount(who, np.concatenate(losses)) / counts
    )


def _refuse_missing(missing: np.ndarray, column: str, wanted: str) -> None:
    for row in np.flatnonzero(missing)[:1]:
        raise ColumnError.unexpected(None, wanted, column=column, row=int(row))


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
    `experiments.papers.contribution.bias_bounds`.
    """
    header = ["cap", "kept", "Prop. 1", "Prop. 2", "entropy", "distance"]
    rows = []
    for cap in caps:
        found = bias_bounds(usage.counts, cap, usage.losses)
        kept = np.minimum(usage.counts, cap).sum() / usage.counts.sum()
        numbers = ("-" if math.isnan(bound) else f"{bound:.4f}" for bound in found)
        rows.append([f"{cap:,}", f"{kept:.1%}", *numbers])
    return header, rows
