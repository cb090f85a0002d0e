r"""Membership attacks: how often the best of them is right, whatever it knows and computes.

**The game.** A fair coin is tossed. Heads: the mechanism runs on a data set D. Tails: it runs on D
with one unit zeroed out (replaced by the null example, whose gradient is 0). The attacker knows D,
the unit, the program and all of its settings, sees everything that is released, and says which.
The *accuracy* of its attack is Pr[right]; its *advantage* is that of a guess at no cost,

    Pr[says heads | heads] - Pr[says heads | tails] = 2 accuracy - 1,

true positive rate minus false positive rate. With P and Q the laws of what is released and S what
makes the attacker say heads (a coin of its own only averages over such S),

    accuracy = (P(S) + 1 - Q(S)) / 2 = (1 + P(S) - Q(S)) / 2 <= (1 + TV(P, Q)) / 2,

and some S attains it. TV(P, Q) = sup_S P(S) - Q(S) = H_0(P || Q) = H_0(Q || P), as S and its
complement exchange the two: at epsilon = 0 both directions of the adjacency are one number, and a
bound on the worse one, delta(0) of a `PrivacyProfile`, bounds it for every D and every unit.

- *Another prior.* If heads has probability p <= 1/2, then accuracy = p P(S) + (1 - p)(1 - Q(S)) is
  at most 1 - p + p TV: TV is a share of what there is to gain over saying tails always. The same
  with P and Q exchanged for p >= 1/2.
- *Yeom et al.* give a non-member's place to a fresh draw from the population, in place of the null
  example. The laws of both worlds are then each one zeroing-out away from a third (with the place
  zeroed), so that by the triangle inequality the advantage is at most 2 TV.
- *What (epsilon, delta) alone implies.* P(S) <= e^epsilon Q(S) + delta, and, of the complement of S
  in the other direction, 1 - Q(S) <= e^epsilon (1 - P(S)) + delta. Their sum is
  (e^epsilon + 1)(P(S) - Q(S)) <= e^epsilon - 1 + 2 delta.

Sources: S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha, Privacy Risk in Machine Learning, CSF 2018,
arXiv:1709.01604, Experiment 1 and Definition 4; P. Kairouz, S. Oh, P. Viswanath, The Composition
Theorem for Differential Privacy, ICML 2015, arXiv:1311.0776 (the region of (epsilon, delta)).
"""

from __future__ import annotations

import math

from accounting.profile import Bound, PrivacyProfile, check_epsilon

_ROUNDING = 1e-14


def attack_advantage(profile: PrivacyProfile) -> Bound:
    """Bounds the largest advantage of a membership attack on a mechanism: delta(0), its TV.

    >>> from accounting import GaussianProfile
    >>> f"{attack_advantage(GaussianProfile(4.0)):.4f}"  # 2 Phi(1/8) - 1
    '[0.0994, 0.0995]'

    Args:
      profile: The mechanism's.
    """
    return profile.delta(0.0)


def implied_advantage(epsilon: float, delta: float) -> float:
    """Returns the largest advantage that (`epsilon`, `delta`) allows, (e^eps - 1 + 2d)/(e^eps + 1).

    It is t + delta (1 - t) with t = tanh(epsilon / 2); rounded up.

    >>> round(implied_advantage(1.0, 0.0), 6)
    0.462117

    Raises:
      ValueError: If `epsilon` is negative or not finite, or `delta` is not in [0, 1].
    """
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must be in [0, 1], got {delta}")
    t = math.tanh(0.5 * check_epsilon(epsilon))
    return min(1.0, (t + delta * (1.0 - t)) * (1.0 + _ROUNDING))


def attack_accuracy(advantage: Bound) -> Bound:
    """Bounds the largest accuracy of an attack with a fair prior, (1 + `advantage`) / 2.

    >>> attack_accuracy(Bound(0.0, 0.1)).format_upper()
    '0.551'
    """
    lower, upper = (0.5 * (1.0 + end) for end in (advantage.lower, advantage.upper))
    lower, upper = lower * (1.0 - _ROUNDING), min(1.0, upper * (1.0 + _ROUNDING))
    return Bound.resting_on(advantage, max(0.5, lower), upper)
