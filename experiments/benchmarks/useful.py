"""What makes a private model useful to others than its makers, beside its bars.

    scripts/bench useful --json useful.json

The noise at which no membership attack has an advantage above 0.1 against random allocation
(balls-and-bins), T batches in each of E epochs: nine cells, in CPU time with empty caches, and how
near to the target both certified ends of the advantage are at the noise that was found.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator

from accounting import BallsAndBinsProfile, attack_advantage, calibrate_advantage
from experiments.benchmarks.accounting import seconds
from experiments.benchmarks.rows import Row, options_of, report

ADVANTAGE = 0.1
BINS = 100, 1_000, 10_000
EPOCHS = 1, 10, 100
MOST_SECONDS = 15.0
WIDTH = 4e-3


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


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    options = options_of("useful", __doc__, quick="one cell").parse_args(argv)
    cells = (BINS[:1], EPOCHS[:1]) if options.quick else (BINS, EPOCHS)
    return report(list(advantages(*cells)), options.json)


if __name__ == "__main__":
    sys.exit(main())
