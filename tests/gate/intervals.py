"""Certified intervals: each one must meet the frozen one, since both contain the true value."""

import math
import random
import time

import accounting
import samplers
from dpsgd import BandedToeplitz, Mechanism
from gate.record import read, write

NUMBER = 300
SECONDS = 1.0
"""Processor seconds of one question, most, when it was frozen."""

WIDTHS = {"epsilon": 1e-3, "delta": 1e-6}
"""Relative widths that an interval may always have."""

NAMES = {
    **vars(accounting),
    **vars(samplers),
    "BandedToeplitz": BandedToeplitz,
    "Mechanism": Mechanism,
}


def _of_profile(draw):
    sigma, steps = draw.uniform(0.5, 3), draw.choice([1, 7, 60, 500])
    rate = 10 ** draw.uniform(-4, -0.7)
    mode = draw.choice(["redrawn", "fixed"])
    sizes, draws = draw.choice([((20, 50), (2, 5)), ((40,), (4,)), ((6, 10, 12), (2, 2, 3))])
    return draw.choice(
        [
            f"GaussianProfile({sigma:.4f})",
            f"PoissonProfile({sigma:.4f}, {rate:.6f}, {steps})",
            f"BallsAndBinsProfile({sigma:.4f}, {draw.choice([2, 9, 60, 700])}, "
            f"{draw.choice([1, 2, 5])}, {mode!r})",
            f"ShuffleProfile({sigma:.4f}, {draw.choice([2, 30, 400])}, {draw.choice([1, 3])})",
            f"UserPoissonProfile({sigma:.4f}, {draw.choice([1, 3, 8])}, {rate:.6f}, {steps})",
            f"MultistageProfile({sigma:.4f}, {steps}, {draws}, {sizes})",
            f"UnitsThenPoissonProfile({sigma:.4f}, {steps}, {draw.uniform(0.02, 0.5):.4f}, "
            f"{draw.uniform(0.05, 0.9):.4f})",
            f"SelectionProfile(PoissonProfile({sigma:.4f}, {rate:.6f}, {steps}), "
            f"TrialCount({draw.uniform(2, 50):.3f}, {draw.choice([0.0, 0.5, 1.0])}))",
        ]
    )


def _of_sampler(draw):
    size = draw.choice([100, 400, 1000])
    count, epochs = size * draw.choice([8, 37, 250]), draw.choice([1, 3])
    kind = draw.choice(["Poisson", "BallsAndBins", "Shuffle", "Deterministic", "UserPoisson"])
    more, noise = "", ""
    if kind in ("Poisson", "BallsAndBins", "UserPoisson"):
        more = draw.choice(
            ['overflow="accumulate"', f"max_batch_size={math.ceil(size + 7 * size**0.5)}"]
        )
        more = f", {more}"
        if kind != "UserPoisson" and draw.random() < 0.4:
            more += ", cycle_length=4"
            noise = draw.choice(["", ", noise=BandedToeplitz((1.0, 0.5, 0.375, 0.3125))"])
    more += ", max_contributions=3" if kind == "UserPoisson" else ""
    sampler = f"{kind}({count}, batch_size={size}, epochs={epochs}{more})"
    return f"Mechanism({sampler}, {draw.uniform(0.6, 2):.4f}, 1.0{noise}).privacy()"


def ask(make, question, value):
    """Returns the interval of a profile: its epsilon at a delta, or its delta at an epsilon."""
    profile = eval(make, dict(NAMES))
    if question == "epsilon":
        return accounting.epsilon(profile, value)
    return profile.delta(value)


def measure():
    """Records intervals of profiles, samplers and mechanisms drawn with a fixed seed."""
    draw, entries = random.Random(42), []
    while len(entries) < NUMBER:
        make = (_of_sampler if len(entries) % 3 == 2 else _of_profile)(draw)
        question = draw.choice(["epsilon", "epsilon", "delta"])
        value = draw.choice([1e-4, 1e-5, 1e-7, 3e-9] if question == "epsilon" else [0.0, 0.5, 2.0])
        start = time.process_time()
        bound = ask(make, question, value)
        if time.process_time() - start < SECONDS and 1e-12 < bound.upper < math.inf:
            entries.append([make, question, value, bound.lower, bound.upper])
    write("intervals", entries)


def check(every=1):
    """Returns a line for each interval that misses the frozen one, or is wider.

    Args:
      every: 1 for all intervals, k for each k-th.
    """
    lost = []
    for make, question, value, lower, upper in read("intervals")[::every]:
        bound = ask(make, question, value)
        allowed = max(upper - lower, WIDTHS[question] * upper)
        told = f"intervals: {question}({value:g}) of {make}: [{bound.lower!r}, {bound.upper!r}]"
        if not (bound.lower <= upper and lower <= bound.upper):
            lost.append(f"{told} misses the frozen [{lower!r}, {upper!r}]")
        elif bound.upper - bound.lower > allowed * (1 + 1e-6):
            lost.append(f"{told} is wider than the frozen [{lower!r}, {upper!r}]")
    return lost
