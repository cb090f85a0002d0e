"""`dpsgd contributions` and `choose`: limits on the examples of one user."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np

from experiments import contributions as usages
from experiments.cli.console import Console, going_on
from experiments.cli.questions.contributions import Choose, Contributions
from experiments.papers.contribution import private_quantile
from experiments.tasks.ratings.ratings import load
from experiments.tasks.ratings.study import CLASS, GRID, LinearRatings


def contributions(question: Contributions) -> None:
    """Prints how much users contribute and a cap's cost."""
    with going_on("reading the table"):
        usage = usages.read(question.table, question.user, question.loss)
    with Console() as console:
        console.line(usages.STAMP)
        for line in usages.lines(usage, question.target_epsilon):
            console.line(line)
        console.line("how far a cap may move the mean loss of a model, at most:")
        console.table(*usages.table(usage, question.caps))


def choose(question: Choose) -> None:
    """Prints a privately chosen rating model and its guarantee."""
    epsilon, cap = Fraction(question.target_epsilon), question.max_ratings
    terms, began = "cap public", time.monotonic()
    with going_on("choosing"):
        model = LinearRatings(load(None if question.dry_run else question.data))
        if cap is None:
            terms = f"{question.cap_epsilon} of it for the choice of the cap"
            epsilon -= Fraction(question.cap_epsilon)
            cap = private_quantile(
                np.unique(model.train.user, return_counts=True)[1],
                question.cap_quantile,
                epsilon=question.cap_epsilon,
                candidates=question.caps,
            )
        weights = dict(zip(GRID, model.choose(cap, epsilon).tolist(), strict=True))
    terms = f"{terms}; where a user is removed, the same"
    guarantee = usages.pure_guarantee(question.target_epsilon, terms)
    if question.dry_run:
        rated = f"{len(model.train.user):,} generated ratings"
        print(f"models: {len(CLASS):,}, of which one is drawn")
        print(f"time of the choice: {time.monotonic() - began:.2g} s, measured on {rated}")
        print(f"guarantee: {guarantee}\nnothing was released, and no private row was read")
        return
    summands = " + ".join(f"{value:g} {name}" for name, value in weights.items() if name != "level")
    print(f"rating = {3.5 + weights['level']:g} + {summands}, cap {cap}")
    print(guarantee)
