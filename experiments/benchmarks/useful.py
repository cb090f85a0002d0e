"""What makes a private model useful to others than its makers, beside its bars.

`models` (20 minutes of CPU time): click models at the defaults of `dpsgd train` on the rows of a
store, to a certified epsilon, calibration included, mean and standard error over seeds, beside ones
without privacy and one that is not calibrated; `--kept-aside 10000` shows rows that are not trained
on alone; `--written FOLDER` keeps what runs gave. `choosing`: the privacy cost of the best of a
random number of runs, 10 on average, at the noise of the defaults for epsilon 3. `advantage`: the
noise at which no membership attack on random allocation has an advantage above 0.1, T batches in
each of E epochs, and how near to the target its certified ends are; CPU time with empty caches.
`logistic`: logistic regression by noised Newton steps and by DP-SGD, at equal epsilon.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from accounting import (
    BallsAndBinsProfile,
    SelectionProfile,
    attack_advantage,
    calibrate_advantage,
)
from accounting import epsilon as epsilon_of
from dpsgd.runs.resolve import resolve
from dpsgd.runs.task import rows_of
from dpsgd.selection.engine import DEFAULT_COUNT
from experiments.benchmarks.accounting import seconds
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.logistic import logistic
from experiments.benchmarks.models import Models, at_defaults, defaults

ADVANTAGE = 0.1
BINS = 100, 1_000, 10_000
EPOCHS = 1, 10, 100
MOST_SECONDS = 15.0
WIDTH = 4e-3
MOST_OVER_ONE_RUN = 1.4675


def advantage(bins: int, epochs: int) -> Iterator[Row]:
    privacy = functools.partial(BallsAndBinsProfile, bins=bins, epochs=epochs)
    noise, spent = seconds(functools.partial(calibrate_advantage, privacy, advantage=ADVANTAGE))
    bound = attack_advantage(privacy(noise))
    row = at(f"advantage {ADVANTAGE:g}, T {bins}, E {epochs}")
    yield row("noise multiplier", noise)
    yield row("CPU time", spent, "s", at_most=MOST_SECONDS)
    yield row("upper end", bound.upper, at_most=ADVANTAGE)
    yield row("lower end", bound.lower, at_least=ADVANTAGE * (1.0 - WIDTH))


def choosing(epsilon: float = 3.0, *, store: str | None = None) -> Iterator[Row]:
    task = Models.of(store).task
    spec = defaults(target_epsilon=epsilon, calibration="none")
    found = resolve(spec, task, rows_of(task))
    run, delta = found.mechanism.privacy(), found.delta
    one, best = (epsilon_of(x, delta).upper for x in (run, SelectionProfile(run, DEFAULT_COUNT)))
    row = at(f"the best of {DEFAULT_COUNT.mean:g} runs on average, epsilon {epsilon:g} each")
    yield row("certified epsilon", best, "epsilon")
    yield row("the same / that of one run", best / one, "x", at_most=MOST_OVER_ONE_RUN)


NEEDS: dict[str, Any] = {"needs": ("--store",)}
CASES = [
    *cases(at_defaults, "models", seconds=1_200, **NEEDS),
    *cases(choosing, **NEEDS),
    *cases(logistic, asked=True, seconds=900, **NEEDS),
    *cases(advantage, over={"bins": BINS, "epochs": EPOCHS}, quick={}, seconds=5),
]
