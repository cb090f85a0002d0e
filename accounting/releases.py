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
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from accounting.checks import check_noise_multiplier
from accounting.profile import (
    Bound,
    ComposesWithGaussian,
    PrivacyProfile,
    Profile,
    Question,
    UpperEnd,
    proved,
)
from accounting.profiles.gaussian import GaussianProfile
from accounting.roots import falling_root, point_near_root

_LOG_GAMMA = -700.0, -1e-12
"""Range of log gamma: beyond it, exp underflows or 1 - gamma has no digits left."""

_NOTE = "the lower end counts one trial only"
_UP = 1.0 + 1e-9
"""Outward rounding: gamma is found to 1e-13, and the rest are a few products and sums."""
_NOTE_OF_PARTS = "the lower end counts the costliest part only"


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
        return Bound.largest(question.ask(profile) for profile in self.profiles)

    def with_gaussian_release(self, noise_multiplier: float) -> EnvelopeProfile:
        """Returns the envelope with a further Gaussian release."""
        profiles = self.profiles
        return EnvelopeProfile(tuple(with_gaussian_release(p, noise_multiplier) for p in profiles))


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
    def from_profiles(cls, profiles: Iterable[PrivacyProfile]) -> PrivacyProfile:
        """Returns the only profile itself, or the composition of several."""
        several = tuple(profiles)
        return several[0] if len(several) == 1 else cls(several)

    def answer(self, question: Question) -> Bound:
        """Answers by equal shares."""
        share = question._replace(at=question.at / len(self.profiles) / _UP)  # rounded down
        upper = _UP * math.fsum(proved(share.ask(mechanism)).upper for mechanism in self.profiles)
        if question.wanted == "delta":
            upper = min(1.0, upper)
        lower = Bound.largest(question.ask(profile) for profile in self.profiles).lower
        return Bound(lower, max(lower, upper), note=_NOTE_OF_PARTS)

    def with_gaussian_release(self, noise_multiplier: float) -> ComposedProfile:
        """Returns the composition with a Gaussian release in its last mechanism."""
        *preceding, last = self.profiles
        joined = with_gaussian_release(last, noise_multiplier)
        releases = joined.profiles if isinstance(joined, ComposedProfile) else (joined,)
        return ComposedProfile((*preceding, *releases))


def with_gaussian_release(profile: PrivacyProfile, noise_multiplier: float) -> PrivacyProfile:
    """Returns the profile of a mechanism beside a Gaussian release.

    The release has sensitivity 1.

    Both together are dominated by the product of their pairs, which profiles that compose know
    (`ComposesWithGaussian`). Others are bounded by basic composition.
    Proof: docs/explanation/composition-with-further-releases.md.

    >>> from accounting import GaussianProfile
    >>> with_gaussian_release(GaussianProfile(4.0), 3.0)
    GaussianProfile(noise_multiplier=2.4, relative_error=0.0)

    Args:
      profile: Profile that holds for every outcome of the release; the release's holds for every
        outcome of the mechanism.
      noise_multiplier: Noise multiplier r > 0 of the release.

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite.
    """
    check_noise_multiplier(noise_multiplier)
    if isinstance(profile, UpperEnd):
        below = profile.below and with_gaussian_release(profile.below, noise_multiplier)
        return UpperEnd(with_gaussian_release(profile.profile, noise_multiplier), below)
    if isinstance(profile, ComposesWithGaussian):
        return profile.with_gaussian_release(noise_multiplier)
    return ComposedProfile((profile, GaussianProfile(noise_multiplier)))


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
        if not -1.0 < self.shape <= 100.0 or 0.0 < abs(self.shape) < 1e-100:  # products underflow
            raise ValueError(
                f"shape must be in (-1, 100], and 0 or at least 1e-100 from 0, got {self.shape}"
            )
        if not self._mean(_LOG_GAMMA[1]) <= self.mean <= self._mean(_LOG_GAMMA[0]):
            raise ValueError(
                f"no law of shape {self.shape} has the mean {self.mean} within floating point: "
                "take a shape nearer to 0, or another mean"
            )

    @cached_property
    def gamma(self) -> float:
        """The law's second parameter, in (0, 1): the mean falls in it."""
        _, high = falling_root(
            lambda log_gamma: math.log(self._mean(log_gamma) / self.mean),
            -math.log(self.mean), lambda log_gamma: 1e-13 * max(1.0, -log_gamma),
            low=_LOG_GAMMA[0], farthest=_LOG_GAMMA[1],
        )  # fmt: skip
        return math.exp(min(high, _LOG_GAMMA[1]))

    def _mean(self, log_gamma: float) -> float:
        """Returns E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)), and its limit at eta = 0."""
        odds = math.expm1(-log_gamma)
        spread = -math.expm1(self.shape * log_gamma) / self.shape if self.shape else -log_gamma
        return odds / spread

    def hit_probability(self, share: float) -> float:
        """Returns 1 - f(1 - t), the probability that one of K independent events happens.

        With t = `share` in [0, 1] and s = 1 - (1 - gamma)(1 - t) it is (1 - (s / gamma)^-eta) / (1
        - gamma^eta), without a difference of large numbers.
        """
        log_ratio = math.log1p(share * (1.0 - self.gamma) / self.gamma)
        log_gamma = math.log(self.gamma)
        if not self.shape:
            return log_ratio / -log_gamma
        return math.expm1(-self.shape * log_ratio) / math.expm1(self.shape * log_gamma)

    def draw(self, generator: np.random.Generator | None = None) -> int:
        """Draws K by inversion, up to where no mass is left.

        `generator` is as secret as the noise; by default the operating system's entropy.
        """
        generator = generator or np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        u, gamma, eta, first, size = generator.random(), self.gamma, self.shape, 1, 256
        log_odds = -math.log(gamma)
        weight = (1.0 - gamma) / (math.expm1(eta * log_odds) / eta if eta else log_odds)
        tail_mass = 1.0  # bound on the mass from `first` on
        while u < 2.0 * tail_mass:  # beyond, rounding alone leaves something of u
            k = np.arange(first, first + size)
            ratios = (1.0 - gamma) * (k + eta) / (k + 1)
            weights = weight * np.cumprod(np.append(1.0, ratios))
            remaining = u - np.cumsum(weights[:-1])
            if remaining[-1] <= 0.0:
                return first + int(np.argmax(remaining <= 0.0))
            u, weight, first, size = remaining[-1], weights[-1], first + size, min(2 * size, 2**20)
            decline = min(gamma, 1.0 - ratios[-1])  # later ratios are at most 1 - decline
            tail_mass = weight / decline if decline > 0.0 else 1.0
        return first


