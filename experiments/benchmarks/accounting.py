"""Certified accounting against its bars, in CPU time with empty caches.

`advantage`: the noise at which no membership attack has an advantage above 0.1, with T batches in
each of E epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from accounting import BallsAndBinsProfile, attack_advantage, calibrate, calibrate_advantage
from accounting.profiles import bins_grids
from experiments.benchmarks.case import Figure, Spent, figure, figure_at
from samplers import BallsAndBins

DELTA = 2.7e-8
ADVANTAGE = 0.1


def timed(work: Callable[[], Any], rounds: int = 1) -> tuple[Any, list[float]]:
    """Returns a result and the CPU seconds of each round.

    Args:
      work: Function to measure, which starts with empty caches in every round.
      rounds: Number of rounds.

    Returns:
      The first result, and float seconds of the rounds.
    """
    results: list[Any] = []
    spent = []
    for _ in range(rounds):
        for value in vars(bins_grids).values():
            getattr(value, "cache_clear", lambda: None)()
        spent.append(Spent.measure(lambda: results.append(work())).cpu_seconds)
    return results[0], spent


def interval(sigma: float, bar: str, rounds: int = 3) -> Iterator[Figure]:
    """Measures an interval of epsilon and its width."""
    profile = BallsAndBinsProfile(sigma, 36_000)
    bound, spent = timed(functools.partial(profile.epsilon, DELTA), rounds)
    row = figure_at(f"sigma {sigma:g}, T 36000")
    yield row("CPU time, interval", spent, "s", bar)
    yield row("interval's width", bound.width, "epsilon", "<= 1e-3")


def calibration(rounds: int = 3) -> Iterator[Figure]:
    """Measures the calibration of the noise of a run, and of one of three attempts."""
    noise, spent = timed(
        lambda: calibrate(lambda s: BallsAndBinsProfile(s, 36_000), epsilon=5.0, delta=DELTA),
        rounds,
    )
    yield figure("CPU time, calibrate to epsilon 5, T 36000", spent, "s", "<= 10")
    yield figure("noise multiplier found, epsilon 5, T 36000", noise)
    privacy_of = BallsAndBins(62_500, 100, epochs=30).privacy_of
    attempts = [range(6_450), range(6_430, 12_920), range(12_900, 18_750)]
    noise, spent = timed(
        lambda: calibrate(lambda s: privacy_of(s, attempts), epsilon=9.113, delta=1e-5), rounds
    )
    yield figure("CPU time, calibrate three attempts to epsilon 9.113", spent, "s", "<= 2")
    yield figure("noise multiplier found, three attempts, epsilon 9.113", noise)


def advantage(bins: int, epochs: int) -> Iterator[Figure]:
    """Measures the calibration of balls-and-bins to an attack advantage."""
    privacy = functools.partial(BallsAndBinsProfile, bins=bins, epochs=epochs)
    noise, spent = timed(functools.partial(calibrate_advantage, privacy, advantage=ADVANTAGE))
    bound = attack_advantage(privacy(noise))
    row = figure_at(f"advantage {ADVANTAGE:g}, T {bins}, E {epochs}")
    yield row("noise multiplier", noise)
    yield row("CPU time", spent, "s", "<= 15")
    yield row("upper end", bound.upper, "", f"<= {ADVANTAGE}")
    yield row("lower end", bound.lower, "", f">= {ADVANTAGE * (1.0 - 4e-3)}")
