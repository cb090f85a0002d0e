"""`dpsgd contributions` and `choose`: limits on the examples of one user."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from experiments import contributions as usages
from experiments.cli.console import Console, going_on
from experiments.cli.questions.contributions import Choose, Contributions
from experiments.papers.contribution import private_quantile
from experiments.tasks.ratings.linear import GRID, LinearRatings
from experiments.tasks.ratings.ratings import load


def contributions(asked: Contributions) -> None:
    """Prints how much users contribute, and the cost of a cap."""
    with going_on("reading the table"):
        usage = usages.read(asked.table, asked.user, asked.loss)
    with Console() as console:
        console.line(usages.STAMP)
        for line in usages.lines(usage, asked.target_epsilon):
            console.line(line)
        console.line("how far a cap may move the mean loss of a model, at most:")
        console.table(*usages.table(usage, asked.caps))


def choose(asked: Choose) -> None:
    """Prints a privately chosen linear model of ratings, and its guarantee."""
    epsilon, cap = Fraction(asked.target_epsilon), asked.max_ratings
    terms = "cap public"
    with going_on("choosing"):
        model = LinearRatings(load(asked.data))
        if cap is None:
            terms = f"{asked.cap_epsilon} of it for the choice of the cap"
            epsilon -= Fraction(asked.cap_epsilon)
            cap = private_quantile(
                np.unique(model.train.user, return_counts=True)[1],
                asked.cap_quantile,
                epsilon=asked.cap_epsilon,
                candidates=asked.caps,
            )
        weights = dict(zip(GRID, model.choose(cap, epsilon).tolist(), strict=True))
    rest = " + ".join(f"{value:g} {name}" for name, value in weights.items() if name != "level")
    print(f"rating = {3.5 + weights['level']:g} + {rest}, cap {cap}")
    terms = f"{terms}; where a user is removed, the same"
    print(usages.pure_guarantee(asked.target_epsilon, terms))
