r"""Private selection: the price of the best of a random number of private runs.

Runs that are tried one after another compose, or else only one of them may be counted, chosen
without a look at the others. In between lies random search: draw a number K of trials from a wide
law, run K private trials, release the best and nothing else. Because nobody knows K, the price is
a small multiple of one trial's, whatever the mean of K.

K is truncated negative binomial with shape eta > -1 and gamma in (0, 1), K >= 1, whose generating
function f(x) = E x^K has the derivative f'(x) = E[K] (gamma / (1 - (1 - gamma) x))^{eta + 1}:
eta = 1 is geometric, eta = 0 logarithmic.

Theorem. Let one trial have the profile delta(.), and let e satisfy
(1 - gamma) delta(e) <= gamma (exp(e) - 1). Then the best of K has a profile of at most

    delta_best(epsilon + (eta + 1) e) <= E[K] delta(epsilon).

Proof. Let P and Q be a trial's laws on neighbouring data, and let ties of the score be broken by an
independent uniform number, which is a post-processing. With F, G the probabilities under P, Q of an
outcome worse than y, the best of K has the laws f'(F(y)) P(dy) and f'(G(y)) Q(dy). An outcome at
least as good as y is an event: 1 - G <= exp(e) (1 - F) + delta(e), and so

    gamma + (1 - gamma)(1 - G) <= exp(e) (gamma + (1 - gamma)(1 - F)),

by the condition on e. That is f'(F)/f'(G) <= exp((eta + 1) e). For every event S, hence,

    int_S f'(F) dP - exp(epsilon + (eta + 1) e) int_S f'(G) dQ <= int_S f'(F) (dP - exp(epsilon) dQ)
        <= sup f' * delta(epsilon) = E[K] delta(epsilon).

Sources: N. Papernot and T. Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR
2022 (the laws of K, in Renyi's terms); A. Koskela, R. Redberg and Y.-X. Wang, "Privacy Profiles for
Private Selection", ICML 2024 (the theorem in this form).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    PrivacyProfile,
    check_delta,
    check_epsilon,
)

_LOG_GAMMA = -700.0, -1e-12
"""Where log gamma is looked for: beyond, exp underflows or 1 - gamma has no digits left."""

_UP = 1.0 + 1e-9
"""Outward rounding: gamma is found to 1e-13, and the rest are a few products and sums."""


@dataclass(frozen=True)
class TrialCount:
    """The random number K >= 1 of trials: truncated negative binomial.

    Args:
      mean: E[K] > 1.
      shape: eta > -1; 1 is the geometric law, 0 the logarithmic one, which is wider: more often one
        trial, now and then very many, and a smaller price.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(TrialCount(mean=10, shape=1).gamma, 12)
    0.1
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 < self.mean <= 1e9:
            raise ValueError(f"the mean number of trials must be in (1, 1e9], got {self.mean}")
        if not -1.0 < self.shape <= 100.0:
            raise ValueError(f"shape must be in (-1, 100], got {self.shape}")
        if not self._mean(_LOG_GAMMA[1]) <= self.mean <= self._mean(_LOG_GAMMA[0]):
            raise ValueError(
                f"no law of shape {self.shape} has the mean {self.mean} within floating point: "
                "take a shape nearer to 0, or another mean"
            )

    @property
    def gamma(self) -> float:
        """The law's second parameter, in (0, 1): the mean falls in it."""
        from scipy.optimize import brentq  # half of SciPy's import time, and seldom needed

        return math.exp(
            brentq(lambda log_g: math.log(self._mean(log_g) / self.mean), *_LOG_GAMMA, xtol=1e-13)
        )

    def _mean(self, log_gamma: float) -> float:
        """Returns E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)), and its limit at eta = 0."""
        odds = math.expm1(-log_gamma)
        spread = -math.expm1(self.shape * log_gamma) / self.shape if self.shape else -log_gamma
        return odds / spread

    def draw(self) -> int:
        """Draws K by the operating system's entropy: it is as secret as the noise."""
        generator = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        gamma = self.gamma
        if self.shape == 0.0:
            return int(generator.logseries(1.0 - gamma))
        if self.shape < 0.0:
            return self._draw_by_weights(generator.random(), gamma)
        while True:
            if count := int(generator.negative_binomial(self.shape, gamma)):
                return count

    def _draw_by_weights(self, u: float, gamma: float) -> int:
        """Inverts the distribution function, whose weights follow from one another."""
        count = 1
        weight = self.shape * (1.0 - gamma) / math.expm1(-self.shape * math.log(gamma))
        while (u := u - weight) > 0.0 and weight > 0.0:
            weight *= (1.0 - gamma) * (count + self.shape) / (count + 1)
            count += 1
        return count


@dataclass(frozen=True)
class SelectionProfile:
    """The profile of the best of K private trials, of which nothing else is released.

    Trials may differ in their hyper-parameters, drawn independently of the data, as long as each
    has at most the profile of `trial`. The score by which the best is chosen is an outcome of the
    trial: what it reveals is counted only if `trial` counts it.

    Args:
      trial: The profile of one trial.
      count: The law of K; K itself stays secret.

    The lower end is that of one trial: a score that is constant releases just one.

    Raises:
      ValueError: On a question to a `trial` whose bounds are not proved.
    """

    trial: PrivacyProfile
    count: TrialCount

    def delta(self, epsilon: float) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        one = self._delta(check_epsilon(epsilon))
        rest = epsilon - self._surcharge
        upper = 1.0
        if rest >= 0.0:
            upper = min(1.0, self.count.mean * self._delta(rest).upper * _UP)
        return Bound(one.lower, upper, note=one.note)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` in (0, 1)."""
        one = _proved(self.trial.epsilon(check_delta(delta), tolerance))
        shared = _proved(self.trial.epsilon(delta / self.count.mean / _UP, tolerance))
        upper = (shared.upper + self._surcharge) * _UP
        return Bound(one.lower, upper, note="the lower end is that of one trial")

    def _delta(self, epsilon: float) -> Bound:
        return _proved(self.trial.delta(epsilon))

    @cached_property
    def _surcharge(self) -> float:
        """(eta + 1) e for an e that was seen to meet the theorem's condition."""
        gamma = self.count.gamma
        odds = gamma / (1.0 - gamma)

        def met(e: float) -> bool:
            return self._delta(e).upper * _UP <= odds * math.expm1(e)

        low, high = 0.0, 1 / 16
        while not met(high):
            low, high = high, 2.0 * high
            if high > 700.0:
                return math.inf
        while high - low > 1e-3 * high + 1e-6:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if met(middle) else (middle, high)
        return (self.count.shape + 1.0) * high


def _proved(bound: Bound) -> Bound:
    # The search asks many questions, and the confidence of a Monte Carlo profile is that of one.
    if bound.confidence < 1.0:
        raise ValueError("the price of a trial must be proved, not estimated with some confidence")
    return bound
