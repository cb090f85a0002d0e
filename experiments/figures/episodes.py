"""Episodes at equal noise: what each way of drawing them may claim, and what its model is worth.

Left: epsilon of the published Theorem 3 of episodic training (Tombs, Kotevska, Young, CEUR
Vol-3318, 2022), which is NOT sound for sums; the proved upper bound; and the lower bound that a
concrete pair of data sets attains. Right: the test error on users who took no part in training,
adapted to ten of their ratings each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure

from accounting import format_delta
from dpsgd import Mechanism, RootKey, dpsgd, train
from experiments.cli.console import Console
from experiments.figures.drawing import (
    RatingsPicture,
    blank,
    label_ones_twos_fives,
    legend,
    panels,
)
from experiments.tasks.ratings import factorization, ratings
from experiments.tasks.ratings.episodes import RATINGS, Scheme, all_schemes
from experiments.tasks.ratings.ratings import Ratings
from samplers import cap_contributions

NOISE_MULTIPLIER = 2.0
STEPS = 200
RANK = 2
LEARNING_RATE = 0.03
DELTA = 1e-5
TEST_SHARE = 0.2
SUPPORT = 10
"""Ratings of a test user that its own part is fitted to."""


class Population:
    """Users to train on, and others to test on."""

    def __init__(self, table: Ratings) -> None:
        users, counts = np.unique(table.user, return_counts=True)
        enough = users[counts >= RATINGS]
        test = np.random.default_rng(0).random(enough.size) < TEST_SHARE
        self.train = table.where(np.isin(table.user, enough[~test]))
        tested = table.where(np.isin(table.user, enough[test]))
        shuffled = np.random.default_rng(1).permutation(tested.user.size)
        whole = cap_contributions(tested.user, int(counts.max()), order=shuffled)
        columns = whole.data({"item": tested.item, "rating": tested.rating})
        self._known = {name: column[:, :SUPPORT] for name, column in columns.items()}
        self._asked = {name: column[:, SUPPORT:] for name, column in columns.items()}
        self._start = factorization.init(table.num_items, RANK)

    def error(self, params: factorization.Params | None = None) -> float:
        """Returns the root mean squared error; of the untrained model by default."""
        params = self._start if params is None else params
        errors = factorization.squared_errors(params, self._known, self._asked)
        return math.sqrt(float(errors.sum()) / float(self._asked["weight"].sum()))

    def errors(self, scheme: Scheme, seeds: int) -> np.ndarray:
        """Returns the error of a run of each seed, which all share one program: [seeds]."""
        mechanism = Mechanism(scheme.sampler, NOISE_MULTIPLIER, scheme.l2_clip_norm)
        algorithm = dpsgd(scheme.loss_fn, optax.adam(LEARNING_RATE))
        return np.array(
            [
                self.error(
                    train(
                        algorithm,
                        mechanism,
                        self._start,
                        scheme.data,
                        root=RootKey.from_insecure_seed(seed),
                        audit=False,
                    ).params
                )
                for seed in range(seeds)
            ]
        )


def draw(config: RatingsPicture, console: Console) -> Figure:
    """Returns the figure; prints its numbers."""
    population = Population(ratings.load(config.ratings))
    schemes = all_schemes(population.train, STEPS)
    figure = blank(12, 4.6)
    left, right = panels(figure, 1, 2, sharey=True)
    proved: dict[str, Any] = {"color": "#0072B2", "ls": ""}
    attained: dict[str, Any] = {**proved, "marker": "|", "ms": 18, "mew": 2}
    unsound: dict[str, Any] = {"color": "#D55E00", "ls": "", "marker": "x", "ms": 10, "mew": 2.5}
    labels, rows = [], []
    for place, scheme in enumerate(schemes):
        console.progress(f"{scheme.name}: epsilon")
        bound = scheme.price(NOISE_MULTIPLIER, DELTA)
        published = scheme.published(NOISE_MULTIPLIER, DELTA)
        console.progress(f"{scheme.name}: training")
        errors = population.errors(scheme, config.seeds)
        left.plot([bound.lower, bound.upper], [place, place], color="#0072B2", lw=3, alpha=0.4)
        left.plot(bound.upper, place, **proved, marker="o", ms=9)
        left.plot(bound.lower, place, **attained)
        if published is not None:
            left.plot(published.value, place, **unsound)
        right.errorbar(
            errors.mean(), place, xerr=errors.std(ddof=1), fmt="o", color="black", capsize=4
        )
        right.plot(errors, np.full(config.seeds, place + 0.15), ".", color="gray", ms=4)
        labels.append(f"{scheme.name}\n(protects one {scheme.unit})")
        rows.append(
            [
                scheme.name,
                scheme.unit,
                str(scheme.sampler.num_steps),
                "-" if published is None else f"~{published.value:.3g}",
                f"{bound:.3g}",
                f"{errors.mean():.4f} ± {errors.std(ddof=1):.4f}",
            ]
        )
    left.plot([], [], **proved, marker="o", ms=9, label="proved upper bound")
    left.plot([], [], **{**attained, "ms": 12}, label="lower bound: concrete data")
    left.plot([], [], **unsound, label="published Theorem 3: NOT sound")
    left.set(xscale="log", xlabel=f"ε at δ = {format_delta(DELTA)} (zero-out adjacency)")
    left.set_yticks(range(len(schemes)), labels)
    left.invert_yaxis()
    legend(left, loc="lower right", labelspacing=1.0)
    label_ones_twos_fives(left.xaxis)
    left.set_title(f"privacy cost at noise multiplier {NOISE_MULTIPLIER:g}")
    untrained = population.error()
    right.axvline(untrained, color="gray", ls=":", lw=1)
    right.text(untrained, 3.5, "untrained ", color="gray", fontsize="small", ha="right")
    right.set_xlabel(f"test RMSE (stars of 5) after {SUPPORT} ratings of a new user")
    right.set_title(f"quality: mean ± s.d. of {config.seeds} seeds")
    console.line(
        f"noise multiplier {NOISE_MULTIPLIER:g}, delta {format_delta(DELTA)}, zero-out; "
        f"untrained: {untrained:.4f}"
    )
    console.table(["scheme", "unit", "steps", "Thm 3", "epsilon", "test RMSE"], rows)
    console.line("Theorem 3 as published is not sound for sums: an estimate, NO GUARANTEE")
    console.line("the runs' noise is seeded, to be repeated: the epsilons are those of fresh noise")
    return figure
