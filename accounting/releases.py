"""Further releases: of one of several mechanisms, beside a Gaussian one, of the best of many runs.

With K trials, K secret and truncated negative binomial, of shape eta and second parameter gamma,
and e with (1 - gamma) delta(e) <= gamma (exp(e) - 1):
delta_best(epsilon + (eta + 1) e) <= E[K] delta(epsilon).
Proof and sources: docs/explanation/private-selection.md.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from accounting.checks import check_delta, check_epsilon, check_noise_multiplier
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    ComposesWithGaussian,
    PrivacyProfile,
    Profile,
    Question,
    UpperEnd,
    proved,
)
from accounting.profiles.gaussian import GaussianProfile, composed_noise

_LOG_GAMMA = -700.0, -1e-12
"""Range of log gamma: beyond it, exp underflows or 1 - gamma has no digits left."""

_LONG_TAIL = 1e-3
"""Below this gamma K may be too large to be counted up to."""
_LARGEST_RATE = 1e18

_NOTE = "the lower end is that of one trial"
_UP = 1.0 + 1e-9
"""Outward rounding: gamma is found to 1e-13, and the rest are a few products and sums."""
_NOTE_OF_PARTS = "the lower end is that of one of the parts alone"


@dataclass(frozen=True)
class EnvelopeProfile(Profile):
    """The pointwise maximum of profiles, delta(epsilon) = max_i delta_i(epsilon).

    It bounds a mechanism that is one of several, chosen independently of the data, with the choice
    released (docs/explanation/composition-with-further-releases.md).

    Args:
      profiles: One or more, of the same adjacency.

    Raises:
      ValueError: If `profiles` is empty.

    >>> from accounting import GaussianProfile
    >>> sharp, noisy = GaussianProfile(1.0), GaussianProfile(2.0)
    >>> EnvelopeProfile((noisy, sharp)).delta(1.0) == sharp.delta(1.0)
    True
    """

    profiles: tuple[PrivacyProfile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles must name at least one")

    def answer(self, question: Question) -> Bound:
        """Answers by the largest of the profiles."""
        return Bound.largest(question.of(profile) for profile in self.profiles)


@dataclass(frozen=True)
class ComposedProfile(Profile):
    r"""The profile of a composition, from the profiles of its mechanisms.

    .. math:: \delta\Big(\sum_i \epsilon_i\Big) \le \sum_i \delta_i(\epsilon_i)

    which is basic composition, here with equal shares of epsilon, or of delta, for all `profiles`.
    The lower end is the largest of the profiles'.

    >>> from accounting import GaussianProfile
    >>> f"{ComposedProfile((GaussianProfile(1.0),) * 2).epsilon(2e-5).upper:.4f}"  # twice 4.37717
    '8.7544'

    Args:
      profiles: Profiles of one adjacency, each valid for all outcomes of the others.

    Source: C. Dwork, A. Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Theorem
    3.16.
    """

    profiles: tuple[PrivacyProfile, ...]

    @classmethod
    def of(cls, profiles: Iterable[PrivacyProfile]) -> PrivacyProfile:
        """Returns the only profile itself, or the composition of several."""
        several = tuple(profiles)
        return several[0] if len(several) == 1 else cls(several)

    def answer(self, question: Question) -> Bound:
        """Answers by equal shares."""
        share = question._replace(at=question.at / len(self.profiles) / _UP)  # rounded down
        upper = _UP * math.fsum(proved(share.of(one)).upper for one in self.profiles)
        if question.wanted == "delta":
            upper = min(1.0, upper)
        lower = Bound.largest(question.of(profile) for profile in self.profiles).lower
        return Bound(lower, max(lower, upper), note=_NOTE_OF_PARTS)


@dataclass(frozen=True)
class WithGaussianReleaseProfile(Profile):
    """The profile of a mechanism that precedes (or follows) a Gaussian release of sensitivity 1.

    Both together are dominated by the product of their pairs, which profiles that compose know
    (`ComposesWithGaussian`). Others are bounded by basic composition.
    Proof: docs/explanation/composition-with-further-releases.md.

    >>> from accounting import GaussianProfile
    >>> product = WithGaussianReleaseProfile(GaussianProfile(4.0), 3.0)
    >>> product.epsilon(1e-5) == GaussianProfile(2.4).epsilon(1e-5)
    True

    Args:
      profile: The mechanism's own. It must hold whatever the release was, and the other way about.
      noise_multiplier: r > 0.

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite; on a question, if `profile` is
        not proved.
    """

    profile: PrivacyProfile
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def answer(self, question: Question) -> Bound:
        """Answers by the product that is known, or by basic composition."""
        release = GaussianProfile(self.noise_multiplier)
        return question.of(self._product() or ComposedProfile((self.profile, release)))

    def with_gaussian_release(self, noise_multiplier: float) -> WithGaussianReleaseProfile:
        """Returns the profile with another release."""
        noise = composed_noise(self.noise_multiplier, noise_multiplier)
        return WithGaussianReleaseProfile(self.profile, noise)

    def _product(self) -> PrivacyProfile | None:
        if isinstance(self.profile, UpperEnd):
            inner = replace(self, profile=self.profile.profile)
            if self.profile.below is not None:
                return UpperEnd(inner, replace(self, profile=self.profile.below))
            return replace(self.profile, profile=inner)
        if isinstance(self.profile, ComposesWithGaussian):
            return self.profile.with_gaussian_release(self.noise_multiplier)
        return None


@dataclass(frozen=True)
class TrialCount:
    """The random number K >= 1 of trials: truncated negative binomial.

    Args:
      mean: E[K] > 1.
      shape: eta > -1; 1 is the geometric law, 0 the logarithmic one, which is wider: more often one
        trial, now and then very many, and a smaller cost.

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

    @cached_property
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

    def hit_probability(self, share: float) -> float:
        """Returns 1 - f(1 - t), the probability that one of K independent events happens.

        With s = 1 - (1 - gamma)(1 - t) it is (1 - (s / gamma)^-eta) / (1 - gamma^eta), without a
        difference of large numbers.

        Args:
          share: t in [0, 1].
        """
        log_ratio = math.log1p(share * (1.0 - self.gamma) / self.gamma)
        log_gamma = math.log(self.gamma)
        if not self.shape:
            return log_ratio / -log_gamma
        return math.expm1(-self.shape * log_ratio) / math.expm1(self.shape * log_gamma)

    def draw(self, generator: np.random.Generator | None = None) -> int:
        """Draws K, in an expected time that no mean and no shape makes long.

        Args:
          generator: As secret as the noise; by default of the operating system's entropy.
        """
        generator = generator or np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        gamma = self.gamma
        if gamma >= _LONG_TAIL:
            return self._draw_by_weights(generator.random(), gamma)
        if self.shape <= 1.0:
            return _positive_poisson(self._draw_rate(generator, 1.0 / gamma - 1.0), generator)
        while True:  # 0 has the probability gamma^eta, which is small
            if count := int(generator.negative_binomial(self.shape, gamma)):
                return count

    def _draw_by_weights(self, u: float, gamma: float) -> int:
        """Inverts the distribution function by the recurrence of its weights."""
        count = 1
        weight = (1.0 - gamma) / _power_integral(self.shape, 1.0 / gamma)
        while (u := u - weight) > 0.0 and weight > 0.0:
            weight *= (1.0 - gamma) * (count + self.shape) / (count + 1)
            count += 1
        return count

    def _draw_rate(self, generator: np.random.Generator, scale: float) -> float:
        """Draws l of density l^(eta - 1) e^(-l / scale) (1 - e^-l) by rejection: eta <= 1 < scale.

        K is Poisson of rate l, given that it is not 0.
        """
        eta = self.shape
        parts = [
            1.0 / (1.0 + eta),
            _power_integral(eta, scale),
            scale**eta * math.exp(-1.0),
        ]
        while True:
            u, v, w = generator.random(3)
            u *= sum(parts)
            if u < parts[0]:
                rate = v ** (1.0 / (1.0 + eta))
                kept = math.exp(-rate / scale) * (-math.expm1(-rate) / rate if rate else 1.0)
            elif u < parts[0] + parts[1]:
                # v is the share of the integral up to the rate.
                log_rate = v * math.log(scale)
                if eta:
                    log_rate = math.log1p(v * math.expm1(eta * math.log(scale))) / eta
                rate = math.exp(log_rate)
                kept = math.exp(-rate / scale) * -math.expm1(-rate)
            else:
                rate = scale * (1.0 - math.log1p(-v))
                kept = (rate / scale) ** (eta - 1.0) * -math.expm1(-rate)
            if w < kept:
                return rate


