"""What makes a private model useful to others than its makers, beside its bars.

    scripts/bench useful --store STORE --json useful.json       (20 minutes of CPU time)
    scripts/bench useful --store STORE --kept-aside 10000       (rows that nobody tuned on)
    scripts/bench useful                                        (what needs no rows)

Click models at the defaults of `dpsgd train`, trained on the rows of STORE to a certified epsilon,
calibration included: a seed of the initial parameters each, mean and standard error on test rows,
beside models without privacy of the same code, and beside a private one that is not calibrated.
`--written FOLDER` keeps what each run gave: the runs that are there are not made again.

The privacy cost of choosing: the best of a random number of runs, 10 on average, of which nothing
else is released, at the noise of the defaults for epsilon 3.

The noise at which no membership attack has an advantage above 0.1 against random allocation
(balls-and-bins), T batches in each of E epochs: nine cells, in CPU time with empty caches, and how
near to the target both certified ends of the advantage are at the noise that was found.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from accounting import (
    BallsAndBinsProfile,
    SelectionProfile,
    attack_advantage,
    calibrate_advantage,
)
from accounting import epsilon as price
from dpsgd.runs.job import rows_of
from dpsgd.runs.resolve import resolve
from dpsgd.selection.engine import DEFAULT_COUNT
from experiments.benchmarks import click_models
from experiments.benchmarks.accounting import seconds
from experiments.benchmarks.rows import Row, options_of, positive, report
from experiments.tasks.clicks.task import Clicks

ADVANTAGE = 0.1
BINS = 100, 1_000, 10_000
EPOCHS = 1, 10, 100
MOST_SECONDS = 15.0
WIDTH = 4e-3
CHOSEN_AT = 3.0
MOST_OVER_ONE_RUN = 1.4675


def advantages(bins: tuple[int, ...], epochs: tuple[int, ...]) -> Iterator[Row]:
    """Yields the rows of each cell."""
    for count, passes in itertools.product(bins, epochs):
        privacy = functools.partial(BallsAndBinsProfile, bins=count, epochs=passes)
        find = functools.partial(calibrate_advantage, privacy, advantage=ADVANTAGE)
        noise, spent = seconds(find)
        bound = attack_advantage(privacy(noise))
        at = f"advantage {ADVANTAGE:g}, T {count}, E {passes}"
        yield Row(f"noise multiplier, {at}", noise, "")
        yield Row.at_most(f"CPU time, {at}", spent, "s", MOST_SECONDS)
        yield Row.at_most(f"upper end, {at}", bound.upper, "", ADVANTAGE)
        yield Row.at_least(f"lower end, {at}", bound.lower, "", ADVANTAGE * (1.0 - WIDTH))


def cost_of_choosing(task: Clicks, epsilon: float) -> Iterator[Row]:
    """Yields the rows of the best of a random number of runs at the defaults for `epsilon`."""
    spec = click_models.defaults(target_epsilon=epsilon, calibration="none")
    found = resolve(spec, task, rows_of(task))
    run, delta = found.mechanism.privacy(), found.delta
    one, best = (price(x, delta).upper for x in (run, SelectionProfile(run, DEFAULT_COUNT)))
    at = f"the best of {DEFAULT_COUNT.mean:g} runs on average, epsilon {epsilon:g} each"
    yield Row(f"certified epsilon, {at}", best, "epsilon")
    yield Row.at_most(f"the same / that of one run, {at}", best / one, "x", MOST_OVER_ONE_RUN)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("useful", __doc__, quick="one cell")
    parser.add_argument("--store", type=Path, help="prepared rows, see `dpsgd prepare`")
    parser.add_argument("--seeds", type=positive, default=10, help="runs of each kind")
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=list(click_models.BARS), metavar="EPSILON"
    )
    parser.add_argument(
        "--kept-aside",
        type=positive,
        default=0,
        metavar="ROWS",
        help="train on all but so many training rows, and show these alone",
    )
    parser.add_argument(
        "--written", type=Path, metavar="FOLDER", help="keep what each run gave, to go on later"
    )
    options = parser.parse_args(argv)
    found: list[Row] = []
    if options.store is not None:
        task = click_models.FewerRows(options.store, kept_aside=options.kept_aside)
        models = click_models.Models(task, options.seeds, options.written)
        found += click_models.rows(models, options.epsilons)
    if options.store is not None and not options.kept_aside:
        found += cost_of_choosing(task, CHOSEN_AT)
    if not options.kept_aside:
        found += advantages(*((BINS[:1], EPOCHS[:1]) if options.quick else (BINS, EPOCHS)))
    return report(found, options.json)


if __name__ == "__main__":
    sys.exit(main())
