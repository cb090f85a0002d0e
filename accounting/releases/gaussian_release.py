"""A mechanism together with a Gaussian release, such as noisy sums over all rows.

Both together are dominated by the product of their pairs, which some profiles know; others are
bounded by points of their curves. Proof: docs/explanation/composition-with-further-releases.md.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells
from accounting.checks import check_noise_multiplier
from accounting.profile import (
    Bound,
    ComposesWithGaussian,
    PrivacyProfile,
    Profile,
    Question,
    UpperEnd,
    epsilon_from_delta,
    proved,
)
from accounting.profiles.gaussian import GaussianProfile, composed_noise

_ROUNDS = 6
"""Most times that the segments are laid for a nearer guess."""
_FIRST = 8
"""Segments to begin with."""
_MOST = 200
"""Most points at which the mechanism's profile is asked."""
_SHARE = 1e-4
"""Share of delta that may be left to what is beyond the segments."""
_NARROWEST = 1e-5
"""Of the segments, in epsilon: the split of a segment's mass loses 1e-15 over its width."""
_UP = 1.0 + 1e-9
"""Outward rounding of sums of products of masses."""
_NOTE = "the lower end is that of one of both parts alone"


@dataclass(frozen=True)
class WithGaussianReleaseProfile(Profile):
    """The profile of a mechanism that precedes (or follows) a Gaussian release of sensitivity 1.

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
        """Answers by the product that is known, or by chords of the mechanism's curve."""
        if self._product is not None:
            return question.of(self._product)
        inner = proved(question.of(self.profile))
        lower = max(inner.lower, question.of(GaussianProfile(self.noise_multiplier)).lower)
        chords = self._chords.setdefault(
            question.tolerance,
            _Chords(self.profile, 1.0 / self.noise_multiplier, question.tolerance),
        )
        if question.wanted == "delta":
            chords.refine(question.at, lower)
            upper = chords.delta(question.at)
        else:
            upper = self._upper_epsilon(question, chords, lower) * _UP
        return Bound(lower, max(lower, upper), note=inner.note or _NOTE)

    def with_gaussian_release(self, noise_multiplier: float) -> WithGaussianReleaseProfile:
        """Returns the profile with another release."""
        noise = composed_noise(self.noise_multiplier, noise_multiplier)
        return WithGaussianReleaseProfile(self.profile, noise)

    @functools.cached_property
    def _product(self) -> PrivacyProfile | None:
        if isinstance(self.profile, UpperEnd):
            inner = replace(self, profile=self.profile.profile)
            if self.profile.below is not None:
                return UpperEnd(inner, replace(self, profile=self.profile.below))
            return replace(self.profile, profile=inner)
        if isinstance(self.profile, ComposesWithGaussian):
            return self.profile.with_gaussian_release(self.noise_multiplier)
        return None

    @functools.cached_property
    def _chords(self) -> dict[float, _Chords]:
        return {}

    def _upper_epsilon(self, question: Question, chords: _Chords, at: float) -> float:
        delta, tolerance = question.at, question.tolerance
        release = GaussianProfile(self.noise_multiplier).epsilon(0.5 * delta)
        upper = proved(self.profile.epsilon(0.5 * delta, tolerance)).upper + release.upper
        for _ in range(_ROUNDS):
            chords.refine(at, delta)
            found = epsilon_from_delta(chords.delta, lambda _: 0.0, delta, resolution=1e-6).upper
            upper = min(upper, found)
            if upper == math.inf or abs(upper - at) <= tolerance:
                break
            at = upper
        return upper


