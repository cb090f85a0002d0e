"""Proved lower bounds on delta, in closed form, from the events of the largest coordinate.

Sources: L. Chua et al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025, arXiv:2412.16802
(Appendix B); L. Chua et al., How Private are DP-SGD Implementations?, ICML 2024, arXiv:2403.17673.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from accounting.profile import check_count, check_epsilon, check_noise_multiplier

Floats = NDArray[np.float64]

# Relative slack for the rounding of closed forms that are printed as proved.
_ROUNDING = 1e-9
# A probability below this may have underflowed; it is to be subtracted, so it is taken for this.
_SMALLEST = 1e-300


def log_probability_max_below(
    ceilings: Floats, *, noise_multiplier: float, bins: int, shift: float
) -> Floats:
    """Returns log Pr(max_t x_t < c) for x ~ N(shift · e_1, σ² I) in `bins` dimensions.

    Φ((c - shift)/σ) Φ(c/σ)^{T-1}, at each c of `ceilings`, float64 of the same shape.
    """
    z = np.asarray(ceilings, dtype=np.float64) / noise_multiplier
    rest = (bins - 1) * log_ndtr(z) if bins > 1 else 0.0
    return log_ndtr(z - shift / noise_multiplier) + rest


def max_event_lower_bound(
    epsilon: float,
    *,
    noise_multiplier: float,
    bins: int,
    shifts: tuple[float, float] = (1.0, 0.0),
) -> float:
    """Returns a proved lower bound on δ from the events {max_t x_t >= c}, in closed form.

    δ(ε) >= P(A) - e^ε Q(A) for every event A, and likewise with P and Q exchanged. Here A = {max_t
    x_t >= c} in the first order and its complement in the second, with the best c found on a grid
    and then refined (any c gives a valid bound). The result is lowered by one part in 10^9 of P(A)
    for rounding.

    Args:
      epsilon: ε >= 0.
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      shifts: Position of the example's coordinate under P and under Q: (1, 0) is balls-and-bins,
        (2, 1) is shuffling (the pair that shuffled batches with gradients -1, and +1 or -1 for the
        example, give).

    Source: Chua et al., arXiv:2412.16802, Appendix B (balls-and-bins); arXiv:2403.17673
    (shuffling).
    """
    check_noise_multiplier(noise_multiplier)
    check_count("bins", bins)
    check_epsilon(epsilon)

    def best_at(ceilings: Floats) -> tuple[float, float]:
        log_p, log_q = (
            log_probability_max_below(
                ceilings, noise_multiplier=noise_multiplier, bins=bins, shift=shift
            )
            for shift in shifts
        )
        p_above, q_above = -np.expm1(log_p), np.maximum(-np.expm1(log_q), _SMALLEST)
        with np.errstate(over="ignore"):
            remove = (1 - _ROUNDING) * p_above - np.exp(epsilon + np.log(q_above))
            add = (1 - _ROUNDING) * np.exp(log_q) - np.exp(epsilon + log_p)
        gains = np.maximum(remove, add)
        best = int(np.argmax(gains))
        return float(gains[best]), float(ceilings[best])

    reach = max(shifts) + 40.0 * noise_multiplier
    step = 0.02 * noise_multiplier
    ceilings = np.arange(-40.0 * noise_multiplier, reach + step, step)
    bound, at = best_at(ceilings)
    for _ in range(3):
        ceilings = np.linspace(at - step, at + step, 101)
        step /= 50
        bound, at = max((bound, at), best_at(ceilings))
    return max(bound, 0.0)
