"""Poisson sampling of users' examples: the profile for users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accounting.algebra.cells import Array, log_mean_above, spread
from accounting.algebra.likelihood_ratio import ROUNDING
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import (
    EDGE_DRIFT,
    Mixture,
    check_grid,
    ratio_deviation,
    solve_increasing,
)
from accounting.algebra.refinement import GridError
from accounting.algebra.upper import UpperRatio
from accounting.checks import GridProbability
from accounting.profile import ComposesWithGaussian
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.repeated import RepeatedProfile
from accounting.records import Count

_MOST_WORK = 400_000
"""Components times cells of a grid: about half a second."""
_MOST_COUNTS = 40_000.0
"""Largest deviation of a user's number of examples, at a probability of e^-750."""


class _Cells(NamedTuple):
    """Masses of one release's laws in cells of a grid."""

    first: int
    """Index of the first cell."""
    bounded: bool
    """True if the first cell begins at its grid point."""
    p: Array
    """P-mass: float64[cells]."""
    q: Array
    """Q-mass: float64[cells]."""
    rest: float
    """Probability of the larger counts that are left out of P."""
    drift: float
    """Bound on the relative error of each mass."""


@dataclass(frozen=True)
class UserPoissonProfile(RepeatedProfile):
    r"""The profile, for users, of Poisson sampling of at most tau examples a user.

    Every example takes part with probability q = `sampling_prob`, each is clipped to norm 1, and a
    neighbour has all of one user's tau = `max_contributions` examples zeroed out. Then

    .. math:: P = \sum_k \binom{\tau}{k} q^k (1-q)^{\tau-k} N(k, s^2), \qquad Q = N(0, s^2)

    dominates a step, tightly (docs/explanation/units-and-users.md). Steps are independent and
    compose.

    >>> f"{UserPoissonProfile(2.0, 100, 0.01, 5).epsilon(1e-5):.2f}"
    '[1.11, 1.12]'

    Sources: Choquette-Choo, Ganesh, Steinke, Thakurta, "Privacy Amplification for Matrix
    Mechanisms", ICLR 2024 (mixtures of Gaussians); Zhu, Dong, Wang, AISTATS 2022 (their
    composition).

    Args:
      noise_multiplier: s, in units of the clipping norm of one example.
      steps: T, number of releases.
      sampling_prob: q, in [1e-12, 1].
      max_contributions: tau, most examples of one user.

    Raises:
      ValueError: If a number is out of range.
    """

    sampling_prob: GridProbability
    max_contributions: Count

    def ceiling(self) -> GaussianProfile:
        """Returns the profile of all tau examples in every step."""
        sensitivity = self.max_contributions * math.sqrt(self.steps)
        return GaussianProfile(self.noise_multiplier / sensitivity)

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns Poisson's profile for one example, or the Gaussian's where all take part."""
        if self.sampling_prob == 1.0:
            return self.ceiling()
        if self.max_contributions == 1:
            return PoissonProfile(self.noise_multiplier, self.sampling_prob, self.steps)
        return None

    def deviation(self) -> float:
        """Estimates the deviation of one release's ratio.

        `|X - 1|` is cut off at 1.
        """
        try:
            mixture, _ = self._mixture(1e-12, zeroed=False)
        except GridError:  # which `ratios` raises again, and says why
            return 1.0
        nothing = Mixture(np.zeros(1), np.ones(1), self.noise_multiplier)
        return ratio_deviation(mixture, nothing)

    def upper_ratio(self, step: float, tail: float) -> UpperRatio:
        """Returns the pair's law, bounded from above.

        More examples than all but `tail` of the draws have show the user for certain; fewer count
        as the fewest that are kept (log-normals of one normal grow in convex order).

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        first, bounded, p, q, rest, drift = self._cells(False, step, tail)
        cells = spread(step, p, q, log_mean_above(first, step, p, q), bounded=bounded)
        cells = cells._replace(infinity=cells.infinity + rest)
        return UpperRatio.of_spread(step, first, cells, drift, EDGE_DRIFT + 2.0 * drift)

    def lower_ratios(self, step: float, tail: float) -> list[LowerRatio]:
        """Returns the pair's law, bounded from below.

        Rare numbers of examples count as 0.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        _, _, p, q, rest, drift = self._cells(True, step, tail)
        return [LowerRatio.from_masses(p + rest * q, q, step, drift)]

    def _cells(self, zeroed: bool, step: float, tail: float) -> _Cells:
        mixture, rest = self._mixture(tail, zeroed)
        sigma = self.noise_multiplier
        nothing = Mixture(np.zeros(1), np.ones(1), sigma)
        log_weights, means = np.log(mixture.weights), mixture.means[:, None]

        def log_ratio(z: Array) -> Array:
            terms = log_weights[:, None] + means * (z - 0.5 * means) / sigma**2
            largest = terms.max(axis=0)
            return largest + np.log(np.exp(terms - largest).sum(axis=0))

        low, high = nothing.reach(tail)[0], mixture.reach(tail)[1]
        bottom, top = (float(x) for x in log_ratio(np.array([low, high])))
        size = (top - bottom) / step
        check_grid(max(top, -bottom), step, size)
        if step < EDGE_DRIFT:
            raise GridError("no finer grid is computed: rounding of its edges exceeds its step")
        if size * mixture.means.size > _MOST_WORK:
            raise GridError(
                f"no finer grid is computed: {mixture.means.size} counts of one user's examples "
                f"in a batch on {size:.0f} cells would take too long"
            )
        # The smallest X, at z = -infinity, is the weight of 0.
        first = math.floor(bottom / step)
        bounded = float(mixture.means[0]) == 0.0 and float(log_weights[0]) >= first * step
        inner = np.arange(first + 1, math.ceil(top / step) + 1)
        farthest = mixture.reach(1e-300)[1]  # the last grid point may lie beyond `high`
        edges = solve_increasing(log_ratio, step * inner.astype(float), low, farthest)
        edges = np.concatenate([[-math.inf], edges, [math.inf]])
        # Logarithms of ratios are summed from the mode on, each with a few roundings of its parts.
        logs = 2.0 * math.log(self.max_contributions) - math.log(self.sampling_prob)
        logs += abs(math.log1p(-self.sampling_prob)) + float(np.abs(log_weights).max()) + 1.0
        roundings = 4.0 * (mixture.means[-1] - mixture.means[0] + 16.0) * logs
        drift = max(mixture.drift(edges), nothing.drift(edges)) + ROUNDING * roundings
        return _Cells(first, bounded, mixture.masses(edges), nothing.masses(edges), rest, drift)

    def _mixture(self, tail: float, zeroed: bool) -> tuple[Mixture, float]:
        """Returns P without rare counts, and the probability of the larger ones, <= `tail`.

        Rare small counts are `zeroed`, or count as the smallest of the others.
        """
        k, weights = self._counts()
        above = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        last = int(np.argmax(above <= tail))
        below = np.cumsum(weights)
        first = min(int(np.searchsorted(below, tail, "right")), last)
        means, kept_weights = k[first : last + 1], weights[first : last + 1].copy()
        if first and not zeroed:
            kept_weights[0] += below[first - 1]
        elif first:
            means, kept_weights = np.append(0.0, means), np.append(below[first - 1], kept_weights)
        positive = kept_weights > 0.0
        mixture = Mixture(means[positive], kept_weights[positive], self.noise_multiplier)
        return mixture, float(above[last])

    def _counts(self) -> tuple[Array, Array]:
        """Returns counts of a user's examples in a batch, all but e^-750 of them, and their masses.

        By the ratios of neighbours, from the mode on.
        """
        tau, rate = self.max_contributions, self.sampling_prob
        mean = tau * rate
        # Bernstein's inequality
        reach = math.sqrt(2.0 * mean * (1.0 - rate) * 750.0) + 500.0
        if reach > _MOST_COUNTS:
            raise GridError(
                f"no grid is computed: a batch has about {mean:.3g} of one user's examples, and "
                f"their number varies by more than {_MOST_COUNTS:.0f}"
            )
        k = np.arange(max(0, math.floor(mean - reach)), min(tau, math.ceil(mean + reach)) + 1)
        steps = np.log(tau - k[:-1]) - np.log(k[1:]) + (math.log(rate) - math.log1p(-rate))
        mode = int(np.count_nonzero(steps > 0.0))
        below = np.append(-np.cumsum(steps[:mode][::-1])[::-1], 0.0)
        weights = np.exp(np.append(below, np.cumsum(steps[mode:])))
        return k.astype(float), weights / weights.sum()
