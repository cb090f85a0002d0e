"""Users who hold many examples: a cap on each, and rows that are users.

Either users are sampled: any sampler, of `Contributions.of_users`, training data whose rows are
users of one fixed shape, each clipped once. Or examples are: `samplers.UserPoisson`, of
`Contributions.of_examples`. In both, a neighbour has all of one user's examples replaced by null
ones. Public is the number of users, or of the examples that are kept. See
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


@dataclass(frozen=True, eq=False)
class Contributions:
    """The examples that are kept of each user: at most tau, in one fixed shape.

    Attributes:
      labels: The users, ascending: [users].
      rows: Examples kept of each user; 0 where padded: int32[users, tau].
      weights: 1 for an example, 0 for padding: float32[users, tau].
      counts: How many examples each user had before the cap: int64[users].
    """

    labels: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    counts: np.ndarray

    @property
    def num_users(self) -> int:
        """Number of users: the `num_examples` of a sampler that draws users."""
        return self.labels.size

    @property
    def max_contributions(self) -> int:
        """Most examples tau that are kept of a user."""
        return self.rows.shape[1]

    @property
    def kept(self) -> np.ndarray:
        """The examples kept, ascending: int32[examples]."""
        return np.sort(self.rows[self.weights > 0])

    def gather(self, column: np.ndarray) -> np.ndarray:
        """Returns a column of the data by user, with zeros where padded: [users, tau, ...].

        So no user's data stand in another's row, for any loss.
        """
        values = np.asarray(column)[self.rows]
        real = self.weights.reshape(*self.weights.shape, *(1,) * (values.ndim - 2)) > 0
        return np.where(real, values, np.zeros((), values.dtype))

    def data(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns training data with one row a user: columns by user, and "weight".

        A loss sees one user: each column's [tau, ...], and weight, float32[tau], which is 0 at the
        padding.

        >>> capped = cap_contributions(["ann", "bob", "ann"], 2)
        >>> {name: rows.tolist() for name, rows in capped.data({"x": np.array([5, 6, 7])}).items()}
        {'x': [[5, 7], [6, 0]], 'weight': [[1.0, 1.0], [1.0, 0.0]]}

        Raises:
          ValueError: If a column has another number of rows than there were examples, or is named
            "weight".
        """
        if "weight" in columns:
            raise ValueError('no column may be named "weight": what counts of a user is')
        self._check(columns)
        return {**{name: self.gather(c) for name, c in columns.items()}, "weight": self.weights}

    def of_users(self, columns: Mapping[str, np.ndarray]) -> UnitData:
        """Returns training data with one row a user, for any sampler: see `data`."""
        return UnitData(self.data(columns), Population(self.num_users, "user"))

    def of_examples(self, columns: Mapping[str, np.ndarray]) -> UnitData:
        """Returns training data of the kept examples, a row each: for `samplers.UserPoisson`.

        >>> cap_contributions(["ann", "bob", "ann"], 1).of_examples({"x": np.array([5, 6, 7])})
        ... # doctest: +ELLIPSIS
        UnitData(columns={'x': array([5, 6])}, population=Population(num_examples=2, ...))

        Raises:
          ValueError: If a column has another number of rows than there were examples.
        """
        self._check(columns)
        kept = self.kept
        rows = {name: np.asarray(column)[kept] for name, column in columns.items()}
        most, users = self.max_contributions, self.num_users
        return UnitData(rows, Population(kept.size, max_contributions=most, num_users=users))

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

    The examples kept of a user depend on that user's examples alone, as named by `order`: on no
    other user, and not on the order of the rows.

    >>> capped = cap_contributions(["b", "a", "b", "b"], 2)
    >>> capped.rows.tolist(), capped.weights.tolist()
    ([[1, 0], [0, 2]], [[1.0, 0.0], [1.0, 1.0]])

    Args:
      users: Whom each example belongs to: [examples].
      max_contributions: tau >= 1.
      keep: "first", the first tau by `order`; or "random", tau of them, uniformly by `seed`.
      order: What orders a user's examples (a time, an id): [examples] or, to break ties by later
        columns, [examples, columns]; no two examples of a user may be equal. By default the number
        of the row: then a file must keep its order.
      seed: Of the random choice, an integer >= 0 of any size. It need not be secret; but the
        sampler's own seed is a secret: take another one.

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
        raise ValueError(f"order needs one row for each of {users.size} examples: {keys.shape}")
    labels, user = np.unique(users, return_inverse=True)
    by_user = np.lexsort((*keys.T[::-1], user))
    same = (user[by_user][1:] == user[by_user][:-1]) & np.all(
        keys[by_user][1:] == keys[by_user][:-1], axis=1
    )
    if same.any():
        one, other = by_user[np.flatnonzero(same)[0] :][:2]
        raise ValueError(
            f"examples {one} and {other} of user {users[one]} have the same order: give a column "
            "that tells them apart"
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
            some = np.sort(uniform_permutation(key, int(counts[j]))[:max_contributions])
            chosen[j] = starts[j] + some
    rows[:, :width] = np.where(inside, by_user[chosen], 0)
    weights[:, :width] = inside
    return Contributions(labels, rows, weights, counts)


def _name(label: Any) -> int:
    """Returns 64 bits that name a user, for labels of any type."""
    return int.from_bytes(hashlib.blake2b(str(label).encode(), digest_size=8).digest(), "big")
