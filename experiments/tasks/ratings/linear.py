"""Linear models of ratings, and a private choice among finitely many of them.

A rating is 3.5 + a + b position + c own: the film's place in the public catalogue, and the mean of
the same user's other ratings. Amin, Kulesza, Munoz Medina, Vassilvitskii, "Bounding User
Contributions", ICML 2019: the first tau ratings of each user count, and the exponential mechanism
draws a model by the sum of its losses on them. See
docs/explanation/learning-from-a-finite-class.md.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from accounting.checks import check_count
from experiments.papers.exponential_mechanism import exponential_mechanism
from experiments.tasks.ratings.factorization import MIDDLE
from experiments.tasks.ratings.ratings import Ratings

GRID = {
    "level": np.linspace(-0.5, 0.5, 9),
    "position": np.linspace(-0.4, 0.4, 9),
    "own": np.linspace(0.0, 1.0, 9),
}
"""Values of a, b and c."""
CLASS = np.array(list(itertools.product(*GRID.values())))
"""The models: a public list, [729, 3]."""
LARGEST_ERROR = 3.0
"""Stars; the loss is the square of the share of them that the error is, and 1 from here on: in [0,
1] whatever is predicted. Of 2, 2.5, 3 and 4 the best by the test error on MovieLens 100K."""
UNITS = 2**16
"""Of a loss of 1. A loss is rounded down to a whole number of them, and sums are exact."""
SHRINKAGE = 5.0
"""Ratings of 3.5 that are counted among a user's others."""


class LinearRatings:
    """Ratings of which some train a linear model and the others test it.

    Args:
      table: The ratings.
      asked: Which test: bool[rows]; by default none. They tell nothing to others.
    """

    keep: Literal["first"] = "first"

    def __init__(self, table: Ratings, asked: np.ndarray | None = None) -> None:
        # Each user's in their own order, of time and film.
        order = np.lexsort((table.item, table.time, table.user))
        table = table.where(order)
        asked = np.zeros(order.size, bool) if asked is None else asked[order]
        # Place by place of the catalogue and user by user: no other user's rating is in a number.
        position = np.log1p(np.arange(table.num_items))
        position -= position.mean()
        user = np.unique(table.user, return_inverse=True)[1]
        rating = table.rating.astype(float) - MIDDLE
        known = np.where(asked, 0.0, rating)
        total, count = np.bincount(user, known), np.bincount(user, ~asked)
        own = (total[user] - known) / (count[user] - ~asked + SHRINKAGE)
        x = np.stack([np.ones_like(own), position[table.item], own], axis=1)
        self.start, self.train = jnp.zeros(3), table.where(~asked)
        if not self.train.user.size:
            raise ValueError("there is no user with a rating to train on: give such ratings")
        self.columns = {"x": x[~asked].astype(np.float32), "rating": self.train.rating}
        self._x, self._rating, self._test = x[~asked], rating[~asked], (x[asked], rating[asked])
        users, self._user = np.unique(self.train.user, return_inverse=True)
        starts = np.searchsorted(self._user, np.arange(users.size))
        self._place = np.arange(self._user.size) - starts[self._user]

    @staticmethod
    def loss_fn(params: jax.Array, user: Any) -> jax.Array:
        """Returns half the squared errors of one user's ratings, for DP-SGD."""
        errors = user["rating"] - MIDDLE - user["x"] @ params
        return 0.5 * jnp.sum(jnp.where(user["weight"] > 0, jnp.square(errors), 0.0))

    @staticmethod
    def clip(cap: int) -> float:
        """Returns tau / 2, of 1/2, 1 and 2 the best on MovieLens 100K: gradients point one way."""
        return 0.5 * cap

    @cached_property
    def sums(self) -> np.ndarray:
        """Sum of each model's losses on the first tau ratings of each user: [models, tau - 1]."""
        return np.cumsum([np.bincount(self._place, loss) for loss in self._losses()], axis=1)

    @cached_property
    def user_losses(self) -> np.ndarray:
        """Mean loss of each model on all ratings of each user: [models, users]. NOT PRIVATE."""
        sums = np.array([np.bincount(self._user, loss) for loss in self._losses()])
        return sums / np.bincount(self._user) / UNITS

    def _losses(self) -> Iterator[np.ndarray]:
        for a, b, c in CLASS:
            predicted = a + b * self._x[:, 1] + c * self._x[:, 2]
            error = np.minimum(np.abs(self._rating - predicted), LARGEST_ERROR)
            yield np.floor(np.square(error / LARGEST_ERROR) * UNITS)

    def choose(
        self,
        cap: int,
        epsilon: float | Fraction,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> np.ndarray:
        """Draws a model of `CLASS` with pure epsilon-DP for users, removed or zeroed out.

        Args:
          cap: tau >= 1, the ratings that count of each user: public, or a release that is paid for.
          epsilon: The privacy cost of this draw; twice as much where a user is replaced by another.
          randbelow: As for `exponential_mechanism`.

        Raises:
          ValueError: If `cap` or `epsilon` is out of range.
        """
        check_count("the cap", cap)
        costs = [int(one) for one in self._sums_of(cap)]
        drawn = exponential_mechanism(
            costs, epsilon=epsilon, sensitivity=cap * UNITS, one_sided=True, randbelow=randbelow
        )
        return CLASS[drawn]

    def law(self, cap: int, epsilon: float) -> np.ndarray:
        """Returns the probabilities by which `choose` draws, in floating point. NOT PRIVATE."""
        sums = self._sums_of(cap)
        weights = np.exp(-epsilon / (cap * UNITS) * (sums - sums.min()))
        return weights / weights.sum()

    def _sums_of(self, cap: int) -> np.ndarray:
        return self.sums[:, min(cap, self.sums.shape[1]) - 1]

    @cached_property
    def excess(self) -> np.ndarray:
        """Mean loss of each model on all ratings, above the least. NOT PRIVATE."""
        whole = self.sums[:, -1]
        return (whole - whole.min()) / (self._user.size * UNITS)

    def error(self, params: Any) -> Any:
        """Returns the root mean squared error on test ratings, predictions kept in [1, 5].

        Args:
          params: a, b and c, [3]; or of several models, [models, 3].
        """
        x, rating = self._test
        found = np.clip(np.asarray(params, float) @ x.T, 1 - MIDDLE, 5 - MIDDLE)
        return np.sqrt(np.mean(np.square(found - rating), axis=-1))
