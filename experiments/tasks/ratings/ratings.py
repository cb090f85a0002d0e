"""Ratings of items by users: MovieLens 100K from its file, or synthetic users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from experiments.tasks.files import Batch, open_rows
from experiments.tasks.kinds import MAX_DIGITS, Integer
from experiments.tasks.splits import ColumnError, random_masks

CATALOGUE = 1682
"""Number of films of MovieLens 100K, a public list."""

_LARGE = 10**MAX_DIGITS - 1
_RANGES = {
    "user id": (0, _LARGE),
    "item id": (1, CATALOGUE),
    "rating": (1, 5),
    "timestamp": (0, _LARGE),
}
"""Columns of a file, with their ranges."""
_NONE = -1
"""Code of a missing rating."""


class Ratings(NamedTuple):
    """Table of ratings, one per row."""

    user: np.ndarray
    """User numbers, int64[rows]."""
    item: np.ndarray
    """Item numbers from 0, int32[rows]."""
    rating: np.ndarray
    """Ratings from 1 to 5, NaN if unknown, float32[rows]."""
    time: np.ndarray
    """Times in seconds, int64[rows]."""
    num_items: int
    """Size of the catalogue, a public number."""

    def where(self, rows: np.ndarray) -> Ratings:
        """Returns the rows of a mask or an index."""
        user, item, rating, time = (column[rows] for column in self[:4])
        return Ratings(user, item, rating, time, self.num_items)


def load(path: Path | None, seed: int = 0) -> Ratings:
    """Returns the ratings of a file, or synthetic ratings.

    Args:
      path: `u.data` of MovieLens 100K; None for synthetic ratings.
      seed: Seed of the synthetic ratings.
    """
    return synthetic(seed) if path is None else read(path)


def read(path: Path, *, labelled: bool = True) -> Ratings:
    """Reads `u.data` of MovieLens 100K.

    Its lines are user, item, rating and time, separated by tabs. Source: Harper, Konstan, "The
    MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.

    Args:
      path: File, plain or gzip.
      labelled: True if every line must have its rating.

    Raises:
      DataError: If the file cannot be read, or a line is invalid; it names file, line and column.
    """
    names, blocks = tuple(_RANGES), [np.zeros((len(_RANGES), 0), np.int64)]
    file, rows = open_rows(path, names, [names]), 0
    for batch in file.batches(dict.fromkeys(names, pa.string())):
        try:
            blocks.append(_decoded(batch, labelled))
        except ColumnError as error:
            raise file.located(error, rows) from None
        rows += blocks[-1].shape[1]
    user, item, codes, time = np.concatenate(blocks, axis=1)
    rating = np.where(codes == _NONE, np.nan, codes).astype(np.float32)
    return Ratings(user, (item - 1).astype(np.int32), rating, time, CATALOGUE)


def _decoded(batch: Batch, labelled: bool) -> np.ndarray:
    """Returns the numbers of each column, int64[columns, rows]; `_NONE` is a missing rating."""
    columns = []
    for name, (low, high) in _RANGES.items():
        values, missing = Integer().decode(batch[name], name)
        required = labelled or name != "rating"
        wrong = np.where(missing, required, (values < low) | (values > high))
        for row in np.flatnonzero(wrong)[:1].tolist():
            value, expected = batch[name][row].as_py(), f"an integer from {low} to {high}"
            raise ColumnError.unexpected(value, expected, column=name, row=row)
        columns.append(np.where(missing, _NONE, values))
    return np.stack(columns)


def of_split(table: Ratings, split: str | None) -> Ratings:
    """Returns the ratings of a split's users, or all ratings.

    Raises:
      ValueError: If the split is unknown.
    """
    if split is None:
        return table
    masks = random_masks(table.user)
    if split not in masks:
        raise ValueError(f"the ratings have no split {split!a}; they have {', '.join(masks)}")
    return table.where(masks[split])


def with_others(
    table: Ratings, at_once: int = 1024, asked: np.ndarray | None = None
) -> Iterator[dict[str, Any]]:
    """Yields ratings, each with the same user's other ratings.

    Args:
      table: Ratings.
      at_once: Largest number of rows of a block.
      asked: bool[rows], rows to yield, hidden from each other; by default all rows.

    Yields:
      "item", int32[rows], "rating", float32[rows], and, as "known", item, rating and weight of the
      other ratings, [rows, most ratings of a user]; weight is 0 for the row itself, for unknown
      ratings, and for padding.
    """
    users, who, counts = np.unique(table.user, return_inverse=True, return_counts=True)
    rows_by_user = np.zeros((users.size, counts.max(initial=0)), np.int64)
    present = np.arange(rows_by_user.shape[1]) < counts[:, None]
    rows_by_user[present] = np.argsort(who, kind="stable")
    visible = ~np.isnan(table.rating) if asked is None else ~asked
    targets = np.arange(who.size) if asked is None else np.flatnonzero(asked)
    for start in range(0, targets.size, at_once):
        rows = targets[start : start + at_once]
        user_rows = rows_by_user[who[rows]]
        rating = table.rating[user_rows]
        is_known = present[who[rows]] & (user_rows != rows[:, None]) & visible[user_rows]
        yield {
            "item": table.item[rows],
            "rating": table.rating[rows],
            "known": {
                "item": table.item[user_rows],
                "rating": np.where(is_known, rating, 0).astype(np.float32),
                "weight": is_known.astype(np.float32),
            },
        }


def synthetic(seed: int = 0, num_users: int = 4000, num_items: int = 200) -> Ratings:
    """Draws ratings of users whose activity follows Zipf's law.

    The j-th most active user rates sqrt(20/j) of the catalogue, at least 20 items. A rating is 3.5
    + bias of the item + bias of the user + taste . character + noise, rounded into [1, 5]. The
    sizes let episodes learn under noise: with 1,000 users, or on MovieLens 100K, models of single
    ratings did better than episodes at equal noise.

    >>> ratings = synthetic(num_users=3, num_items=30)
    >>> ratings.num_items, int(ratings.rating.min()) >= 1, int(ratings.rating.max()) <= 5
    (30, True, True)
    """
    rng = np.random.default_rng(seed)
    activity = np.sqrt(20 / np.arange(1, num_users + 1))
    counts = np.clip(activity * num_items, 20, 0.9 * num_items).astype(int)
    popularity = -0.7 * np.log(np.arange(1, num_items + 1))
    # The largest of popularity + Gumbel noise: items drawn without replacement.
    order = np.argsort(-(popularity + rng.gumbel(size=(num_users, num_items))), axis=1)
    user = np.repeat(np.arange(num_users), counts)
    item = np.concatenate([row[:count] for row, count in zip(order, counts, strict=True)])
    quality, leaning = 0.5 * rng.normal(size=num_items), 0.4 * rng.normal(size=num_users)
    character, taste = rng.normal(size=(num_items, 2)), 0.5 * rng.normal(size=(num_users, 2))
    mean = 3.5 + quality[item] + leaning[user] + np.sum(character[item] * taste[user], axis=1)
    rating = np.clip(np.round(mean + 0.7 * rng.normal(size=user.size)), 1, 5)
    time = rng.permutation(user.size)
    return Ratings(
        user, item.astype(np.int32), rating.astype(np.float32), time.astype(np.int64), num_items
    )