def _power_integral(eta: float, end: float) -> float:
    """Returns the integral of x^(eta - 1) from 1 to `end` >= 1."""
    return math.expm1(eta * math.log(end)) / eta if eta else math.log(end)


def _positive_poisson(rate: float, generator: np.random.Generator) -> int:
    """Draws from the Poisson law of this rate, given that it is not 0."""
    if rate > _LARGEST_RATE:  # too large to count: the deviation is below 1e-9 of it
        return int(rate)
    if rate > 1.0:
        while True:
            if count := int(generator.poisson(rate)):
                return count
    u, count = generator.random() * -math.expm1(-rate), 1
    weight = rate * math.exp(-rate)
    while (u := u - weight) > 0.0 and weight > 0.0:
        count += 1
        weight *= rate / count
    return count


@dataclass(frozen=True)
class SelectionProfile:
    """The profile of the best of K private trials; nothing else is released.

    Trials may differ in their hyper-parameters, drawn independently of the data, as long as each
    has at most the profile of `trial`. The score by which the best is chosen is an outcome of the
    trial: what it reveals is counted only if `trial` counts it.

    Args:
      trial: The profile of one trial.
      count: The law of K; K itself stays secret.

    A constant score releases one trial, which is the lower end.

    Raises:
      ValueError: On a question to a `trial` whose bounds are not proved.
    """

    trial: PrivacyProfile
    count: TrialCount

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        one = self._delta(check_epsilon(epsilon), tolerance)
        distance = self._delta(0.0, tolerance).upper
        upper = min(1.0, self.count.hit_probability(distance) * _UP)
        rest = epsilon - self._surcharge(tolerance)
        if rest >= 0.0:
            upper = min(upper, self.count.mean * self._delta(rest, tolerance).upper * _UP)
        return Bound(one.lower, upper, note=_NOTE)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta` in (0, 1)."""
        one = proved(self.trial.epsilon(check_delta(delta), tolerance))
        shared = proved(self.trial.epsilon(delta / self.count.mean / _UP, tolerance))
        upper = (shared.upper + self._surcharge(tolerance)) * _UP
        return Bound(one.lower, upper, note=_NOTE)

    def _delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        return proved(self.trial.delta(epsilon, tolerance))

    def _surcharge(self, tolerance: float) -> float:
        """Returns (eta + 1) e for about the smallest e that meets the condition T(e) <= e.

        With T(e) = log(1 + delta(e) (1 - gamma) / gamma), which falls: the least e lies between e
        and T(e).
        """
        found = self._surcharges
        if tolerance not in found:
            gamma = self.count.gamma
            low, high, e, before = 0.0, 1e3, 0.5, (0.0, 0.0)
            while high - low > 1e-3 * high + 1e-4 * tolerance:
                value = math.log1p(
                    self._delta(e, 10.0 * tolerance).upper * _UP * (1.0 - gamma) / gamma
                )
                low, high = max(low, min(e, value)), min(high, max(e, value))
                rise, run = value - e - before[1], e - before[0]
                # By secants of T(e) - e, in which every second end of a bracket would stay.
                guess = e - (value - e) * run / rise if before[0] and rise else math.sqrt(e * value)
                before = e, value - e
                e = guess + math.copysign(3e-4 * high, guess - e)
                if not low < e < high:
                    e = math.sqrt(max(low, 1e-9) * high)
            found[tolerance] = (self.count.shape + 1.0) * high
        return found[tolerance]

    @cached_property
    def _surcharges(self) -> dict[float, float]:
        return {}
