"""Membership attacks: the largest advantage and accuracy of any attacker.

The game, its proof and sources: docs/explanation/membership-attacks.md.
"""

from __future__ import annotations

import math

from accounting.checks import check_epsilon
from accounting.profile import Bound, PrivacyProfile

_ROUNDING = 1e-14


def attack_advantage(profile: PrivacyProfile) -> Bound:
    """Bounds the largest advantage of a membership attack.

    It is the mechanism's delta(0), the total variation distance.

    >>> from accounting import GaussianProfile
    >>> f"{attack_advantage(GaussianProfile(4.0)):.4f}"  # 2 Phi(1/8) - 1
    '[0.0994, 0.0995]'
    """
    return profile.delta(0.0)


def implied_advantage(epsilon: float, delta: float) -> float:
    """Returns the largest advantage that (`epsilon`, `delta`) allows.

    It is (e^epsilon - 1 + 2 delta) / (e^epsilon + 1).

    >>> round(implied_advantage(1.0, 0.0), 6)
    0.462117

    Args:
      epsilon: Epsilon of the guarantee, >= 0.
      delta: Delta of the guarantee, in [0, 1].

    Raises:
      ValueError: If `epsilon` is negative or not finite, or `delta` is not in [0, 1].

    Source: P. Kairouz, S. Oh, P. Viswanath, ICML 2015, arXiv:1311.0776.
    """
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must be in [0, 1], got {delta}")
    t = math.tanh(0.5 * check_epsilon(epsilon))
    return min(1.0, (t + delta * (1.0 - t)) * (1.0 + _ROUNDING))


def attack_accuracy(advantage: Bound) -> Bound:
    """Bounds the accuracy of attacks with a fair prior.

    It is (1 + `advantage`) / 2.

    >>> attack_accuracy(Bound(0.0, 0.1)).format_upper()
    '0.551'
    """
    lower, upper = (
        0.5 * (1.0 + advantage_end) for advantage_end in (advantage.lower, advantage.upper)
    )
    lower, upper = lower * (1.0 - _ROUNDING), min(1.0, upper * (1.0 + _ROUNDING))
    return Bound.resting_on(advantage, max(0.5, lower), upper)
