"""`dpsgd choose`: a linear model of ratings, chosen privately from a finite class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ChooseConfig:
    """Choose a linear model of ratings from a finite class, by the exponential mechanism.

    Whole users are protected, with delta 0. Of each user the first ratings count, up to a cap.
    """

    data: tyro.conf.Positional[Path | None] = None
    """`u.data` of MovieLens 100K, gzipped or not. Default: generated ratings."""
    target_epsilon: float = 1.0
    """Epsilon of all releases together."""
    max_ratings: int | None = None
    """Public cap on the ratings of one user. Default: chosen privately, which costs
    --cap-epsilon."""
    caps: tuple[int, ...] = (5, 10, 20, 50, 100, 200, 400, 700)
    """Candidate caps, a public list chosen without the data."""
    cap_quantile: float = 0.9
    """Quantile of the users' numbers of ratings near which the cap is chosen."""
    cap_epsilon: float = 0.1
    """Part of --target-epsilon that the choice of the cap costs."""


def run(config: ChooseConfig) -> None:
    """Runs `dpsgd choose`."""
    from fractions import Fraction

    import numpy as np

    from experiments.cli.console import going_on
    from experiments.contributions import pure_guarantee
    from experiments.papers.contribution import private_quantile
    from experiments.tasks.ratings.linear import GRID, LinearRatings
    from experiments.tasks.ratings.ratings import load

    chosen = config.max_ratings is None
    caps = config.caps if config.max_ratings is None else (config.max_ratings,)
    if min(caps, default=0) < 1:
        raise ValueError(f"--caps and --max-ratings need numbers >= 1, got {caps}")
    spent = Fraction(config.cap_epsilon) if chosen else Fraction(0)
    if (rest := Fraction(config.target_epsilon) - spent) <= 0:
        raise ValueError(
            f"--target-epsilon {config.target_epsilon} leaves nothing for the model, after "
            f"{float(spent):g} for the choice of the cap: raise it"
        )
    with going_on("choosing"):
        model = LinearRatings(load(config.data))
        [cap, *_] = caps
        if chosen:
            cap = private_quantile(
                np.unique(model.train.user, return_counts=True)[1],
                config.cap_quantile,
                epsilon=config.cap_epsilon,
                candidates=caps,
            )
        found = dict(zip(GRID, model.choose(cap, rest).tolist(), strict=True))
    paid = f"{config.cap_epsilon} of it for the choice of the cap" if chosen else "cap public"
    terms = " + ".join(f"{value:g} {name}" for name, value in found.items() if name != "level")
    print(f"rating = {3.5 + found['level']:g} + {terms}, cap {cap}")
    print(pure_guarantee(config.target_epsilon, f"{paid}; where a user is removed, the same"))
