"""Ratings as a task: what whole users hold, a factorization of it, errors on users left out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.tasks.models import HeldOut, Models

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no array
    from dpsgd.runs.recommendation import RecommendationRequest, Settings
    from experiments.tasks.ratings.ratings import Ratings as Table
    from samplers import UnitData
    from samplers.contribution import Contributions

PyTree = Any

SEED = 0
"""Public, of the choice of the ratings that are kept of each user, and of generated users."""


class RatingModels(Models):
    """What a factorization needs beside ratings to be trained on."""

    num_items: int
    """Items of the catalogue."""
    rank: int
    """Factors of an item."""

    def init(self, seed: int) -> PyTree:
        """Returns items without bias and with small random factors."""
        return self.functions.init(self.num_items, self.rank, seed)

    @property
    def functions(self) -> Any:
        """Of a factorization: what is predicted are ratings from 1 to 5, by who holds "known"."""
        from experiments.tasks.ratings import factorization

        return factorization

    def read(
        self, path: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[PyTree]:
        """Returns the ratings of a file in its order, each with the others of the same user.

        From these the user's own part is found; a rating never tells its own prediction. A line
        without a rating, which has none if they need not be `labelled`, tells others nothing.

        Raises:
          ValueError: if the file cannot be read, or its items are not in the model's catalogue.
        """
        from experiments.tasks.ratings import ratings

        table = ratings.read(path, labelled=labelled)
        if table.num_items != self.num_items:
            raise ValueError(
                f"{path} is of a catalogue of {table.num_items:,} items: the model is of one of "
                f"{self.num_items:,}"
            )
        return ratings.with_others(ratings.of_split(table, split))

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Returns the root mean squared and the mean absolute error; NaN where it diverged.

        Raises:
          ValueError: if there are no rows.
        """
        import numpy as np

        errors = [np.asarray(self.predict(params, rows)) - rows["rating"] for rows in blocks]
        if not errors:
            raise ValueError("there are no rows to evaluate the model on")
        found = np.concatenate(errors).astype(np.float64)
        return {
            "rmse": float(np.sqrt(np.mean(np.square(found)))),
            "mean_absolute_error": float(np.mean(np.abs(found))),
            "num_examples": found.size,
        }

    @staticmethod
    def described(description: Mapping[str, Any], where: str = "task") -> DescribedRatings:
        """Returns the models of a task that was described so; its ratings need not be there.

        Raises:
          ValueError: if `description` is none; `where` begins its line.
        """
        from dpsgd.runs.records import build

        named = {name: description.get(name) for name in ("num_items", "rank")}
        return build(DescribedRatings, named, where)


@dataclass(frozen=True)
class DescribedRatings(RatingModels):
    """Models without ratings: of a run or an export that is read back."""

    num_items: int
    rank: int


@dataclass(frozen=True)
class Ratings(HeldOut, RatingModels):
    """Ratings by users: whole users are protected, errors on users left out."""

    data: Path | None = None
    """`u.data` of MovieLens 100K, gzipped or not. Default: generated ratings."""
    rows: Literal["users", "ratings"] = "users"
    """Meaning of one row. user: all ratings of a user, clipped as one; rating: one rating, for
    samplers that draw ratings (user-poisson, multistage, units-then-poisson)."""
    max_ratings: int = 100
    """Largest number of ratings kept per user, chosen at random."""
    rank: int = 1
    """Factors of an item, beside its bias."""

    def __post_init__(self) -> None:
        for name in ("max_ratings", "rank"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be at least 1, got {getattr(self, name)}")

    @cached_property
    def table(self) -> Table:
        """All ratings, read when they are first needed."""
        from experiments.tasks.ratings import ratings

        return ratings.load(self.data, SEED)

    @property
    def num_items(self) -> int:  # type: ignore[override]
        """Items of the catalogue, a public list."""
        return self.table.num_items

    def recommend(self, request: RecommendationRequest) -> Settings:
        """Returns the settings of a run: where a row is a user, those for MovieLens 100K.

        There 24 settings were measured at epsilon 3 and at 1, by the error on validation users:
        see results/evidence.md in docs/explanation.
        """
        from dpsgd.runs.recommendation import generic
        from experiments.tasks.recommendation import Rule

        if self.rows == "ratings":
            return generic(request)
        norm = 0.4 * math.sqrt(self.max_ratings)  # a gradient for each rating, at right angles
        steps, epochs, distance = (600, 30, 0.42) if request.private else (180, 60, 0.27)
        return Rule(epochs, steps, distance, float(f"{norm:.2g}"))(request)

    def columns(self) -> UnitData:
        """Returns the ratings kept of the training users, as rows that are users or ratings.

        Who trains, and what is kept of a user, depends on that user's ratings alone, so that data
        in which one user's ratings are null differ nowhere else.
        """
        from experiments.tasks.ratings import ratings
        from samplers import UnitData, UnitTree

        table = ratings.of_split(self.table, "train")
        kept = self._kept(table)
        columns = {"item": table.item, "rating": table.rating}
        if self.rows == "users":
            return kept.of_users(columns)
        tree = UnitTree.from_columns({"user": table.user[kept.kept]})
        rows, of_users = kept.of_examples(columns)
        return UnitData(rows, dataclasses.replace(of_users, tree=tree))

    def _kept(self, table: Table) -> Contributions:
        import numpy as np

        from samplers import cap_contributions

        order = np.stack([table.time, table.item], axis=1)
        return cap_contributions(
            table.user, self.max_ratings, keep="random", order=order, seed=SEED
        )

    def generated(self, count: int) -> PyTree:
        """Returns `count` rows of uniform ratings of random items: synthetic probe rows."""
        import numpy as np

        rng = np.random.default_rng(0)
        tau = self.max_ratings
        shape = (count, tau) if self.rows == "users" else (count,)
        item = rng.integers(0, self.num_items, shape, np.int32)
        rating = rng.integers(1, 6, shape).astype(np.float32)
        if self.rows == "ratings":
            return {"item": item, "rating": rating}
        held = np.arange(tau) < rng.integers(1, tau, (count, 1), endpoint=True)
        weight = held.astype(np.float32)
        return {"item": item * held, "rating": rating * weight, "weight": weight}

    def held_out(self, split: str) -> Iterator[PyTree]:
        """Returns the ratings of the users of a split.

        They took no part in training: errors on other ratings of those who did would tell of the
        very users whom the guarantee protects.
        """
        from experiments.tasks.ratings import ratings

        return ratings.with_others(ratings.of_split(self.table, split))

    def check(self, begun: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if a split has no user, or the items are not those of a run's begin."""
        import numpy as np

        from experiments.tasks.ratings import ratings

        name = self.data or "the generated population"
        for split in ("train", "validation", "test"):
            if not np.unique(ratings.of_split(self.table, split).user).size:
                raise ValueError(f"{name} has too few users: none of them is for {split}")
        if begun is not None and begun.get("num_items") != self.num_items:
            raise ValueError(f"{name} is of a catalogue of {self.num_items:,} items")

    def describe(self) -> dict[str, Any]:
        """Returns what is public: the catalogue, and how ratings were chosen of the users."""
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