@dataclass
class _Chords:
    """u: points above the larger of both directions' curve, and the mean of their chords.

    Attributes:
      profile: The mechanism's.
      mu: 1 / r.
      tolerance: How sharp it is to be, in epsilon.
      points: Log g and u(g) of each point, ascending in g; before them comes u(0) = 1.
    """

    profile: PrivacyProfile
    mu: float
    tolerance: float
    points: dict[float, float] = field(default_factory=dict)

    def delta(self, epsilon: float) -> float:
        """Bounds the product's delta at `epsilon` from above."""
        at, height = self._sorted()
        if not at.size:
            return 1.0
        parts, last = self._parts(epsilon, at)
        total = float(np.dot(parts[0], np.append(1.0, height[:-1])) + np.dot(parts[1], height))
        return min(1.0, (total + last * float(height[-1])) * _UP)

    def refine(self, epsilon: float, delta: float) -> None:
        """Asks for more points until the chords are sharp at `epsilon`, where delta is `delta`."""
        rare = min(max(_SHARE * delta, 1e-300), 0.1)
        centre = epsilon - 0.5 * self.mu**2
        left, right = centre + self.mu * float(scipy.special.ndtri(rare)), centre + 6.0 * self.mu
        if left < 0.0:  # beyond what is rare, on either side of 0, the ends' chords are sharp
            far = proved(self.profile.epsilon(rare, self.tolerance)).upper
            left, right = max(left, -far), min(right, far)
        for at in np.linspace(left, max(right, left), _FIRST + 1):
            if not any(abs(at - other) < (right - left) / _FIRST / 4.0 for other in self.points):
                self._ask(float(at))
        while len(self.points) < _MOST:
            at, gaps = self._gaps(epsilon)
            upper = self.delta(epsilon)
            enough = max(self.tolerance * upper, upper - self.delta(epsilon + self.tolerance))
            if gaps.sum() <= 0.5 * enough:
                return
            widest = int(np.argmax(gaps))
            if gaps[widest] <= 0.0:
                return
            self._ask(0.5 * (float(at[widest]) + float(at[widest + 1])))

    def _ask(self, at: float) -> None:
        # Where delta falls over so much of epsilon, which it mostly does ten times as fast.
        above = proved(self.profile.delta(abs(at), 10.0 * self.tolerance)).upper
        self.points[at] = above if at >= 0.0 else 1.0 - math.exp(at) * (1.0 - above)

    def _sorted(self) -> tuple[Array, Array]:
        at = np.array(sorted(self.points))
        return at, np.array([self.points[x] for x in at])

    def _parts(self, epsilon: float, at: Array) -> tuple[tuple[Array, Array], float]:
        """Returns the parts of u's mean at each segment's left and right end; and the last point's.

        Segment k ends at point k, and the first begins at g = 0.
        """
        mu = self.mu
        losses = np.concatenate([[-math.inf], epsilon - at[::-1], [math.inf]])
        first, second = (
            np.exp(log_normal_cells(losses, sign * 0.5 * mu**2, mu))[::-1] for sign in (1.0, -1.0)
        )
        # In units of each segment's right end, so that nothing overflows.
        width = np.append(math.inf, np.diff(at))
        moment = second[:-1] * np.exp(np.minimum(epsilon - at, 700.0))
        to_right = (moment - np.exp(-width) * first[:-1]) / -np.expm1(-width)
        to_right = np.clip(to_right, 0.0, first[:-1])
        return (first[:-1] - to_right, to_right), float(first[-1])

    def _gaps(self, epsilon: float) -> tuple[Array, Array]:
        """Returns the points, and about how much each chord between two may give too much."""
        at, height = self._sorted()
        (left, right), _ = self._parts(epsilon, at)
        g = np.exp(at - at[-1])
        width = np.diff(g)
        slope = np.diff(height) / np.maximum(width, 1e-300)
        before = np.append((height[0] - 1.0) / max(g[0], 1e-300), slope[:-1])
        after = np.append(slope[1:], 0.0)
        # The neighbours' chords, continued, bound a convex curve from below: a triangle.
        rise, fall = np.maximum(slope - before, 0.0), np.maximum(after - slope, 0.0)
        tall = width * rise * fall / np.maximum(rise + fall, 1e-300)
        gaps = 0.5 * tall * (left + right)[1:]
        return at, np.where(np.diff(at) > 2.0 * _NARROWEST, gaps, 0.0)
