"""Certified accounting against its bars, in CPU time with empty caches.

`advantage`: the noise at which no membership attack has an advantage above 0.1, T batches in each
of E epochs, and how near to the target its certified ends are.

`hard`, asked for by -k: what accountants break at: hardly any noise, tiny rates or deltas, many
steps; a process a question, bars for its CPU time, its memory and what the answer must hold.
`hard, dp_accounting` counts where our lower end disproves its upper one, computed without a bound.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from accounting import (
    BallsAndBinsProfile,
    Bound,
    MultistageProfile,
    PoissonProfile,
    ShuffleProfile,
    TrialCount,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
    attack_advantage,
    calibrate,
    calibrate_advantage,
)
from accounting.profile import EPSILON_TOLERANCE, wanted_width
from accounting.profiles import balls_and_bins, shuffle
from accounting.profiles.truncation import Cap, truncated_bins
from experiments.benchmarks.case import Estimate, Row, at, cases, figure
from experiments.benchmarks.timing import Alone, Spent, alone

DELTA = 2.7e-8
ADVANTAGE = 0.1


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result and the CPU seconds of `work`, with the accountants' caches emptied."""
    for module in (balls_and_bins, shuffle):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    found: list[Any] = []
    spent = Spent.on(lambda: found.append(work()))
    return found[0], spent.cpu_seconds


def _repeated(work: Callable[[], Any], rounds: int) -> tuple[Any, Estimate]:
    """Returns a result and the median CPU seconds."""
    runs = [seconds(work) for _ in range(rounds)]
    return runs[0][0], Estimate.median([spent for _, spent in runs])


def interval(sigma: float, bar: float, *, rounds: int = 3) -> Iterator[Row]:
    profile = BallsAndBinsProfile(sigma, 36_000)
    bound, spent = _repeated(functools.partial(profile.epsilon, DELTA), rounds)
    row = at(f"sigma {sigma:g}, T 36000")
    yield row("CPU time, interval", spent, "s", at_most=bar)
    yield row("interval's width", bound.width, "epsilon", at_most=1e-3)


def calibration(*, rounds: int = 3) -> Iterator[Row]:
    noise, spent = _repeated(
        lambda: calibrate(lambda s: BallsAndBinsProfile(s, 36_000), epsilon=5.0, delta=DELTA),
        rounds,
    )
    yield figure("CPU time, calibrate to epsilon 5, T 36000", spent, "s", at_most=10.0)
    yield figure("noise multiplier found, epsilon 5, T 36000", noise)


def advantage(bins: int, epochs: int) -> Iterator[Row]:
    """Calibrates random allocation to an attack advantage of at most 0.1."""
    privacy = functools.partial(BallsAndBinsProfile, bins=bins, epochs=epochs)
    noise, spent = seconds(functools.partial(calibrate_advantage, privacy, advantage=ADVANTAGE))
    bound = attack_advantage(privacy(noise))
    row = at(f"advantage {ADVANTAGE:g}, T {bins}, E {epochs}")
    yield row("noise multiplier", noise)
    yield row("CPU time", spent, "s", at_most=15.0)
    yield row("upper end", bound.upper, at_most=ADVANTAGE)
    yield row("lower end", bound.lower, at_least=ADVANTAGE * (1.0 - 4e-3))


# --------------------------------------------------------------------------------- hard questions

MOST_MEMORY = 1024.0
START = "forkserver"
"""How a process is started that answers a question: with the accountants imported."""
GIVEN_UP = 120
"""CPU seconds."""
NAMES = {
    "B": BallsAndBinsProfile,
    "M": MultistageProfile,
    "P": PoissonProfile,
    "S": ShuffleProfile,
    "T": truncated_bins,
    "Cap": Cap,
    "U": UserPoissonProfile,
    "V": UnitsThenPoissonProfile,
    "TrialCount": TrialCount,
    "attack_advantage": attack_advantage,
    "calibrate": calibrate,
    "calibrate_advantage": calibrate_advantage,
}

# Questions whose answer is known from elsewhere: quadrature and 40-digit arithmetic at two bins.
TRUTHS = {
    "B(.055, 2).epsilon(1e-18)": 323.00365,
    "B(.06, 2).epsilon(1e-22)": 299.77180,
    "B(.05, 2).delta(330)": 2.386245e-11,
}

# Questions whose answer must be as sharp as asked for, or say why it is not.
SHARP = (
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
)

