"""Privacy profiles as privacy loss distributions of dp_accounting.

Proof and sources: docs/explanation/privacy-loss-distributions.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting.algebra.cells import Array
from accounting.profile import PrivacyProfile, proved

# Upper values are raised by this much, so that rounding in the masses of a pair cannot go below
# them.
_ROUNDING = 1e-9
_LARGEST_EPSILON = 500.0


def to_privacy_loss_distribution(
    profile: PrivacyProfile, *, interval: float = 1e-2, tail: float = 1e-12
) -> Any:
    """Returns a profile's upper end as dp_accounting's distribution.

    It is pessimistic, and ready to be composed.

    >>> from accounting import GaussianProfile
    >>> converted = to_privacy_loss_distribution(GaussianProfile(2.0))
    >>> f"{converted.self_compose(4).get_epsilon_for_delta(1e-5):.2f}"  # as of sigma 1
    '4.38'

    Args:
      profile: Any profile whose bounds are proved (confidence 1).
      interval: d > 0, spacing of the losses. The distribution is off by order d².
      tail: The δ in (0, 1) below which the curve is not resolved; it becomes an infinite loss.

    Raises:
      ValueError: If an argument is out of range, the profile's bounds hold only with some
        confidence, or δ does not fall to `tail`.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    upper = _upper_values(profile, interval, tail)
    a = np.exp(interval * np.arange(upper.size))
    h = np.minimum(1.0, (1.0 + _ROUNDING) * upper)
    # The chord from 1/a_k to a_k bounds h at 1 (and leaves a nonnegative mass at the loss 0).
    h[0] = min(1.0, float(np.min((2.0 * h + a - 1.0) / (1.0 + a))))
    minorant = _convex_minorant(a, h)
    slopes = np.append(np.diff(h[minorant]) / np.diff(a[minorant]), 0.0)
    # Masses of P and Q at the losses kd; at -kd they are exchanged.
    q = np.zeros(a.size)
    q[minorant[1:]] = np.diff(slopes)
    p = a * q
    infinity = float(h[minorant[-1]])
    p[0] = max(0.0, 1.0 - infinity - p[1:].sum() - q[1:].sum())
    masses = {-k: float(q[k]) for k in range(q.size - 1, 0, -1)}
    masses |= {k: float(p[k]) for k in range(p.size)}
    pmf = pld_pmf.create_pmf(masses, interval, infinity, pessimistic_estimate=True)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _upper_values(profile: PrivacyProfile, interval: float, tail: float) -> Array:
    """Returns upper bounds on δ at ε = 0, d, 2d, ..., until one is at most `tail`."""
    if not 0.0 < interval <= 1.0:
        raise ValueError(f"interval must be in (0, 1], got {interval}")
    if not 0.0 < tail < 1.0:
        raise ValueError(f"tail must be in (0, 1), got {tail}")
    upper: list[float] = []
    while not upper or upper[-1] > tail:
        epsilon = len(upper) * interval
        if epsilon > _LARGEST_EPSILON:
            raise ValueError(
                f"delta is still {upper[-1]} at epsilon = {epsilon}: "
                "ask for a larger tail, or add noise"
            )
        upper.append(proved(profile.delta(epsilon)).upper)
    return np.array(upper)


def _convex_minorant(x: Array, y: Array) -> NDArray[np.int64]:
    """Returns the indices of the points at which the greatest convex function below all bends."""
    vertices: list[int] = []
    for k in range(x.size):
        while len(vertices) >= 2:
            i, j = vertices[-2], vertices[-1]
            if (y[j] - y[i]) / (x[j] - x[i]) < (y[k] - y[j]) / (x[k] - x[j]):
                break
            vertices.pop()
        vertices.append(k)
    return np.array(vertices)
