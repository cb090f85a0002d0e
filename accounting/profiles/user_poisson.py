"""Poisson sampling of examples of which each user has several: the profile for users."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_mean_above, spread
from accounting.algebra.likelihood_ratio import ROUNDING, LikelihoodRatio, Side
from accounting.algebra.mixtures import (
    EDGE_DRIFT,
    Mixture,
    check_grid,
    ratio_deviation,
    solve_increasing,
)
from accounting.checks import check_settings
from accounting.profile import ComposesWithGaussian
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.repeated import RepeatedProfile


@dataclass(frozen=True)
class UserPoissonProfile(RepeatedProfile):
    r"""The profile, for users, of Poisson sampling of examples of which each user has at most tau.

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
      sampling_prob: q, in (0, 1].
      max_contributions: tau, most examples of one user.

    Raises:
      ValueError: If a number is out of range.
    """

    sampling_prob: float
    max_contributions: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, counts=("max_contributions",), probabilities=("sampling_prob",))

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
        """Returns about the deviation of one release's X, cut off at 1."""
        mixture, _ = self._mixture(1e-12)
        nothing = Mixture(np.zeros(1), np.ones(1), self.noise_multiplier)
        return ratio_deviation(mixture, nothing)

    def ratios(self, side: Side, step: float, tail: float) -> list[LikelihoodRatio]:
        """Returns the pair's likelihood ratio on a grid, from the given side.

        Where more than k examples take part with probability below `tail`, they are taken to show
        the user for certain (upper), or to be 0 (lower).
        """
        mixture, rest = self._mixture(tail)
        sigma = self.noise_multiplier
        nothing = Mixture(np.zeros(1), np.ones(1), sigma)
        log_weights = np.log(mixture.weights)

        def log_ratio(z: Array) -> Array:
            terms = [
                log_weight + mean * (z - 0.5 * mean) / sigma**2
                for log_weight, mean in zip(log_weights, mixture.means, strict=True)
            ]
            return np.logaddexp.reduce(terms, axis=0)

        low, high = nothing.reach(tail)[0], mixture.reach(tail)[1]
        bottom, top = (float(x) for x in log_ratio(np.array([low, high])))
        check_grid(max(top, -bottom), step, (top - bottom) / step)
        # The smallest X, at z = -infinity, is the weight of 0.
        first = math.floor(bottom / step)
        bounded = float(log_weights[0]) >= first * step
        inner = np.arange(first + 1, math.ceil(top / step) + 1)
        edges = solve_increasing(log_ratio, step * inner.astype(float), low, high)
        edges = np.concatenate([[-math.inf], edges, [math.inf]])
        p, q = mixture.masses(edges), nothing.masses(edges)
        # Weights carry the roundings of logarithms as large as that of tau!.
        logs = scipy.special.gammaln(self.max_contributions + 1.0) + np.abs(log_weights).max()
        drift = max(mixture.drift(edges), nothing.drift(edges)) + 32.0 * ROUNDING * logs
        if side == "lower":
            p += rest * q
            return [LikelihoodRatio.from_masses(p, q, step, "lower", drift)]
        cells = spread(step, p, q, log_mean_above(first, step, p, q), bounded=bounded)
        cells = cells._replace(infinity=cells.infinity + rest)
        return [LikelihoodRatio.of_cells(step, first, cells, drift, EDGE_DRIFT + 2.0 * drift)]

    def _mixture(self, tail: float) -> tuple[Mixture, float]:
        """Returns P with at most so many examples that the rest has probability <= `tail`."""
        tau, rate = self.max_contributions, self.sampling_prob
        k = np.arange(tau + 1)
        log_weights = scipy.special.xlogy(k, rate) + scipy.special.xlog1py(tau - k, -rate)
        log_weights += scipy.special.gammaln(tau + 1) - scipy.special.gammaln(k + 1)
        weights = np.exp(log_weights - scipy.special.gammaln(tau - k + 1))
        above = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        kept = int(np.argmax(above <= tail)) + 1
        mixture = Mixture(k[:kept].astype(float), weights[:kept], self.noise_multiplier)
        return mixture, float(above[kept - 1])