@dataclass(frozen=True)
class SelectionProfile(Profile):
    """The profile of the best of K private trials; nothing else is released.

    Trials may differ in their hyper-parameters, drawn independently of the data, as long as each
    has at most the profile of `trial`. The score that ranks the trials is an outcome of
    each: `trial` must count the score's privacy cost.

    Args:
      trial: The profile of one trial.
      count: The law of K; K itself stays secret.

    A constant score releases one trial, which is the lower end.

    Raises:
      ValueError: On a question to a `trial` whose bounds are not proved.
    """

    trial: PrivacyProfile
    count: TrialCount

    def answer(self, question: Question) -> Bound:
        """Answers by the theorem, or two trials' distance."""
        single = self._trial(question)
        surcharge = self._surcharge(question.tolerance)
        if question.wanted == "epsilon":
            shared = self._trial(question._replace(at=question.at / self.count.mean / _UP))
            return Bound(single.lower, (shared.upper + surcharge) * _UP, note=_NOTE)
        distance = self._trial(question._replace(at=0.0)).upper
        upper = min(1.0, self.count.hit_probability(distance) * _UP)
        if (shared_delta := question.at - surcharge) >= 0.0:
            shared = self._trial(question._replace(at=shared_delta))
            upper = min(upper, self.count.mean * shared.upper * _UP)
        return Bound(single.lower, upper, note=_NOTE)

    def _trial(self, question: Question) -> Bound:
        return proved(question.ask(self.trial))

    def _surcharge(self, tolerance: float) -> float:
        """Returns (eta + 1) e for about the smallest e that meets the condition T(e) <= e.

        With T(e) = log(1 + delta(e) (1 - gamma) / gamma), which falls: the least e lies between e
        and T(e).
        """
        if tolerance not in self._surcharges:
            odds = (1.0 - self.count.gamma) / self.count.gamma

            def excess(e: float) -> float:
                delta = self._trial(Question("delta", e, 10.0 * tolerance)).upper
                return math.log1p(delta * _UP * odds) - e

            e = point_near_root(
                excess, 0.5, lambda e: 1e-3 * e + 1e-4 * tolerance, low=0.0, near=0.3
            )
            self._surcharges[tolerance] = (self.count.shape + 1.0) * e[1]
        return self._surcharges[tolerance]

    @cached_property
    def _surcharges(self) -> dict[float, float]:
        return {}
