"""Questions at which accountants break: hardly any noise, tiny rates or deltas, many steps.

Each is asked in a process of its own, which gives its CPU time and its peak memory; every bar is
for one of these, or for what the answer must hold: a truth within it, a width, a noise multiplier.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from accounting import (
    BallsAndBinsProfile,
    Bound,
    MultistageProfile,
    PoissonProfile,
    ShuffleProfile,
    TrialCount,
    TruncatedProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
    attack_advantage,
    calibrate,
    calibrate_advantage,
)
from accounting.profile import EPSILON_TOLERANCE, wanted_width
from experiments.benchmarks.rows import Row

MOST_SECONDS = 10.0
MOST_MEMORY = 1024.0
_GIVEN_UP = 120

_NAMES = {
    "B": BallsAndBinsProfile,
    "M": MultistageProfile,
    "P": PoissonProfile,
    "S": ShuffleProfile,
    "T": TruncatedProfile,
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
    "T(P(.5, 1/36000, 36000), 36000, -100)",
)
EPSILONS = (0, 1e-3, 0.1, 0.6125, 3)
MOST_NOTES = 5
MOST_SECONDS_OF_DELTA = 2.0
_LEAST_DELTA = 1e-30

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
    "T(P(51.6, 2.1e-7, 20), 20, -8.308).delta(2570)": 0.00987,
    "max(TrialCount(10, 1e-9).draw() for _ in range(100))": math.inf,
}


class Answer(NamedTuple):
    """What came of a question, or why nothing did, and what that took."""

    value: Any
    failure: str
    seconds: float
    megabytes: float


def ask(question: str) -> Answer:
    """Answers a question in a process of its own; CPU seconds, and peak memory of the process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(question, sender))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = Answer(None, f"no answer in {_GIVEN_UP} s", math.inf, math.nan)
    process.join()
    return answer


def _answer(question: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_GIVEN_UP, _GIVEN_UP))
    begin = time.process_time()
    value, failure = None, ""
    try:
        value = eval(question, dict(_NAMES))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    sender.send(Answer(value, failure, time.process_time() - begin, megabytes))


def _costs(question: str, answer: Answer) -> Iterator[Row]:
    if answer.failure:
        print(f"{question}: {answer.failure}")
    yield Row.at_most(f"CPU time, {question}", answer.seconds, "s", MOST_SECONDS)
    yield Row.at_most(f"peak memory, {question}", answer.megabytes, "MB", MOST_MEMORY)


def examples() -> Iterator[Row]:
    """Yields the rows of all questions by name."""
    for question, truth in TRUTHS.items():
        answer = ask(question)
        yield from _costs(question, answer)
        lower, upper = (answer.value.lower, answer.value.upper) if answer.value else (math.nan,) * 2
        # The truth is known to its printed digits.
        yield Row.at_most(f"lower end, {question}", lower, "", truth * (1 + 1e-6))
        yield Row.at_least(f"upper end, {question}", upper, "", truth * (1 - 1e-6))
    for question in SHARP:
        answer = ask(question)
        yield from _costs(question, answer)
        excess, note = _excess(question, answer.value)
        yield Row.at_most(f"width / asked, {question}{note}", excess, "x", 1.0)
    for question, most in AT_MOST.items():
        answer = ask(question)
        yield from _costs(question, answer)
        value = answer.value.upper if isinstance(answer.value, Bound) else answer.value
        yield Row.at_most(question, math.nan if value is None else value, "", most)


def deltas() -> list[Row]:
    """Asks for delta and for an attack's advantage on a grid, and prints each answer.

    Every one that is not below 1e-30 is to be within 1e-3 of itself, or to say why it is not.
    """
    notes = 0
    seconds: list[float] = []
    widest: list[float] = []
    for profile, epsilon in itertools.product(DELTAS, EPSILONS):
        question = f"{profile}.delta({epsilon})" if epsilon else f"attack_advantage({profile})"
        answer = ask(question)
        print(f"{question}: {answer.value or answer.failure}, {answer.seconds:.2f} s")
        seconds.append(answer.seconds)
        excess, _ = _excess(question, answer.value)
        if answer.value is not None and answer.value.upper < _LEAST_DELTA:
            continue
        noted = answer.value is not None and bool(answer.value.note)
        notes += noted
        if not noted:
            widest.append(excess)
    label = f"of {len(seconds)} deltas"
    return [
        Row.at_most(f"answers with a note {label}", notes, "", MOST_NOTES),
        Row.at_most(f"width / asked, widest without one {label}", max(widest), "x", 1.0),
        Row.at_most(f"CPU time, longest {label}", max(seconds), "s", MOST_SECONDS_OF_DELTA),
    ]