# Settings of which delta is asked at each of `EPSILONS`, at 0 as an attack's advantage.
EPSILONS = (0, 1e-3, 0.1, 0.6125, 3)
DELTAS = (
    *(
        f"P({sigma}, {rate_and_steps})"
        for sigma in (0.3, 0.45, 0.5, 0.6, 1, 2, 5, 20)
        for rate_and_steps in ("1/36000, 36000", "1e-3, 1000", ".01, 1000", ".2, 50")
    ),
    "B(.5, 36000)",
    "B(1, 1000)",
    "B(.8, 100, 5)",
    "B(2, 50, 10)",
    "U(2, 100, .01, 5)",
    "U(1, 1000, 1e-3, 3)",
    "P(.5, 1/36000, 36000, 2)",
    "T(B(.5, 36000), Cap(36_864_000, 1/36000, 1400))",
)
LEAST_DELTA = 1e-30
"""An answer below it need not be sharp."""

# Questions whose upper end, or noise multiplier, must not be above this.
AT_MOST = {
    "V(1, 1000, 1., 1e-4).epsilon(1e-12)": 0.1,
    "V(1, 1000, 1., 3e-5).epsilon(1e-6)": 0.004,
    "M(1, 10**7, (1,), (10**6,)).epsilon(1e-6)": 0.2,
    "calibrate(lambda s: B(s, 1000, 10), epsilon=1e-3, delta=1e-12)": 541.5 * 1.001,
    "calibrate(lambda s: B(s, 1000, 10), epsilon=.01, delta=1e-8)": 41.26 * 1.001,
    "calibrate(lambda s: P(s, 1e-3, 10**4), epsilon=.01, delta=1e-8)": 41.28 * 1.001,
    "calibrate(lambda s: P(s, .01, 1000), epsilon=1e-6, delta=1e-9)": 8e5,
    "calibrate(lambda s: P(s, .1, 10**6), epsilon=1, delta=1e-6)": 1000.0,
    "calibrate(lambda s: B(s, 565, 100), epsilon=8, delta=2.7e-8)": 1.0,
    "calibrate(lambda s: B(s, 565, 300), epsilon=8, delta=2.7e-8)": 2.0,
    "attack_advantage(P(.5, 1/36000, 36000))": 0.01445,
    "calibrate_advantage(lambda s: P(s, 1/36000, 36000), advantage=.1)": 0.31468 * 1.001,
    "T(B(.6, 4517), Cap(37_000_000, 1/4517, 8735)).epsilon(2.7e-8)": 1.785,
    "max(TrialCount(10, 1e-9).draw() for _ in range(100))": math.inf,
}


QUESTIONS: dict[str, Iterable[str]] = {
    "truths": TRUTHS,
    "sharp": SHARP,
    "at most": AT_MOST,
    "deltas": [
        f"{profile}.delta({epsilon})" if epsilon else f"attack_advantage({profile})"
        for profile, epsilon in itertools.product(DELTAS, EPSILONS)
    ],
}
MOST_SECONDS = {"deltas": 2.0}
MOST_NOTES = {"deltas": 5}
"""By kind: for a question, and how many answers may say why they are not sharp."""


def random_points(points: int) -> Iterator[str]:
    """Yields questions about points drawn log-uniformly from all that may be asked."""
    rng = np.random.default_rng(0)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    for i in range(points):
        sigma, delta = between(1e-3, 1e8), between(1e-300, 0.5)
        steps, epochs = round(between(1, 1e7)), round(between(1, 1e4))
        profile = (
            f"B({sigma!r}, {steps}, {epochs})",
            f"S({sigma!r}, {steps}, {epochs})",
            f"P({sigma!r}, {between(1e-9, 1.0)!r}, {steps})",
        )[i % 3]
        yield f"{profile}.epsilon({delta!r})"


def ask(question: str) -> Alone:
    """Answers a question in a process of its own."""
    multiprocessing.set_forkserver_preload([__name__])
    return alone(_answer, question, start=START, most_seconds=GIVEN_UP)


def _answer(question: str) -> Any:
    return eval(question, dict(NAMES))


