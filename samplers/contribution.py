"""Caps on the examples of each user, and training data that protect users.

To sample users, give any sampler `Contributions.of_users`: each row is one user, clipped once. To
sample examples, give `samplers.UserPoisson` the rows of `Contributions.of_examples`. Either way a
neighbour has all of one user's examples replaced by null ones; the number of rows is public. See
docs/explanation/units-and-users.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accounting.checks import check_count
from samplers.population import Population, UnitData
from samplers.randomness import Key, Stream, uniform_permutation

_LARGEST = 2**31
"""Most entries, of 8 bytes each, in the table of users' examples."""


@dataclass(frozen=True, eq=False)
class Contributions:
    """Capped examples of each user, at most tau, in one fixed shape.

    Attributes:
      labels: The users, ascending: [users].
      rows: Examples kept of each user; 0 where padded: int32[users, tau].
      weights: 1 for an example, 0 for padding: float32[users, tau].
      counts: Number of examples of each user before the cap: int64[users].
    """

    labels: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    counts: np.ndarray

    @property
    def num_users(self) -> int:
        """Number of users, `num_examples` of samplers of users."""
        return self.labels.size

    @property
    def max_contributions(self) -> int:
        """Largest number tau of examples of a user."""
        return self.rows.shape[1]

    @property
    def kept_examples(self) -> np.ndarray:
        """Examples within the cap, ascending: int32[examples].

        >>> cap_contributions(["ann", "bob", "ann"], 1).kept_examples
        array([0, 1], dtype=int32)
        """
        return np.sort(self.rows[self.weights > 0])

    def gather(self, column: np.ndarray) -> np.ndarray:
        """Returns a column by user: [users, tau, ...], padded with zeros.

        >>> cap_contributions(["ann", "bob", "ann"], 2).gather(np.array([5, 6, 7]))
        array([[5, 7],
               [6, 0]])
        """
        values = np.asarray(column)[self.rows]
        real = self.weights.reshape(*self.weights.shape, *(1,) * (values.ndim - 2)) > 0
        return np.where(real, values, np.zeros((), values.dtype))

    def data(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns training data with one row per user, and "weight".

        A loss sees one user: each column's [tau, ...], and weight, float32[tau], which is 0 at the
        padding.

        >>> capped = cap_contributions(["ann", "bob", "ann"], 2)
        >>> {name: rows.tolist() for name, rows in capped.data({"x": np.array([5, 6, 7])}).items()}
        {'x': [[5, 7], [6, 0]], 'weight': [[1.0, 1.0], [1.0, 0.0]]}

        Raises:
          ValueError: If a column has not one row per example, or is named "weight".
        """
        if "weight" in columns:
            raise ValueError('no column may be named "weight", which marks padding: rename it')
        self._check(columns)
        return {**{name: self.gather(c) for name, c in columns.items()}, "weight": self.weights}

    def of_users(self, columns: Mapping[str, np.ndarray]) -> UnitData:
        """Returns training data of users, for any sampler (see `data`)."""
        return UnitData(self.data(columns), Population(self.num_users, "user"))

    def of_examples(self, columns: Mapping[str, np.ndarray]) -> UnitData:
        """Returns training data of capped examples, for `UserPoisson`.

        >>> cap_contributions(["ann", "bob", "ann"], 1).of_examples({"x": np.array([5, 6, 7])})
        ... # doctest: +ELLIPSIS
        UnitData(columns={'x': array([5, 6])}, population=Population(num_examples=2, ...))

        Raises:
          ValueError: If a column has not one row per example.
        """
        self._check(columns)
        examples = self.kept_examples
        rows = {name: np.asarray(column)[examples] for name, column in columns.items()}
        most, users = self.max_contributions, self.num_users
        return UnitData(rows, Population(examples.size, max_contributions=most, num_users=users))

    def _check(self, columns: Mapping[str, np.ndarray]) -> None:
        for name, column in columns.items():
            if len(column) != self.counts.sum():
                raise ValueError(
                    f"column {name!r} has {len(column)} rows, but users were given for "
                    f"{self.counts.sum()} examples"
                )


def cap_contributions(
    users: Any,
    max_contributions: int,
    *,
    keep: Literal["first", "random"] = "first",
    order: Any = None,
    seed: int | None = None,
) -> Contributions:
    """Keeps at most tau = `max_contributions` examples of each user.

    Which examples remain depends on the user's own examples and `order` alone: not on other users,
    nor on the order of the rows.

    >>> capped = cap_contributions(["b", "a", "b", "b"], 2)
    >>> capped.rows.tolist(), capped.weights.tolist()
    ([[1, 0], [0, 2]], [[1.0, 0.0], [1.0, 1.0]])

    Args:
      users: Label of each example's user: [examples].
      max_contributions: Largest number tau >= 1 of examples of a user.
      keep: "first", the first tau by `order`; or "random", tau of them, uniformly by `seed`.
      order: Sort key of a user's examples (a time, an id): [examples] or, to break ties by later
        columns, [examples, columns]; no two examples of a user may be equal. By default the row
        index: then keep the order of the rows.
      seed: Seed of the random choice, an integer >= 0 of any size. It need not be secret; do not
        reuse the sampler's seed, which is.

    Raises:
      ValueError: If shapes differ, tau < 1, two examples of a user have the same order, or `seed`
        is missing for "random" or given for "first".
    """
    users = np.asarray(users)
    check_count("max_contributions", max_contributions)
    if users.ndim != 1 or users.size == 0:
        raise ValueError(f"users must name one user for each example, got shape {users.shape}")
    if keep not in ("first", "random"):
        raise ValueError(f'keep must be "first" or "random", got {keep!r}')
    if (keep == "random") != (seed is not None):
        raise ValueError('keep="random" needs a seed, and keep="first" takes none')
    keys = np.arange(users.size) if order is None else np.asarray(order)
    keys = keys[:, None] if keys.ndim == 1 else keys
    if keys.ndim != 2 or keys.shape[0] != users.size:
        raise ValueError(
            f"order needs one row for each of {users.size} examples, got shape {keys.shape}"
        )
    labels, user = np.unique(users, return_inverse=True)
    by_user = np.lexsort((*keys.T[::-1], user))
    same = (user[by_user][1:] == user[by_user][:-1]) & np.all(
        keys[by_user][1:] == keys[by_user][:-1], axis=1
    )
    if same.any():
        first, second = by_user[np.flatnonzero(same)[0] :][:2]
        raise ValueError(
            f"examples {first} and {second} of user {users[first]} have the same order: give a "
            "column that tells them apart"
        )
    if labels.size * max_contributions > _LARGEST:
        raise ValueError(
            f"max_contributions={max_contributions:,} for {labels.size:,} users needs a table "
            f"of more than {_LARGEST:,} entries; give a smaller cap"
        )
    counts = np.bincount(user, minlength=labels.size)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    width = int(min(max_contributions, counts.max()))
    places = np.arange(width)
    rows = np.zeros((labels.size, max_contributions), np.int32)
    weights = np.zeros((labels.size, max_contributions), np.float32)
    inside = places < counts[:, None]
    chosen = np.where(inside, starts[:, None] + places, 0)
    if seed is not None:
        for j in np.flatnonzero(counts > max_contributions):
            key = Key(seed, Stream.CONTRIBUTION, _name(labels[j]), 0)
            subset = np.sort(uniform_permutation(key, int(counts[j]))[:max_contributions])
            chosen[j] = starts[j] + subset
    rows[:, :width] = np.where(inside, by_user[chosen], 0)
    weights[:, :width] = inside
    return Contributions(labels, rows, weights, counts)


def _name(label: Any) -> int:
    """Returns 64 bits that name a user, for labels of any type."""
    return int.from_bytes(hashlib.blake2b(str(label).encode(), digest_size=8).digest(), "big")
