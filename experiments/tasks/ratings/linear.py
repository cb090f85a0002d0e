"""Linear models of ratings, and a private choice among finitely many of them.

A rating is 3.5 + a + b position + c own, with position the logarithm of the film's place in the
public catalogue, and own the mean of the same user's other ratings, less 3.5. The first tau ratings
of each user count, and the exponential mechanism draws a model by the sum of its losses on them.
See docs/explanation/learning-from-a-finite-class.md.

Source: Amin, Kulesza, Munoz Medina, Vassilvitskii, "Bounding User Contributions", ICML 2019.
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
"""Models, a public list, [729, 3]."""
LARGEST_ERROR = 3.0
"""Error in stars at which the loss, the squared ratio to it, reaches 1. Of 2, 2.5, 3 and 4 the best
by the test error on MovieLens 100K.
"""
UNITS = 2**16
"""Resolution of a loss of 1: losses are rounded down to integers, and sums are exact."""
SHRINKAGE = 5.0
"""Number of ratings of 3.5 added to a user's others."""


class LinearRatings:
    """Training and test ratings of a linear model.

    Args:
      table: Ratings.
      is_test: Mask of the test ratings, bool[rows]; by default none. Test ratings enter no feature.
    """

    keep: Literal["first"] = "first"

    def __init__(self, table: Ratings, is_test: np.ndarray | None = None) -> None:
        # Order each user's ratings by time and film.
        order = np.lexsort((table.item, table.time, table.user))
        table = table.where(order)
        is_test = np.zeros(order.size, bool) if is_test is None else is_test[order]
        # Features of a rating use the catalogue and the user's ratings alone, never other users'.
        position = np.log1p(np.arange(table.num_items))
        position -= position.mean()
        user = np.unique(table.user, return_inverse=True)[1]
        rating = table.rating.astype(float) - MIDDLE
        train_rating = np.where(is_test, 0.0, rating)
        total, count = np.bincount(user, train_rating), np.bincount(user, ~is_test)
        others_mean = (total[user] - train_rating) / (count[user] - ~is_test + SHRINKAGE)
        x = np.stack([np.ones_like(others_mean), position[table.item], others_mean], axis=1)
        self.start, self.train = jnp.zeros(3), table.where(~is_test)
        if not self.train.user.size:
            raise ValueError("there are no training ratings; give more ratings")
        self.columns = {"x": x[~is_test].astype(np.float32), "rating": self.train.rating}
        self._x, self._rating = x[~is_test], rating[~is_test]
        self._test = x[is_test], rating[is_test]
        users, self._user = np.unique(self.train.user, return_inverse=True)
        starts = np.searchsorted(self._user, np.arange(users.size))
        self._place = np.arange(self._user.size) - starts[self._user]

    @staticmethod
    def loss_fn(params: jax.Array, user: Any) -> jax.Array:
        """Returns half the sum of squared errors of one user.

        Args:
          params: Coefficients a, b and c, [3].
          user: "x" [ratings, 3], "rating" and "weight" [ratings]; weight 0 is padding.
        """
        errors = user["rating"] - MIDDLE - user["x"] @ params
        return 0.5 * jnp.sum(jnp.where(user["weight"] > 0, jnp.square(errors), 0.0))

    @staticmethod
    def clip(cap: int) -> float:
        """Returns the clip norm tau / 2.

        It was the best of tau / 2, tau and 2 tau on MovieLens 100K.
        """
        return 0.5 * cap

    @cached_property
    def sums(self) -> np.ndarray:
        """Sums of losses on users' first tau ratings, [models, tau - 1]."""
        return np.cumsum([np.bincount(self._place, loss) for loss in self._losses()], axis=1)

    @cached_property
    def user_losses(self) -> np.ndarray:
        """Mean losses of models on each user, [models, users]. NOT PRIVATE."""
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
        """Draws a model of `CLASS` with pure epsilon-DP for users.

        Args:
          cap: Number tau >= 1 of ratings that count for each user: public, or a paid release.
          epsilon: Privacy cost for a user removed or zeroed out; twice for a replaced user.
          randbelow: Random integers, as for `exponential_mechanism`.

        Raises:
          ValueError: If `cap` or `epsilon` is out of range.
        """
        check_count("the cap", cap)
        costs = [int(x) for x in self._capped_sums(cap)]
        index = exponential_mechanism(
            costs, epsilon=epsilon, sensitivity=cap * UNITS, one_sided=True, randbelow=randbelow
        )
        return CLASS[index]

    def law(self, cap: int, epsilon: float) -> np.ndarray:
        """Returns the probabilities of `choose`, in floating point. NOT PRIVATE."""
        sums = self._capped_sums(cap)
        weights = np.exp(-epsilon / (cap * UNITS) * (sums - sums.min()))
        return weights / weights.sum()

    def _capped_sums(self, cap: int) -> np.ndarray:
        return self.sums[:, min(cap, self.sums.shape[1]) - 1]

    @cached_property
    def excess(self) -> np.ndarray:
        """Mean losses of models above the least, [models]. NOT PRIVATE."""
        totals = self.sums[:, -1]
        return (totals - totals.min()) / (self._user.size * UNITS)

    def error(self, params: Any) -> Any:
        """Returns the test RMSE with predictions clipped to [1, 5].

        Args:
          params: Coefficients a, b and c, [3]; or several models, [models, 3].
        """
        x, rating = self._test
        predicted = np.clip(np.asarray(params, float) @ x.T, 1 - MIDDLE, 5 - MIDDLE)
        return np.sqrt(np.mean(np.square(predicted - rating), axis=-1))