def hard(kind: str, *, points: int = 1000) -> Iterator[Row]:
    """Asks the questions of a kind, and prints each answer."""
    drawn, notes = kind == "random points", 0
    answers: list[Alone] = []
    for question in random_points(points) if drawn else QUESTIONS[kind]:
        answer = ask(question)
        found = answer.value
        print(f"{question}: {answer.failure or found}, {answer.cpu_seconds:.2f} s")
        answers.append(answer)
        notes += isinstance(found, Bound) and bool(found.note)
        if question in TRUTHS:  # known to its printed digits
            lower, upper = (found.lower, found.upper) if found else (math.nan,) * 2
            truth = TRUTHS[question]
            yield figure(f"lower end, {question}", lower, at_most=truth * (1 + 1e-6))
            yield figure(f"upper end, {question}", upper, at_least=truth * (1 - 1e-6))
        elif question in AT_MOST:
            value = found.upper if isinstance(found, Bound) else found
            yield figure(question, math.nan if value is None else value, at_most=AT_MOST[question])
        elif not drawn and (found is None or found.upper >= LEAST_DELTA):
            yield figure(f"width / asked, {question}", _excess(question, found), "x", at_most=1.0)
    label, refused = f"of {len(answers)} {kind}", sum(bool(one.failure) for one in answers)
    longest = max(one.cpu_seconds for one in answers)
    largest = max(one.gigabytes for one in answers) * 1e9 / 2**20
    yield figure(f"refused, {label}", refused / len(answers), at_most=0.01)
    yield figure(f"answers with a note {label}", notes, at_most=MOST_NOTES.get(kind))
    yield figure(f"CPU time, longest {label}", longest, "s", at_most=MOST_SECONDS.get(kind, 10.0))
    yield figure(f"peak memory, largest {label}", largest, "MB", at_most=MOST_MEMORY)


def _excess(question: str, bound: Bound | None) -> float:
    """Returns by how much an interval is wider than was asked for, 1 if it says why.

    1e-3 in epsilon (relative to one below 1, and 1e-4 of one above 10), or 1e-3 of a delta.
    """
    if bound is None or bound.note:
        return math.inf if bound is None else 1.0
    wanted = 1e-3 * bound.upper
    if ".epsilon(" in question:
        wanted = wanted_width(EPSILON_TOLERANCE, bound.upper) * max(1.0, 0.1 * bound.lower)
    return bound.width / wanted if wanted else 0.0


def against_dp_accounting(*, points: int = 200) -> Iterator[Row]:
    from dp_accounting.pld import privacy_loss_distribution as pld

    rng = np.random.default_rng(1)
    looser: list[float] = []
    disproved: list[float] = []
    ours_spent = theirs_spent = 0.0
    for _ in range(points):
        sigma, rate, delta = np.exp(rng.uniform(np.log([0.3, 1e-4, 1e-10]), np.log([5, 0.1, 1e-3])))
        steps = int(np.exp(rng.uniform(math.log(100), math.log(2e4))))

        def theirs(sigma=sigma, rate=rate, steps=steps, delta=delta) -> float:
            one = pld.from_gaussian_mechanism(sigma, sampling_prob=rate)
            return one.self_compose(steps).get_epsilon_for_delta(delta)

        profile = PoissonProfile(sigma, rate, steps)
        bound, spent = seconds(functools.partial(profile.epsilon, delta))
        ours_spent += spent
        peer, spent = seconds(theirs)
        theirs_spent += spent
        if bound.lower > peer:
            disproved.append(bound.lower - peer)
        else:
            looser.append(bound.upper - peer)
        if bound.upper > peer:
            print(f"P({sigma!r}, {rate!r}, {steps}).epsilon({delta!r}) = {bound}; {peer}")
    label = f"dp_accounting, {points} random points of Poisson"
    yield figure(f"our upper end - that of {label}", max(looser), "epsilon", at_most=0.0)
    yield figure(f"points where our lower end is above {label}", len(disproved))
    yield figure("by at most", max(disproved, default=0.0), "epsilon")
    yield figure(f"our CPU time / that of {label}", ours_spent / theirs_spent, "x", at_most=2.0)


INTERVALS = {"sigma, bar": ((0.5, 1.5), (0.1, 20.0))}
CELLS = {"bins": (100, 1_000, 10_000), "epochs": (1, 10, 100)}
HARD: dict[str, Any] = {"asked": True, "seconds": 300}
CASES = [
    *cases(interval, over=INTERVALS, quick={"rounds": 1}, all_quick=True, exact=True),
    *cases(calibration, quick={"rounds": 1}, exact=True),
    *cases(advantage, over=CELLS, quick={}, seconds=5),
    *cases(hard, over={"kind": (*QUESTIONS, "random points")}, **HARD),
    *cases(against_dp_accounting, "hard, dp_accounting", needs=("dp_accounting",), **HARD),
]
