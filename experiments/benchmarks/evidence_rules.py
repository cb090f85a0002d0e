"""Settings by rule beside a fixed grid of 24, over data sets and epsilons: how much rules lose.

The grid is in units that do not depend on the data. Its models are of one layer, whose features
together are at most `reach` long, and whose gradients `longest`. A setting is C / longest, passes,
about how many steps they make, and Adam's rate times the root of the steps and times the reach:
where noise outweighs gradients, Adam's walk moves what the model says of a row about so far. The
best setting of a data set and an epsilon is chosen on validation rows. So are the numbers of a law
for it: those that lose least over the other data sets, at all epsilons. Losses are of test rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from dpsgd import RunSpec
from dpsgd.runs.resolve import resolve
from dpsgd.runs.task import Task, rows_of
from experiments.benchmarks.case import Estimate, Row, cases, figure
from experiments.benchmarks.evidence_data import BARE, DATA, DataSet, sized
from experiments.benchmarks.models import Models, defaults, run_of


class Choice(NamedTuple):
    """One setting of the grid, in units of the data."""

    clipped: float
    """C over the longest gradient."""
    epochs: int
    steps: int
    """About, of the whole run: a batch is a power of two."""
    distance: float
    """Adam's rate times the root of the steps, times the reach."""

    def spec(self, rows: int, units: Units, **target: Any) -> RunSpec:
        """Returns the run of so many rows."""
        batch = min(rows, 2 ** round(math.log2(rows * self.epochs / self.steps)))
        steps = math.ceil(rows / batch) * self.epochs
        rate = self.distance / math.sqrt(steps) / units.reach
        chosen = {"learning_rate": rate, "l2_clip_norm": self.clipped * units.longest}
        return run_of("balls-and-bins", batch, self.epochs, **chosen, **target)


class Units(NamedTuple):
    """What is public of the one-layer model of a data set, and where it is measured."""

    reach: float
    """The longest that the features of a row are together, that of the bias too."""
    longest: float
    """The longest gradient, of one logit or of several."""
    epsilons: tuple[float, ...] = (3.0, 1.0)


def of_columns(count: int) -> Units:
    """Returns the units of a linear model of columns, each of about two features, and one logit."""
    return Units(math.sqrt(2 * count), math.sqrt(2 * count))


PASSES = (10, 150), (20, 300), (30, 150), (30, 600)
GRID = tuple(
    Choice(clipped, *passes, distance)
    for clipped, passes, distance in itertools.product((0.2, 0.4), PASSES, (1.0, 2.0, 4.0))
)
UNITS: Mapping[str, Units] = {
    "adult": of_columns(14),
    "bank": of_columns(16),
    "criteo": of_columns(39),
    "mnist": Units(math.sqrt(2), 2.0),
    "movielens": Units(math.sqrt(8), math.sqrt(200)),
}
"""Of clicks and tables, and of features of norm 1 and a bias by several classes. A rating has a
bias and a factor of norm 1, and an error of one star costs four times what a logit off by one does:
what is 1 here is half a star. A gradient is of 100 ratings, each off by a star."""
TOGETHER = ("adult", "bank", "criteo", "mnist")
"""Data sets whose figures are of one kind, over which losses are averaged."""
BEFORE: Mapping[str, Callable[..., RunSpec]] = {
    "criteo": partial(defaults, l2_clip_norm=2.0),
    "mnist": sized(4096, 20, learning_rate=0.07, l2_clip_norm=0.7),
    "movielens": sized(256, 60, learning_rate=0.02),
}
"""Rules that this grid has replaced since: what a law is compared to has not seen the grid."""

Scores = Mapping[Any, tuple[float, float]]
"""On validation and on test rows, by setting; None is the rule before this grid, NOW the one since.
"""


class Facts(NamedTuple):
    """What a law may go by."""

    rows: int
    epsilon: float
    rule: Choice
    """What the rule of the task chooses, in units of the grid."""


class Law(NamedTuple):
    """A rule with free numbers, which are chosen among candidates on other data sets."""

    words: str
    candidates: Sequence[tuple[float, ...]]
    choice: Callable[..., Choice]
    """Of facts, and of the numbers."""


SHIFTS = 2.0 ** np.arange(-1, 1.25, 0.25)
LAWS = (
    Law("one setting for all", GRID, lambda _, *setting: Choice(*setting)),
    Law(
        "distance a (rows / 2^15)^b",
        [*itertools.product(2.0 ** np.arange(0, 2.25, 0.25), np.arange(-2, 1.125, 0.25))],
        lambda facts, a, b: Choice(0.4, 30, 600, a * (facts.rows / 2**15) ** b),
    ),
    Law(
        "C / longest c, 30 epochs of 600 steps, the task's distance times a",
        [*itertools.product((0.2, 0.4), SHIFTS)],
        lambda facts, c, a: Choice(c, 30, 600, a * facts.rule.distance),
    ),
)
"""Of at most two free numbers each."""


def score(scores: Scores, choice: Choice, split: int) -> float:
    """Returns the score of a setting: measured, or linear in the log of distance on the grid.

    C and passes are then the nearest of the grid, and a distance beyond it is at its end.
    """
    if choice in scores:
        return scores[choice][split]
    near = min(
        {(one.clipped, one.epochs, one.steps) for one in GRID},
        key=lambda one: sum(abs(math.log(a / b)) for a, b in zip(one, choice, strict=False)),
    )
    of = [one for one in GRID if (one.clipped, one.epochs, one.steps) == near]
    values = [scores[one][split] for one in of]
    return float(np.interp(math.log(choice.distance), np.log([x.distance for x in of]), values))


