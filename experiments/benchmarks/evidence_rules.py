"""Settings by rule beside a fixed grid of 24, over data sets and epsilons: how much rules lose.

The grid is in units that do not depend on the data. Its models are of one layer, whose features
together are at most `reach` long, and whose gradients `longest`. A setting is C / longest, passes,
about how many steps they make, and Adam's rate times the root of the steps and times the reach:
where noise outweighs gradients, Adam's walk moves what the model says of a row about so far. The
best setting of a data set and an epsilon is chosen on validation rows. So is the rule for it: the
setting that loses least over the other data sets with few weights, or with many, at all epsilons.
Losses are of test rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dpsgd import RunSpec
from experiments.benchmarks.case import Row, cases, figure
from experiments.benchmarks.evidence_data import DATA, DataSet
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
    many: bool = False
    """Whether it has more than 2^16 weights, most of them of rare values."""
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
    "criteo": of_columns(39)._replace(many=True),
    "mnist": Units(math.sqrt(2), 2.0),
    "sst2": Units(math.sqrt(2), 2.0, many=True, epsilons=(3.0,)),
}
"""Of clicks and tables, and of features of norm 1 and a bias by several classes. A run of phrases
takes four times the others', so that one epsilon has to do."""

Scores = Mapping[Any, tuple[float, float]]
"""On validation and on test rows, by setting; None is today's rule."""


def measured(
    data: str, found: DataSet, epsilon: float, models: Models, rows: int
) -> dict[Any, tuple[float, float]]:
    """Returns the scores of all settings on one data set, at one epsilon."""
    target: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": found.delta}
    target |= {"calibration": "none", "audit": False}
    specs: dict[Choice | None, RunSpec] = {
        choice: choice.spec(rows, UNITS[data], **target) for choice in GRID
    }
    specs[None] = defaults(**target)

    def score(choice: Choice | None) -> tuple[float, float]:
        name = "today" if choice is None else ", ".join(f"{x:g}" for x in choice)
        runs = models.trained(f"{data}, epsilon {epsilon:g}, {name}", specs[choice])
        validation, test = (f"{split}_{found.metric}" for split in ("validation", "test"))
        return fmean(run[validation] for run in runs), fmean(run[test] for run in runs)

    return {choice: score(choice) for choice in specs}


def best(scores: Scores) -> Choice:
    """Returns the setting of the grid that is best on validation rows."""
    return max(GRID, key=lambda choice: scores[choice][0])


def loses_least(others: Sequence[Scores]) -> Choice:
    """Returns the setting that loses least on validation rows, as a mean over `others`."""

    def lost(choice: Choice) -> float:
        return fmean(scores[best(scores)][0] - scores[choice][0] for scores in others)

    return min(GRID, key=lost)


def regret(
    *,
    files: str | None = None,
    grid_seeds: int = 1,
    grid_data: tuple[str, ...] = tuple(UNITS),
    written: str | None = None,
) -> Iterator[Row]:
    """Measures what today's rules lose on each data set, and what one rule for all loses."""
    assert files is not None
    if unknown := set(grid_data) - set(UNITS):
        raise ValueError(f"--grid-data: {min(unknown)} is none of {', '.join(UNITS)}")
    of: dict[str, dict[float, Scores]] = {}
    for data in grid_data:
        found, units = DATA[data], UNITS[data]
        with found.opened(Path(files), chosen_on=True) as task:
            folder = None if written is None else Path(written) / "grid"
            models, rows = Models(task, grid_seeds, folder), len(task.columns()["label"])
            of[data] = {e: measured(data, found, e, models, rows) for e in units.epsilons}
    lost: dict[str, list[float]] = {TODAY: [], LEFT_OUT: [], ALL: []}
    for data, each in of.items():
        alike = {x: of[x] for x in of if UNITS[x].many == UNITS[data].many}
        if len(alike) < 2:
            raise ValueError(f"--grid-data: {data} needs another with as many weights")
        without = loses_least([x for name in alike if name != data for x in of[name].values()])
        everywhere = loses_least([x for name in alike for x in of[name].values()])
        for epsilon, scores in each.items():
            place, top = f"{data}, epsilon {epsilon:g}", best(scores)
            yield figure(f"best of the grid, {_words(top)}, {place}", scores[top][1])
            for rule, choice in ((TODAY, None), (LEFT_OUT, without), (ALL, everywhere)):
                lost[rule].append(scores[top][1] - scores[choice][1])
                words = "" if choice is None else f", {_words(choice)}"
                yield figure(f"lost by {rule}{words}, {place}", lost[rule][-1])
    means = {rule: fmean(each) for rule, each in lost.items()}
    for rule, found_mean in means.items():
        yield figure(f"mean lost by {rule}", found_mean)
    yield figure(f"mean lost by {LEFT_OUT} / by {TODAY}", means[LEFT_OUT] / means[TODAY], "x",
                 at_most=0.5)  # fmt: skip


TODAY, LEFT_OUT, ALL = "today's rules", "the rule of other data sets", "the rule of all"


def _words(choice: Choice) -> str:
    return (
        f"C {choice.clipped:g}, {choice.epochs} epochs, {choice.steps} steps, "
        f"distance {choice.distance:g}"
    )


CASES = cases(regret, needs=("--files",), seconds=1200, asked=True)
