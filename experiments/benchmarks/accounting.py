"""Certified accounting against its bars, in CPU time with empty caches.

`advantage`: the noise at which no membership attack has an advantage above 0.1, with T batches in
each of E epochs. `hard`: questions at which accountants break, such as hardly any noise, tiny rates
or deltas, and many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import accounting
from accounting import (
    BallsAndBinsProfile,
    MultistageProfile,
    PoissonProfile,
    ShuffleProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
    attack_advantage,
    calibrate,
    calibrate_advantage,
)
from accounting.profiles import bins_grids, shuffle
from accounting.profiles.truncation import Cap, truncated_profile
from experiments.benchmarks.case import Figure, Spent, figure, figure_at, peak_bytes
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
        for value in (*vars(bins_grids).values(), *vars(shuffle).values()):
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


# --------------------------------------------------------------------------------- hard questions

NAMES = {name: getattr(accounting, name) for name in accounting.__all__} | {
    "B": BallsAndBinsProfile,
    "M": MultistageProfile,
    "P": PoissonProfile,
    "S": ShuffleProfile,
    "T": truncated_profile,
    "Cap": Cap,
    "U": UserPoissonProfile,
    "V": UnitsThenPoissonProfile,
}
"""Names in the questions."""

QUESTIONS = (
    "P(.3, .1, 10**4).epsilon(1e-6)",
    "P(.3, .01, 10**5).epsilon(1e-6)",
    "P(.3, 1e-3, 10**6).epsilon(1e-6)",
    "P(.5, .1, 10**5).epsilon(1e-6)",
    "P(.5, .01, 10**6).epsilon(1e-6)",
    "P(.7, .1, 10**6).epsilon(1e-6)",
    "P(1, .1, 10**6).epsilon(1e-6)",
    "P(1, .1, 10**7).epsilon(1e-6)",
    "U(.5, 8500, .0064, 1).epsilon(7.7e-8)",
    "U(1., 1000, 1e-4, 1).epsilon(1e-12)",
    "U(1., 1000, 1e-4, 1).epsilon(1e-20)",
    "M(1., 1000, (1,), (100,)).epsilon(1e-300)",
    "V(.5, 10000, .1, .1).epsilon(1e-6)",
    "V(.5, 10000, .1, .1, siblings=200).epsilon(1e-6)",
    "M(1, 1000, (1, 5), (100, 10)).delta(3)",
    "M(.6, 5000, (1,), (200,)).epsilon(1e-8)",
    "S(1e-3, 1000, 2).epsilon(1e-6)",
    "P(.502, .0064, 8583).epsilon(7.7e-8)",
    "B(1e8, 2).epsilon(1e-5)",
    "B(1e8, 1000).epsilon(1e-5)",
    "B(.05, 10**7).epsilon(1e-5)",
    "S(1, 1000, 10**4).epsilon(1e-5)",
    "S(.1, 1000, 10).epsilon(1e-5)",
    "B(.3, 1000, 10**4).epsilon(1e-5)",
    "P(1, 1e-4, 1000).delta(8)",
    "P(.02, 1e-4, 100).epsilon(1e-5)",
    "P(.02, .01, 10**4).epsilon(1e-5)",
    "P(.05, .3, 100).epsilon(1e-5)",
    "U(.37, 29988, 2.13e-9, 20).epsilon(2.4e-14)",
    "P(8.7327, .00533, 3).delta(.0100206)",
    "P(.98, 9.4e-6, 954).delta(.0955)",
    "B(.089, 3, 801).epsilon(2e-184)",
    "B(2.5, 1101137, 3351).epsilon(7e-220)",
    "V(1, 1000, 1., 1e-4).epsilon(1e-12)",
    "V(1, 1000, 1., 3e-5).epsilon(1e-6)",
    "M(1, 10**7, (1,), (10**6,)).epsilon(1e-6)",
    "calibrate(lambda s: B(s, 1000, 10), epsilon=1e-3, delta=1e-12)",
    "calibrate(lambda s: B(s, 1000, 10), epsilon=.01, delta=1e-8)",
    "calibrate(lambda s: P(s, 1e-3, 10**4), epsilon=.01, delta=1e-8)",
    "calibrate(lambda s: P(s, .01, 1000), epsilon=1e-6, delta=1e-9)",
    "calibrate(lambda s: P(s, .1, 10**6), epsilon=1, delta=1e-6)",
    "calibrate(lambda s: B(s, 565, 100), epsilon=8, delta=2.7e-8)",
    "calibrate(lambda s: B(s, 565, 300), epsilon=8, delta=2.7e-8)",
    "attack_advantage(P(.5, 1/36000, 36000))",
    "calibrate_advantage(lambda s: P(s, 1/36000, 36000), advantage=.1)",
    "T(B(.6, 4517), Cap(37_000_000, 1/4517, 8735)).epsilon(2.7e-8)",
    "max(TrialCount(10, 1e-9).draw() for _ in range(100))",
)


def hard() -> Iterator[Figure]:
    """Measures the answers to hard questions, and prints each."""
    longest, refused = 0.0, 0
    for question in QUESTIONS:
        try:
            answer, (seconds,) = timed(functools.partial(eval, question, NAMES))
        except ArithmeticError as error:
            answer, seconds, refused = error, 0.0, refused + 1
        longest = max(longest, seconds)
        print(f"{question}: {answer}, {seconds:.2f} s", flush=True)
    row = figure_at(f"of {len(QUESTIONS)} hard questions")
    yield row("refused", refused, bar="<= 0")
    yield row("CPU time, longest", longest, "s", "<= 10")
    yield row("memory, largest so far", peak_bytes() / 1e9, "GB", "<= 1.07")
