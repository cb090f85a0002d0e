"""`dpsgd choose`: a linear model of ratings, chosen privately from a finite class."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from experiments.cli.console import going_on
from experiments.cli.questions.contributions import Choose
from experiments.contributions import pure_guarantee
from experiments.papers.contribution import private_quantile
from experiments.tasks.ratings.linear import GRID, LinearRatings
from experiments.tasks.ratings.ratings import load


def run(asked: Choose) -> None:
    """Runs `dpsgd choose`."""
    chosen = asked.max_ratings is None
    caps = asked.caps if asked.max_ratings is None else (asked.max_ratings,)
    spent = Fraction(asked.cap_epsilon) if chosen else Fraction(0)
    rest = Fraction(asked.target_epsilon) - spent
    with going_on("choosing"):
        model = LinearRatings(load(asked.data))
        [cap, *_] = caps
        if chosen:
            cap = private_quantile(
                np.unique(model.train.user, return_counts=True)[1],
                asked.cap_quantile,
                epsilon=asked.cap_epsilon,
                candidates=caps,
            )
        found = dict(zip(GRID, model.choose(cap, rest).tolist(), strict=True))
    paid = f"{asked.cap_epsilon} of it for the choice of the cap" if chosen else "cap public"
    terms = " + ".join(f"{value:g} {name}" for name, value in found.items() if name != "level")
    print(f"rating = {3.5 + found['level']:g} + {terms}, cap {cap}")
    print(pure_guarantee(asked.target_epsilon, f"{paid}; where a user is removed, the same"))
