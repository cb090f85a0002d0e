"""The Gaussian mechanism's privacy profile, in closed form: a deterministic order."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from accounting.algebra.cells import gaussian_delta
from accounting.checks import Noise, Release
from accounting.profile import Bound, Profile, Question
from accounting.records import Ge, Lt, Record

T = TypeVar("T")


@dataclass(frozen=True)
class GaussianProfile(Profile, Record):
    r"""The profile of one Gaussian release with sensitivity 1: P = N(1, s^2), Q = N(0, s^2).

    .. math:: \delta(\epsilon) = \Phi(a) - e^\epsilon \Phi(b), \quad
        a = \frac{1}{2s} - s\epsilon, \quad b = -\frac{1}{2s} - s\epsilon

    with s = `noise_multiplier`; both directions are equal by symmetry.

    E passes in one fixed order are E releases of one coordinate: one release at s / sqrt(E).

    Attributes:
      noise_multiplier: s.
      relative_error: How far s may be from the truth, relative to it; both ends allow for it.

    >>> f"{GaussianProfile(1.0).epsilon(1e-5):.4f}"
    '[4.3771, 4.3772]'

    Source: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018,
    Theorem 8 (arXiv 1805.06530).

    Raises:
      ValueError: If a number is out of range.
    """

    noise_multiplier: Noise
    relative_error: Annotated[float, Ge(0), Lt(1)] = 0.0

    def answer(self, question: Question) -> Bound:
        """Answers in closed form; the tolerance does not matter."""
        return question.between(self._lower, self._upper)

    def _upper(self, epsilon: float) -> float:
        return sum(gaussian_delta(self.noise_multiplier * (1.0 - self.relative_error), epsilon))

    def _lower(self, epsilon: float) -> float:
        sigma = self.noise_multiplier * (1.0 + self.relative_error)
        return operator.sub(*gaussian_delta(sigma, epsilon))

    def with_gaussian_release(self, noise_multiplier: float) -> GaussianProfile:
        """Returns the profile of this release and another one."""
        noise = composed_noise(self.noise_multiplier, noise_multiplier)
        return GaussianProfile(noise, self.relative_error)


def composed_noise(noise_multiplier: float, release: float) -> float:
    """Returns the noise of one Gaussian release costing two.

    Their losses add up, and so do the inverse squares; infinite noise is no release.

    >>> composed_noise(3.0, 4.0), composed_noise(3.0, float("inf"))
    (2.4, 3.0)

    Args:
      noise_multiplier: Noise multiplier of the first release.
      release: Noise multiplier of the second release; infinite for none.
    """
    smaller_noise, larger_noise = sorted((noise_multiplier, release))
    return smaller_noise / math.hypot(1.0, smaller_noise / larger_noise)


def known_order(noise_multiplier: float, steps: int, release: float = math.inf) -> GaussianProfile:
    """Returns the profile of an example in every release.

    Args:
      noise_multiplier: s of each step.
      steps: Number of steps.
      release: Noise multiplier of a further Gaussian release; infinite for none.
    """
    return GaussianProfile(composed_noise(noise_multiplier / math.sqrt(steps), release))


class WithRelease(Profile, Record):
    """A checked dataclass with the noise multiplier `release` of a further Gaussian release."""

    release: Release

    def with_gaussian_release(self: T, noise_multiplier: float) -> T:
        """Returns the profile with a further Gaussian release."""
        this: Any = self
        return replace(this, release=composed_noise(this.release, noise_multiplier))


def as_redrawn(noise_multiplier: float, epochs: int, mode: str) -> tuple[float, int]:
    """Returns noise and epochs of equivalent redrawn epochs.

    E epochs of a 'fixed' draw have a sufficient statistic, the releases' sum: one epoch at s /
    sqrt(E).

    >>> as_redrawn(2.0, 4, "fixed"), as_redrawn(2.0, 4, "redrawn")
    ((1.0, 1), (2.0, 4))

    Args:
      noise_multiplier: s of the mechanism.
      epochs: E.
      mode: 'redrawn' or 'fixed'.
    """
    if mode == "fixed":
        return noise_multiplier / math.sqrt(epochs), 1
    return noise_multiplier, epochs
