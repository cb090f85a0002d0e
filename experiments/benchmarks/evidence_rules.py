"""Settings by rule beside a fixed grid of 24, over data sets and epsilons: how much rules lose.

The grid is in units that do not depend on the data. Its models are of one layer, whose features
together are at most `reach` long, and whose gradients `longest`. A setting is C / longest, passes,
about how many steps they make, and Adam's rate times the root of the steps and times the reach:
where noise outweighs gradients, Adam's walk moves what the model says of a row about so far. The
best setting of a data set and an epsilon is chosen on validation rows, and so is the rule that
leaves one data set out: the setting that loses least over the others. Losses are of test rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
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
    """What is public of the one-layer model of a data set."""

    reach: float
    """The longest that the features of a row are together, that of the bias too."""
    longest: float
    """The longest gradient, of one logit or of several."""


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
    "sst2": Units(math.sqrt(2), 2.0),
}
"""Of features of norm 1 and a bias, by several classes, and of clicks and tables."""
EPSILONS = (3.0, 1.0)

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


def loses_least(others: list[Scores]) -> Choice:
    """Returns the setting that loses least on validation rows, as a mean over data sets."""

    def lost(choice: Choice) -> float:
        return fmean(scores[best(scores)][0] - scores[choice][0] for scores in others)

    return min(GRID, key=lost)


def regret(
    *,
    files: str | None = None,
    grid_epsilons: tuple[float, ...] = EPSILONS,
    grid_seeds: int = 1,
    grid_data: tuple[str, ...] = tuple(UNITS),
    written: str | None = None,
) -> Iterator[Row]:
    """Measures what today's rules lose on each data set, and what one rule for all loses."""
    assert files is not None
    of: dict[float, dict[str, Scores]] = {epsilon: {} for epsilon in grid_epsilons}
    for data in grid_data:
        found = DATA[data]
        with found.opened(Path(files), chosen_on=True) as task:
            folder = None if written is None else Path(written) / "grid"
            models, rows = Models(task, grid_seeds, folder), len(task.columns()["label"])
            for epsilon in grid_epsilons:
                of[epsilon][data] = measured(data, found, epsilon, models, rows)
    lost: dict[str, list[float]] = {TODAY: [], LEFT_OUT: [], ALL: []}
    for epsilon, sets in of.items():
        everywhere = loses_least([*sets.values()])
        for data, scores in sets.items():
            place, top = f"{data}, epsilon {epsilon:g}", best(scores)
            without = loses_least([x for name, x in sets.items() if name != data])
            yield figure(f"best of the grid, {_words(top)}, {place}", scores[top][1])
            for rule, choice in ((TODAY, None), (LEFT_OUT, without), (ALL, everywhere)):
                lost[rule].append(scores[top][1] - scores[choice][1])
                words = "" if choice is None else f", {_words(choice)}"
                yield figure(f"lost by {rule}{words}, {place}", lost[rule][-1])
    means = {rule: fmean(each) for rule, each in lost.items()}
    for rule, found_mean in means.items():
        yield figure(f"mean lost by {rule}", found_mean)
    yield figure("the same, each left out / today's", means[LEFT_OUT] / means[TODAY], "x",
                 at_most=0.5)  # fmt: skip


TODAY, LEFT_OUT, ALL = "today's rules", "one rule of the other data sets", "one rule of all"


def _words(choice: Choice) -> str:
    return (
        f"C {choice.clipped:g}, {choice.epochs} epochs, {choice.steps} steps, "
        f"distance {choice.distance:g}"
    )


CASES = cases(regret, needs=("--files",), seconds=1200, asked=True)
