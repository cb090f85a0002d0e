"""Rating task: ratings of whole users, a factorization, errors on held-out users."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from accounting.records import Count, check
from dpsgd.runs.recommendation import RecommendationRequest, Settings, default_rate, generic
from dpsgd.runs.records import checked
from experiments.tasks import Models
from experiments.tasks.ratings import ratings
from samplers import UnitData, UnitTree, cap_contributions
from samplers.contribution import Contributions

PyTree = Any

SEED = 0
"""Public seed that chooses the ratings kept of each user, and generates users."""


class RatingModels(Models):
    """Factorization without training ratings.

    Args:
      num_items: Number of items of the catalogue.
      rank: Number of factors of an item.
    """

    def __init__(self, num_items: int, rank: int) -> None:
        self.num_items, self.rank = num_items, rank

    def init(self, seed: int) -> PyTree:
        """Returns items without bias and with small random factors."""
        return self.functions.init(self.num_items, self.rank, seed)

    @property
    def functions(self) -> Any:
        """Pure functions of the model; it predicts ratings in [1, 5]."""
        from experiments.tasks.ratings import factorization

        return factorization

    def read(
        self, path: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[PyTree]:
        """Yields the ratings of a file, with the user's others.

        The other ratings determine the user's part; a rating never enters its own prediction.

        Raises:
          ValueError: If the file cannot be read, or its items are not in the model's catalogue.
        """
        table = ratings.read(path, labelled=labelled)
        if table.num_items != self.num_items:
            raise ValueError(
                f"{path} has a catalogue of {table.num_items:,} items, but the model has "
                f"{self.num_items:,}"
            )
        return ratings.with_others(ratings.of_split(table, split))

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Returns RMSE and mean absolute error; NaN after divergence.

        Raises:
          ValueError: If there are no rows.
        """
        errors = [np.asarray(self.predict(params, rows)) - rows["rating"] for rows in blocks]
        if not errors:
            raise ValueError("there are no rows to evaluate the model on")
        residuals = np.concatenate(errors).astype(np.float64)
        return {
            "rmse": float(np.sqrt(np.mean(np.square(residuals)))),
            "mean_absolute_error": float(np.mean(np.abs(residuals))),
            "num_examples": residuals.size,
        }

    @staticmethod
    def described(description: Mapping[str, Any], where: str = "task") -> RatingModels:
        """Returns the models of a described task, without its ratings.

        Raises:
          ValueError: If `description` is invalid; the message begins with `where`.
        """
        names = "num_items", "rank"
        sizes = [checked(description.get(name), int, f"{where}, {name}") for name in names]
        return RatingModels(*sizes)


@dataclass(frozen=True)
class Ratings(RatingModels):
    """Ratings by users: whole users are protected, errors on users left out.

    Attributes:
      data: `u.data` of MovieLens 100K, gzipped or not. Default: generated ratings.
      rows: Meaning of one row. user: all ratings of a user, clipped as one; rating: one rating, for
        samplers that draw ratings (user-poisson, multistage, units-then-poisson).
      max_ratings: Largest number of ratings kept per user, chosen at random.
      rank: Factors of an item, beside its bias.
    """

    data: Path | None = None
    rows: Literal["users", "ratings"] = "users"
    max_ratings: Count = 100
    rank: Count = 1

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def table(self) -> ratings.Ratings:
        """All ratings, read on first use."""
        return ratings.load(self.data, SEED)

    @property
    def num_items(self) -> int:  # type: ignore[override]
        """Number of items of the catalogue, a public list."""
        return self.table.num_items

    def recommend(self, request: RecommendationRequest) -> Settings:
        """Returns the settings of a run.

        Rows of users get the settings that were best on MovieLens 100K, see
        docs/explanation/results/evidence.md; rows of ratings get the generic ones.
        """
        if self.rows == "ratings":
            return generic(request)
        norm = 0.4 * math.sqrt(self.max_ratings)  # orthogonal gradients, one per rating
        steps, epochs, distance = (600, 30, 0.42) if request.private else (180, 60, 0.27)
        n, epochs = request.num_examples, request.epochs or epochs
        about = max(1.0, n * epochs / steps)
        batch_size = request.batch_size or min(n, 2 ** round(math.log2(about)))
        rate = distance / math.sqrt(math.ceil(n / batch_size) * epochs)
        if request.optimizer == "sgd":
            rate = default_rate(request.optimizer, request.momentum)
        return Settings(batch_size, epochs, float(f"{norm:.2g}"), float(f"{rate:.2g}"))

    def columns(self) -> UnitData:
        """Returns the training ratings, one user or rating per row.

        The split and the kept ratings of a user depend on that user's ratings alone, so that data
        that differ in one user's ratings differ nowhere else.
        """
        table = ratings.of_split(self.table, "train")
        contributions = self._cap_ratings(table)
        columns = {"item": table.item, "rating": table.rating}
        if self.rows == "users":
            return contributions.of_users(columns)
        tree = UnitTree.from_columns({"user": table.user[contributions.kept_examples]})
        rows, of_users = contributions.of_examples(columns)
        return UnitData(rows, dataclasses.replace(of_users, tree=tree))

    def _cap_ratings(self, table: ratings.Ratings) -> Contributions:
        order = np.stack([table.time, table.item], axis=1)
        return cap_contributions(
            table.user, self.max_ratings, keep="random", order=order, seed=SEED
        )

    def generated(self, count: int) -> PyTree:
        """Returns `count` synthetic probe rows: uniform ratings of random items."""
        rng = np.random.default_rng(0)
        tau = self.max_ratings
        shape = (count, tau) if self.rows == "users" else (count,)
        item = rng.integers(0, self.num_items, shape, np.int32)
        rating = rng.integers(1, 6, shape).astype(np.float32)
        if self.rows == "ratings":
            return {"item": item, "rating": rating}
        present = np.arange(tau) < rng.integers(1, tau, (count, 1), endpoint=True)
        weight = present.astype(np.float32)
        return {"item": item * present, "rating": rating * weight, "weight": weight}

    def held_out(self, split: str) -> Iterator[PyTree]:
        """Yields the ratings of users who took no part in training.

        Errors on other ratings of training users would reveal something about protected users.
        """
        return ratings.with_others(ratings.of_split(self.table, split))

    def check(self, begun: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if a split is empty, or the catalogue changed."""
        name = self.data or "the generated population"
        for split in ("train", "validation", "test"):
            if not np.unique(ratings.of_split(self.table, split).user).size:
                raise ValueError(f"{name} has no users in the {split} split; give more users")
        if begun is not None and begun.get("num_items") != self.num_items:
            raise ValueError(
                f"{name} has a catalogue of {self.num_items:,} items, other than the run"
            )

    def describe(self) -> dict[str, Any]:
        """Returns the public description: catalogue, rank and kept ratings."""
        return {
            "num_items": self.num_items,
            "rank": self.rank,
            "rows": self.rows,
            "max_ratings": self.max_ratings,
            "kept": f"at random, by the public seed {SEED}",
            "split": "users, 80/10/10 by SplitMix64 of their numbers",
            "headline": "test_rmse",
            "better": "lower",
        }
