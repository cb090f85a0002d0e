"""Upper confidence bounds on expectations, from samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from accounting.algebra.cells import Array
from accounting.checks import check_count

TOO_FEW = "too few samples for so small a delta"
Inequality = Literal["chernoff-hoeffding", "bennett"]


def kl_upper_bound(mean: float, num_samples: int, beta: float) -> float:
    """Bounds the expectation of a [0, 1] variable, by KL divergence.

    The upper confidence bound is the smallest p >= q with KL(Bernoulli(q) || Bernoulli(p)) >=
    log(1/β)/m, or 1.

    Args:
      mean: q, the sample mean, in [0, 1].
      num_samples: m, the number of independent samples.
      beta: β, the probability in (0, 1) with which the bound may fail.

    Source: Chua et al., arXiv:2412.16802, Algorithm 4.

    >>> kl_upper_bound(0.0, 1000, 1e-3) == -math.expm1(math.log(1e-3) / 1000)
    True
    """
    if not 0.0 <= mean <= 1.0:
        raise ValueError(f"mean must be in [0, 1], got {mean}")
    budget = _budget(num_samples, beta)
    if mean == 0.0:
        return -math.expm1(-budget)
    if mean == 1.0:
        return 1.0

    def divergence(p: float) -> float:
        excess = p - mean
        # log(q/p), to all digits where they are near each other and where q is almost 0.
        ratio = math.log1p(-excess / p) if excess < 0.5 * p else math.log(mean / p)
        return mean * ratio + (1 - mean) * math.log1p(excess / (1 - p))

    # Pinsker: KL >= 2 (p - q)^2, so the solution is at most q + sqrt(budget / 2).
    return _solution(divergence, budget, mean, min(1.0, mean + math.sqrt(budget / 2)))


def bennett_upper_bound(mean: float, second_moment: float, num_samples: int, beta: float) -> float:
    """Bounds the expectation of a [0, 1] variable, by Bennett's inequality.

    The upper confidence bound is the smallest p >= q with v h((p - q)/v) >= log(1/β)/m, v = s - p²
    > 0, or √s, for h(u) = (1 + u) log(1 + u) - u. It grows with q and with s.

    Args:
      mean: q, the sample mean, in [0, 1].
      second_moment: s, an upper bound on the expectation of the variable's square: known
        beforehand, or with a failure probability that is counted beside β.
      num_samples: m, the number of independent samples.
      beta: β, the probability in (0, 1) with which the bound may fail.

    Source: G. Bennett, "Probability Inequalities for the Sum of Independent Random Variables", JASA
    57 (1962); docs/explanation/monte-carlo-estimates.md.
    """
    if not (mean >= 0.0 and mean * mean <= second_moment <= 1.0):
        raise ValueError(
            f"0 <= mean² <= second_moment <= 1 must hold, got {mean} and {second_moment}"
        )

    def exponent(p: float) -> float:
        variance = second_moment - p * p
        u = (p - mean) / variance if variance > 0.0 else math.inf
        # (1 + u) log(1 + u) - u, whose terms cancel at a small u.
        h = 0.5 * u * u * (1.0 - u / 3.0) if u < 1e-4 else (1.0 + u) * math.log1p(u) - u
        return math.inf if u == math.inf else variance * h

    return _solution(exponent, _budget(num_samples, beta), mean, math.sqrt(second_moment))


def _budget(num_samples: int, beta: float) -> float:
    check_count("num_samples", num_samples)
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be in (0, 1), got {beta}")
    return -math.log(beta) / num_samples


def _solution(rising: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """Returns the least x in [low, high], up to rounding, with rising(x) >= budget."""
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if rising(middle) >= budget else (middle, high)
    return high


def mean_upper_bound(
    samples: Array, beta: float, inequality: Inequality = "chernoff-hoeffding"
) -> float:
    """Bounds the expectation of samples in [0, 1] from above.

    "chernoff-hoeffding" is `kl_upper_bound`. "bennett" spends half of β on such a bound on the
    second moment, and half on `bennett_upper_bound` by it. Both grow with every sample.

    >>> half = np.full(10_000, 0.5)
    >>> mean_upper_bound(half, 1e-3), mean_upper_bound(half, 1e-3, "bennett")
    (0.5185..., 0.5046...)

    Args:
      samples: Independent samples in [0, 1]: float64[m].
      beta: β, the probability in (0, 1) with which the bound may fail.
      inequality: Inequality of the bound, chosen before samples are seen.
    """
    mean = min(float(np.mean(samples)), 1.0)
    if inequality == "chernoff-hoeffding":
        return kl_upper_bound(mean, samples.size, beta)
    moment = kl_upper_bound(min(float(np.mean(samples**2)), 1.0), samples.size, 0.5 * beta)
    return bennett_upper_bound(mean, moment, samples.size, 0.5 * beta)


def hockey_stick_upper_bound(
    losses: Array,
    epsilon: float,
    *,
    beta: float,
    event_probability: float = 1.0,
    inequality: Inequality = "chernoff-hoeffding",
) -> float:
    """Bounds H_ε from above, by sampled losses or their bounds.

    Args:
      losses: Independent samples [m], drawn given an event outside which the loss is at most
        `epsilon`.
      epsilon: ε of the divergence.
      beta: β, the probability in (0, 1) with which the bound may fail.
      event_probability: Probability of that event; 1 for samples without condition.
      inequality: Inequality of `mean_upper_bound`, chosen before samples are seen.

    Source: Chua et al., arXiv:2412.16802, Algorithms 4 and 5.
    """
    bound = mean_upper_bound(hockey_stick_values(losses, epsilon), beta, inequality)
    # A probability that underflows is still not zero.
    return max(event_probability * bound, float(np.finfo(np.float64).tiny))


def hockey_stick_values(losses: Array, epsilon: float) -> Array:
    """Returns (1 - e^(ε - L))_+ of each loss, H_ε on average.

    Args:
      losses: Privacy losses L: float64[m].
      epsilon: ε of the divergence.
    """
    return -np.expm1(np.minimum(epsilon - losses, 0.0))
