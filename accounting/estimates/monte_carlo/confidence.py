"""Upper confidence bounds on what samples estimate."""

from __future__ import annotations

import math

import numpy as np

from accounting.algebra.cells import Array
from accounting.profile import check_count


def kl_upper_bound(mean: float, num_samples: int, beta: float) -> float:
    """Returns an upper confidence bound on the expectation of a variable with values in [0, 1].

    The smallest p >= q with KL(Bernoulli(q) || Bernoulli(p)) >= log(1/β)/m, or 1.

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
    check_count("num_samples", num_samples)
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be in (0, 1), got {beta}")
    budget = -math.log(beta) / num_samples
    if mean == 0.0:
        return -math.expm1(-budget)
    if mean == 1.0:
        return 1.0
    # Pinsker: KL >= 2 (p - q)^2, so the solution is at most q + sqrt(budget / 2).
    low, high = mean, min(1.0, mean + math.sqrt(budget / 2))
    while low < (middle := 0.5 * (low + high)) < high:
        excess = middle - mean
        divergence = mean * math.log1p(-excess / middle) + (1 - mean) * math.log1p(
            excess / (1 - middle)
        )
        low, high = (low, middle) if divergence >= budget else (middle, high)
    return high


def hockey_stick_upper_bound(
    losses: Array, epsilon: float, *, beta: float, event_probability: float = 1.0
) -> float:
    """Returns an upper confidence bound on H_ε from sampled losses (or upper bounds on losses).

    Args:
      losses: Independent samples [m], drawn given an event outside which the loss is at most
        `epsilon`.
      epsilon: ε.
      beta: Probability with which the bound may fail.
      event_probability: Probability of that event; 1 where samples were drawn without condition.

    Source: Chua et al., arXiv:2412.16802, Algorithms 4 and 5.
    """
    mean = float(np.mean(-np.expm1(np.minimum(epsilon - losses, 0.0))))
    bound = event_probability * kl_upper_bound(min(mean, 1.0), losses.size, beta)
    # A probability that underflows is still not zero.
    return max(bound, float(np.finfo(np.float64).tiny))
