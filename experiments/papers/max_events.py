"""Proved lower bound on delta from events of the largest coordinate, as the papers have it.

Certified profiles have the whole law of the largest coordinate: `accounting.max_events`.
"""

from __future__ import annotations

import numpy as np

from accounting.algebra.cells import Array
from accounting.checks import check_epsilon
from accounting.max_events import Epoch

_ROUNDING = 1e-9
"""Relative slack for the rounding of closed forms that are printed as proved."""
_SMALLEST = 1e-300
"""Stands for smaller probabilities, which may have underflowed and are subtracted."""


def max_event_lower_bound(
    epsilon: float, epoch: Epoch, shifts: tuple[float, float] = (1.0, 0.0)
) -> float:
    """Returns a lower bound on δ from events {max_t x_t >= c}.

    It is proved, in closed form.

    Args:
      epsilon: ε >= 0.
      epoch: One epoch.
      shifts: Position of the example's coordinate under P and under Q: (1, 0) is balls-and-bins,
        (2, 1) is shuffling (the pair that shuffled batches with gradients -1, and +1 or -1 for the
        example, give).

    Source: Chua et al., arXiv:2412.16802, Appendix B (balls-and-bins); arXiv:2403.17673
    (shuffling).
    """
    check_epsilon(epsilon)
    sigma = epoch.noise_multiplier

    def best_at(ceilings: Array) -> tuple[float, float]:
        log_p, log_q = (epoch.log_max_below(ceilings, shift) for shift in shifts)
        p_above, q_above = -np.expm1(log_p), np.maximum(-np.expm1(log_q), _SMALLEST)
        with np.errstate(over="ignore"):
            remove = (1 - _ROUNDING) * p_above - np.exp(epsilon + np.log(q_above))
            add = (1 - _ROUNDING) * np.exp(log_q) - np.exp(epsilon + log_p)
        gains = np.maximum(remove, add)
        best = int(np.argmax(gains))
        return float(gains[best]), float(ceilings[best])

    # Far from where a coordinate stands, counted in its deviation, no event tells P from Q.
    reach, step = 40.0 * sigma, 0.02 * sigma
    centres = sorted({0.0, *shifts})
    if reach > 0.5:
        ceilings = np.arange(-reach, centres[-1] + reach + step, step)
    else:
        window = np.arange(-reach, reach + step, step)
        ceilings = np.concatenate([centre + window for centre in centres])
    bound, ceiling = best_at(ceilings)
    for _ in range(3):
        ceilings = np.linspace(ceiling - step, ceiling + step, 101)
        step /= 50
        bound, ceiling = max((bound, ceiling), best_at(ceilings))
    return max(bound, 0.0)