def _excess(question: str, bound: Bound | None) -> tuple[float, str]:
    """Returns by how much an interval is wider than was asked for, 1 if it says why, and the note.

    1e-3 in epsilon (relative to one below 1, and 1e-4 of one above 10), or 1e-3 of a delta.
    """
    if bound is None:
        return math.inf, ""
    wanted = 1e-3 * bound.upper
    if ".epsilon(" in question:
        wanted = wanted_width(EPSILON_TOLERANCE, bound.upper) * max(1.0, 0.1 * bound.lower)
    excess = bound.width / wanted if wanted else 0.0
    shown = f" [{bound.lower:.6g}, {bound.upper:.6g}]"
    return (1.0, f"{shown} ({bound.note})") if bound.note else (excess, shown)


def random_points(count: int) -> list[Row]:
    """Asks about points drawn log-uniformly from all that may be asked."""
    rng = np.random.default_rng(0)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    answers, refused = [], 0
    for i in range(count):
        sigma, delta = between(1e-3, 1e8), between(1e-300, 0.5)
        steps, epochs = round(between(1, 1e7)), round(between(1, 1e4))
        profile = (
            f"B({sigma!r}, {steps}, {epochs})",
            f"S({sigma!r}, {steps}, {epochs})",
            f"P({sigma!r}, {between(1e-9, 1.0)!r}, {steps})",
        )[i % 3]
        question = f"{profile}.epsilon({delta!r})"
        answer = ask(question)
        if answer.failure or answer.seconds > MOST_SECONDS or answer.megabytes > MOST_MEMORY:
            print(f"{question}: {answer}")
        refused += bool(answer.failure)
        answers.append(answer)
    label = f"of {count} random points"
    return [
        Row.at_most(f"refused, {label}", refused / count, "", 0.01),
        Row.at_most(f"CPU time, longest {label}", max(a.seconds for a in answers), "s", 10.0),
        Row.at_most(f"peak memory, largest {label}", max(a.megabytes for a in answers), "MB", 1024),
    ]


def against_dp_accounting(count: int, seconds: Callable[..., tuple[Any, float]]) -> list[Row]:
    """Compares Poisson's upper end and CPU time with dp_accounting's, at its defaults.

    Where our lower end, too, is above its upper one, that is none: it computes without a bound on
    its floating-point error.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    rng = np.random.default_rng(1)
    looser: list[float] = []
    disproved: list[float] = []
    ours_spent = theirs_spent = 0.0
    for _ in range(count):
        sigma, rate, delta = np.exp(rng.uniform(np.log([0.3, 1e-4, 1e-10]), np.log([5, 0.1, 1e-3])))
        steps = int(np.exp(rng.uniform(math.log(100), math.log(2e4))))

        def theirs(sigma=sigma, rate=rate, steps=steps, delta=delta) -> float:
            one = pld.from_gaussian_mechanism(sigma, sampling_prob=rate)
            return one.self_compose(steps).get_epsilon_for_delta(delta)

        def ours(sigma=sigma, rate=rate, steps=steps, delta=delta) -> Bound:
            return PoissonProfile(sigma, rate, steps).epsilon(delta)

        bound, spent = seconds(ours)
        ours_spent += spent
        peer, spent = seconds(theirs)
        theirs_spent += spent
        if bound.lower > peer:
            disproved.append(bound.lower - peer)
        else:
            looser.append(bound.upper - peer)
        if bound.upper > peer:
            print(f"P({sigma!r}, {rate!r}, {steps}).epsilon({delta!r}) = {bound}; {peer}")
    label = f"dp_accounting, {count} random points of Poisson"
    return [
        Row.at_most(f"our upper end - that of {label}", max(looser), "epsilon", 0.0),
        Row(f"points where our lower end is above {label}", len(disproved), ""),
        Row("by at most", max(disproved, default=0.0), "epsilon"),
        Row.at_most(f"our CPU time / that of {label}", ours_spent / theirs_spent, "x", 2.0),
    ]
