"""An estimator that samples the other bins alone: the example's own coordinate is integrated.

Its upper ends are finite at small deltas, where those of sampled losses are not. Proof:
docs/explanation/monte-carlo-estimates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells
from accounting.estimates.episodic import Estimate
from accounting.estimates.monte_carlo.confidence import (
    TOO_FEW,
    Inequality,
    empirical_bennett_upper_bound,
    kl_upper_bound,
)
from accounting.estimates.monte_carlo.losses import geometric_ranks, sample_others
from accounting.estimates.tails import add_delta_upper_bound, truncated_tail
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_count,
    check_delta,
    check_noise_multiplier,
    epsilon_from_delta,
)
from accounting.profiles.max_events import max_event_lower_bound

_OWN = np.linspace(-10.0, 14.0, 4001)
"""Ends of cells of the example's own standard normal variable."""


@dataclass(frozen=True)
class ConditionalProfile:
    """One epoch of balls-and-bins, by samples of all bins but the example's: confidence, not proof.

    δ is the larger of "remove", sampled, and "add", of which a proved bound is taken.

    Attributes:
      noise_multiplier: σ.
      bins: T, the number of batches of the epoch.
      num_samples: m.
      beta: β, the probability with which an upper end may fail.
      growth: Of the ranks whose order statistics are sampled, see `geometric_ranks`.
      inequality: As for `MonteCarloProfile`.
      seed: Seed of the samples; a query is a pure function of the attributes.
    """

    noise_multiplier: float
    bins: int
    num_samples: int = 20_000
    beta: float = 1e-3
    growth: float = 1.02
    inequality: Inequality = "bennett"
    seed: int = 0

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("bins", self.bins)
        check_count("num_samples", self.num_samples)
        if not 1e-12 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [1e-12, 1), got {self.beta}")

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds δ at `epsilon` >= 0; `tolerance` is not used."""
        [(_, bound)] = self.estimates([epsilon])
        return bound

    def estimates(self, epsilons: Sequence[float]) -> Iterator[tuple[Estimate, Bound]]:
        """Yields, at each of `epsilons` >= 0, the samples' mean and the bounds on δ.

        The confidence is that of each answer by itself.
        """
        for epsilon in epsilons:
            mean, upper = self._curve(epsilon)(epsilon)
            lower = self._lower(epsilon)
            bound = Bound(lower, min(1.0, max(lower, upper)), 1.0 - self.beta)
            yield Estimate(mean, "the mean of samples"), bound

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest ε >= 0 at `delta` in (0, 1); `tolerance` is not used."""
        check_delta(delta)
        lower = epsilon_from_delta(lambda e: 1.0, self._lower, delta, resolution=1e-9).lower
        curve = self._curve(lower, 0.5 * delta)
        found = epsilon_from_delta(
            lambda e: curve(max(e, lower))[1], lambda e: 0.0, delta, resolution=1e-4
        )
        note = "" if found.upper < math.inf else TOO_FEW
        return Bound(lower, max(lower, found.upper), 1.0 - self.beta, note)

    def _lower(self, epsilon: float) -> float:
        return max_event_lower_bound(
            epsilon, noise_multiplier=self.noise_multiplier, bins=self.bins
        )

    def _curve(self, first: float, rest: float = 1.0) -> Callable[[float], tuple[float, float]]:
        """Returns the mean and the upper end as functions of ε >= `first`, which both fall.

        Half of the samples are drawn where no other normal variable exceeds a ceiling, half where
        one does. Where, in the first half, S is above a cut, the upper end takes 1, with a proved
        probability, of at most `rest` if there is such a cut. Ceiling and cut are chosen for ε =
        `first` before any sample is seen.
        """
        sizes: dict[str, Any] = {"noise_multiplier": self.noise_multiplier, "bins": self.bins}
        half, beta = -(-self.num_samples // 2), 0.5 * self.beta
        places = np.concatenate(
            [np.linspace(0.0, 2.0, 800), np.geomspace(2.01, 8.0 * math.exp(first), 300)]
        )
        exceeds, budget = self._exceeds(first, places), -math.log(beta) / half
        typical = float(np.interp(1.0, places, exceeds))
        noise = exceeds * budget + np.sqrt(2.0 * exceeds * typical * budget)
        choices = []
        for ceiling in np.linspace(1.0, 11.0, 21):
            above = -math.expm1((self.bins - 1) * float(scipy.special.log_ndtr(ceiling)))
            tail = truncated_tail(places, ceiling=ceiling, **sizes)
            cost = np.where(tail <= max(rest, tail.min()), tail + noise, math.inf)
            cut = int(cost.argmin())
            choices.append((cost[cut] + above * budget, ceiling, above, cut, float(tail[cut])))
        _, ceiling, above, cut, tail_mass = min(choices)
        most = max(float(exceeds[cut]), 1e-300)
        rng, ranks = np.random.default_rng(self.seed), geometric_ranks(self.bins, self.growth)
        within, beyond = (
            # A place that is not below S.
            np.searchsorted(
                places,
                sample_others(rng, half, **sizes, ranks=ranks, ceiling=ceiling, exceeded=exceeded),
            )
            for exceeded in (False, True)
        )
        within = np.minimum(within, cut)

        def at(epsilon: float) -> tuple[float, float]:
            values = np.append(self._exceeds(epsilon, places), 1.0)
            parts = [(1.0 - above) * most, above]
            shares = [values[within] / most, values[beyond]]
            mean = sum(p * float(x.mean()) for p, x in zip(parts, shares, strict=True))
            upper = sum(p * self._bound(x, beta) for p, x in zip(parts, shares, strict=True))
            return mean, max(upper + tail_mass, add_delta_upper_bound(epsilon, **sizes))

        return at

    def _bound(self, samples: Array, beta: float) -> float:
        if self.inequality == "bennett":
            return empirical_bennett_upper_bound(samples, beta)
        return kl_upper_bound(min(float(samples.mean()), 1.0), samples.size, beta)

    def _exceeds(self, epsilon: float, others: Array) -> Array:
        """Bounds E[(1 - e^(ε - L))_+ | S] from above, at each S of `others`, ascending.

        It grows with S and with the example's own normal variable, whose cells take their ends.
        """
        scale = 1.0 / self.noise_multiplier
        own = np.exp(np.clip(scale * _OWN + 0.5 * scale**2, -600.0, 700.0)) / self.bins
        mass = np.exp(log_normal_cells(_OWN)) * (1.0 + 1e-12)
        threshold = math.exp(min(epsilon, 700.0))
        ends = [scipy.special.ndtr(_OWN[0]), scipy.special.ndtr(-_OWN[-1])]
        found = np.empty(others.shape)
        for i, other in enumerate(others):
            value = np.maximum(1.0 - threshold / (other + own), 0.0)
            found[i] = value[1:] @ mass + ends[0] * value[0] + ends[1]
        return np.minimum(found, 1.0)
