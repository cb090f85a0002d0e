"""A mechanism together with a Gaussian release, such as noisy sums over all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    PrivacyProfile,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
)

_SEGMENTS = 48
_REACH = 9.0
"""Standard deviations of the release's loss that are divided into segments."""


@dataclass(frozen=True)
class WithGaussianReleaseProfile:
    r"""The profile of a mechanism that precedes (or follows) a Gaussian release of sensitivity 1.

    With mu = 1/s, s = `noise_multiplier`, the release's loss is L ~ N(mu^2/2, mu^2), and that of
    the pair is a sum: in each direction the hockey-stick divergence is the mean of the mechanism's
    own at epsilon - L. So

    .. math:: \delta(\epsilon) \le E\, \delta'(\epsilon - L),

    with delta' = `profile`'s, and delta'(-e) = 1 - e^{-e} (1 - delta'(e)).

    Args:
      profile: The mechanism's own. It must hold whatever the release was, and the other way about.
      noise_multiplier: s > 0.

    Raises:
      ValueError: If `noise_multiplier` is not positive and finite.
    """

    profile: PrivacyProfile
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        inner = self.profile.delta(check_epsilon(epsilon), tolerance)
        mu = 1.0 / self.noise_multiplier
        losses = np.linspace(mu**2 / 2 - _REACH * mu, mu**2 / 2 + _REACH * mu, _SEGMENTS + 1)
        upper = 0.0
        cumulative = special.ndtr((losses - mu**2 / 2) / mu)
        masses = np.diff(cumulative, prepend=0.0, append=1.0)
        for loss, mass in zip([*losses, math.inf], masses, strict=True):
            upper += mass * self._inner(epsilon - loss, tolerance)
        return Bound.resting_on(inner, inner.lower, min(1.0, upper * (1.0 + 1e-9)))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`."""
        check_delta(delta)
        inner = self.profile.epsilon(delta, tolerance)
        found = epsilon_from_delta(
            lambda e: self.delta(e, tolerance).upper, lambda e: 0.0, delta, resolution=tolerance
        )
        return Bound.resting_on(inner, min(inner.lower, found.upper), found.upper)

    def _inner(self, epsilon: float, tolerance: float) -> float:
        """The upper end of delta' at any epsilon."""
        if epsilon == -math.inf:
            return 1.0
        above = self.profile.delta(abs(epsilon), tolerance).upper
        return above if epsilon >= 0.0 else 1.0 - math.exp(epsilon) * (1.0 - above)
