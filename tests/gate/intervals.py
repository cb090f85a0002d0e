"""Certified intervals: each one must meet the frozen one, since both contain the true value.

This holds of truncated batches too, whose price became lower on purpose: sampler and maximum are
the same, and with them the true value, so that old and new ends bound one number.
"""

import importlib
import pkgutil

import accounting
import samplers
from accounting.worst_leaf import worst_leaf
from dpsgd import BandedToeplitz, Mechanism
from dpsgd.core.queries import FullSums
from gate.record import read, write

WIDTHS = {"epsilon": 1e-3, "delta": 1e-6}
"""Relative widths that an interval may always have."""

NAMES = {
    name: value
    for module in pkgutil.walk_packages(accounting.__path__, "accounting.")
    for name, value in vars(importlib.import_module(module.name)).items()
    if name.endswith("Profile")  # wherever it stands
}
NAMES |= {name: getattr(each, name) for each in (accounting, samplers) for name in each.__all__}
NAMES |= {each.__name__: each for each in (BandedToeplitz, FullSums, Mechanism, worst_leaf)}


def ask(make, question, value):
    """Returns the interval of a profile: its epsilon at a delta, or its delta at an epsilon."""
    profile = eval(make, dict(NAMES))
    if question == "epsilon":
        return accounting.epsilon(profile, value)
    return profile.delta(value)


def measure():
    """Asks the questions of the record again, and records the ends of the answers."""
    entries = [question for *question, _, _ in read("intervals")]
    bounds = [ask(*question) for question in entries]
    write("intervals", [[*q, b.lower, b.upper] for q, b in zip(entries, bounds, strict=True)])


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
        elif bound.upper - bound.lower > allowed * 1.001:
            lost.append(f"{told} is wider than the frozen [{lower!r}, {upper!r}]")
    return lost