def facts_of(task: Task, data: str, epsilon: float) -> Facts:
    """Returns the facts of a data set, with what its task's rule was before this grid."""
    found, units, rows = DATA[data], UNITS[data], rows_of(task)
    spec = BEFORE.get(data, found.run)(**_target(found, epsilon))
    asked = resolve(spec, task, rows).spec
    run, sizes = asked.options(), vars(asked.sampler)
    steps = math.ceil(rows[1].num_examples / sizes["batch_size"]) * sizes["epochs"]
    distance = run["learning_rate"] * math.sqrt(steps) * units.reach
    rule = Choice(run["l2_clip_norm"] / units.longest, sizes["epochs"], steps, distance)
    return Facts(rows[1].num_examples, epsilon, rule)


def _target(found: DataSet, epsilon: float) -> dict[str, Any]:
    return {**BARE, "target_epsilon": epsilon, "target_delta": found.delta}


def measured(data: str, facts: Facts, models: Models) -> dict[Any, tuple[float, float]]:
    """Returns the scores of all settings on one data set, at one epsilon, and of both rules."""
    found, sign = DATA[data], -1.0 if DATA[data].metric == "rmse" else 1.0
    target = _target(found, facts.epsilon)

    def of(name: str, spec: Callable[..., RunSpec]) -> tuple[float, float]:
        runs = models.trained(f"{data}, epsilon {facts.epsilon:g}, {name}", spec(**target))
        return tuple(  # type: ignore[return-value]  # of two
            sign * fmean(run[f"{split}_{found.metric}"] for run in runs)
            for split in ("validation", "test")
        )

    return {
        None: of("today", BEFORE.get(data, found.run)),
        NOW: of("now" if data in BEFORE else "today", found.run),
        **{
            choice: of(_name(choice), partial(choice.spec, facts.rows, UNITS[data]))
            for choice in GRID
        },
    }


def best(scores: Scores) -> Choice:
    """Returns the setting of the grid that is best on validation rows."""
    return max(GRID, key=lambda choice: scores[choice][0])


def loses_least(law: Law, others: Sequence[tuple[Facts, Scores]]) -> tuple[float, ...]:
    """Returns the numbers with which a law loses least on validation rows, as a mean."""

    def lost(numbers: tuple[float, ...]) -> float:
        return fmean(
            scores[best(scores)][0] - score(scores, law.choice(facts, *numbers), 0)
            for facts, scores in others
        )

    return min(law.candidates, key=lost)


def regret(
    *,
    files: str | None = None,
    grid_seeds: int = 2,
    grid_data: tuple[str, ...] = TOGETHER,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures what the tasks' rules lose on each data set, and what laws of other data sets do."""
    assert files is not None
    if unknown := set(grid_data) - set(UNITS):
        raise ValueError(f"--grid-data: {min(unknown)} is none of {', '.join(UNITS)}")
    of: dict[str, list[tuple[Facts, Scores]]] = {}
    for data in grid_data:
        with DATA[data].opened(Path(files), chosen_on=True) as task:
            folder = None if written is None else Path(written) / "grid"
            models = Models(task, grid_seeds, folder)
            each = [facts_of(task, data, epsilon) for epsilon in UNITS[data].epsilons]
            of[data] = [(facts, measured(data, facts, models)) for facts in each]
    today, now = [], []
    for data, pairs in of.items():
        for facts, scores in pairs:
            place, top = f"{data}, epsilon {facts.epsilon:g}", best(scores)
            yield figure(f"best of the grid, {_words(top)}, {place}", scores[top][1])
            today.append(scores[top][1] - scores[None][1])
            yield figure(f"lost by {TODAY}, {place}", today[-1])
            now.append(scores[top][1] - scores[NOW][1])
    if len(of) == 1:
        return
    yield figure(f"mean lost by {TODAY}", Estimate.mean(today))
    yield figure(f"mean lost by {TODAY} since", Estimate.mean(now))
    ratio = fmean(now) / fmean(today)
    yield figure(f"mean lost by {TODAY} since / before", ratio, "x", at_most=0.5)
    every = [pair for pairs in of.values() for pair in pairs]
    over: list[float] = []
    for law in LAWS:
        lost = []
        for data, pairs in of.items():
            numbers = loses_least(law, [pair for name in of if name != data for pair in of[name]])
            for facts, scores in pairs:
                choice = law.choice(facts, *numbers)
                lost.append(scores[best(scores)][1] - score(scores, choice, 1))
                place = f"{data}, epsilon {facts.epsilon:g}"
                yield figure(f"lost by {law.words}, {_words(choice)}, {place}", lost[-1])
        numbers = loses_least(law, every)
        shown = ", ".join(f"{x:.3g}" for x in numbers)
        seen = fmean(
            scores[best(scores)][1] - score(scores, law.choice(facts, *numbers), 1)
            for facts, scores in every
        )
        name = f"mean lost by {law.words}"
        over.append(fmean(lost) / fmean(today))
        yield figure(f"{name}, left out", Estimate.mean(lost))
        yield figure(f"{name} / by {TODAY}", over[-1], "x")
        yield figure(f"{name}, numbers of all data sets {shown}", seen)
    yield figure(f"least mean lost by a law / by {TODAY}", min(over), "x", at_most=0.5)


TODAY, NOW = "the rules of the tasks", "now"


def _name(choice: Choice) -> str:
    return ", ".join(f"{x:g}" for x in choice)


def _words(choice: Choice) -> str:
    return (
        f"C {choice.clipped:.2g}, {choice.epochs} epochs, {choice.steps} steps, "
        f"distance {choice.distance:.3g}"
    )


CASES = cases(regret, needs=("--files",), seconds=4000, asked=True)
