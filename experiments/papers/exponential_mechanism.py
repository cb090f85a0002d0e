"""The exponential mechanism over a finite list, drawn exactly: no floating point, no logarithm.

See docs/explanation/learning-from-a-finite-class.md.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction


def exponential_mechanism(
    costs: Sequence[int | Fraction],
    *,
    epsilon: float | Fraction,
    sensitivity: int,
    one_sided: bool = False,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    r"""Draws the index i of a candidate with pure epsilon-DP.

    .. math:: P(i) \propto e^{-\lambda c_i}, \quad \lambda = \epsilon / (2 \Delta),
        \text{ or } \epsilon / \Delta \text{ if the costs are one-sided}

    with c = `costs` and Delta = `sensitivity`. Each cost differs by at most Delta between
    neighbouring data sets. Costs are one-sided if one of the two data sets has all costs at least
    as large as the other: each unit adds a cost in [0, Delta], and its neighbour adds 0. The
    distribution is exact: a uniform candidate is accepted by a Bernoulli of rational exponent.

    Source: McSherry, Talwar, "Mechanism Design via Differential Privacy", FOCS 2007; Canonne,
    Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Algorithm 1
    (the exact Bernoulli).

    Args:
      costs: Cost c_i of each candidate; the candidates are public.
      epsilon: Privacy cost of this release, > 0.
      sensitivity: Largest difference Delta >= 1 of a cost between neighbours.
      one_sided: Whether costs are one-sided.
      randbelow: Uniform integers below its argument, from a secret source.

    Raises:
      ValueError: If there are no candidates, or `epsilon` or `sensitivity` is out of range.
    """
    if not costs:
        raise ValueError("the exponential mechanism needs at least one candidate")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")
    if sensitivity < 1:
        raise ValueError(f"sensitivity must be at least 1, got {sensitivity}")
    rate, least = Fraction(epsilon) / (sensitivity * (1 if one_sided else 2)), min(costs)
    while True:
        candidate = randbelow(len(costs))
        if _bernoulli_exp(rate * (costs[candidate] - least), randbelow):
            return candidate


def _bernoulli_exp(exponent: Fraction, randbelow: Callable[[int], int]) -> bool:
    """Returns True with probability exp(-`exponent`), exactly; `exponent` >= 0."""
    while exponent > 1:
        if not _bernoulli_exp(Fraction(1), randbelow):
            return False
        exponent -= 1
    # P(stop at the k-th) makes an alternating series: odd stops have probability e^-x in all.
    k = 1
    while randbelow(exponent.denominator * k) < exponent.numerator:
        k += 1
    return k % 2 == 1
