"""Questions about users' contributions: `dpsgd contributions` and `choose`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accounting.records import Count, Ge, Le, Positive
from experiments.cli.options import PLACE
from experiments.cli.questions import Question


@dataclass(frozen=True, kw_only=True)
class Contributions(Question):
    """Print how many examples users contribute, and what a cap on them costs.

    The output is NOT private: do not publish it.

    Attributes:
      table: CSV or TSV file (with a header, plain or gzip) or Parquet file, one example per row.
      user: Column with the user of each example.
      loss: Column with a model's loss on each example, for the bound by the variance between users.
        The other bounds hold for losses in [0, 1].
      caps: Caps to compare: largest numbers of examples of one user.
      target_epsilon: Epsilon of a private count; the best cap for it is printed.
    """

    table: Annotated[Path, PLACE]
    user: str
    loss: str | None = None
    caps: tuple[Count, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    target_epsilon: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Choose(Question):
    """Choose a linear model of ratings from a finite class, by the exponential mechanism.

    Whole users are protected, with delta 0. Only the first ratings of each user count, up to a cap.

    Attributes:
      data: `u.data` of MovieLens 100K, gzipped or not. Default: generated ratings.
      target_epsilon: Epsilon of all releases together.
      max_ratings: Public cap on the ratings of one user. Default: chosen privately, which costs
        --cap-epsilon.
      caps: Candidate caps, a public list chosen without the data.
      cap_quantile: Quantile of the number of ratings per user; the cap is chosen near it.
      cap_epsilon: Part of --target-epsilon that is spent on the choice of the cap.
      dry_run: Print the guarantee, and the seconds of a choice on generated ratings; do not read
        DATA.
    """

    data: Annotated[Path | None, PLACE] = None
    target_epsilon: Positive = 1.0
    max_ratings: Count | None = None
    caps: tuple[Count, ...] = (5, 10, 20, 50, 100, 200, 400, 700)
    cap_quantile: Annotated[float, Ge(0), Le(1)] = 0.9
    cap_epsilon: Positive = 0.1
    dry_run: bool = False

    def check(self) -> None:
        """Refuses a cap that costs all of the epsilon."""
        if self.max_ratings is None and not self.caps:
            raise ValueError("--caps needs a number, or give --max-ratings")
        if self.max_ratings is not None and self.caps != type(self).caps:
            raise ValueError("give --max-ratings (a public cap) or --caps (candidates), not both")
        if self.max_ratings is None and self.cap_epsilon >= self.target_epsilon:
            raise ValueError(
                f"--target-epsilon {self.target_epsilon} leaves nothing for the model, after "
                f"{self.cap_epsilon:g} for the choice of the cap: raise it"
            )
