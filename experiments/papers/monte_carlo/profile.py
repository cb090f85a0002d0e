"""Profile of Monte Carlo estimates, whose upper ends hold with a confidence below one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accounting.algebra.cells import Array
from accounting.checks import Noise, check_epsilon
from accounting.max_events import Epoch
from accounting.profile import Bound, Direction, Profile, Question
from accounting.records import Count, check
from experiments.papers.monte_carlo.confidence import (
    TOO_FEW,
    Inequality,
    hockey_stick_upper_bound,
    hockey_stick_values,
    kl_upper_bound,
)
from experiments.papers.monte_carlo.losses import (
    event_probability,
    geometric_ranks,
    sample_losses,
)
from experiments.papers.monte_carlo.other_bins import other_bins_curve

_ROUNDING = 1e-9
"""Relative slack for the rounding of closed forms that are printed as proved."""
_SMALLEST = 1e-300
"""Lower limit of subtracted probabilities, which may have underflowed."""


def max_event_lower_bound(
    epsilon: float, epoch: Epoch, shifts: tuple[float, float] = (1.0, 0.0)
) -> float:
    """Returns a lower bound on δ from events {max_t x_t >= c}.

    It is proved, in closed form.

    Args:
      epsilon: ε >= 0.
      epoch: One epoch.
      shifts: Position of the example's coordinate under P and under Q: (1, 0) is balls-and-bins,
        (2, 1) is shuffling (the pair that shuffled batches with gradients -1, and +1 or -1 for the
        example, give).

    Source: Chua et al., arXiv:2412.16802, Appendix B (balls-and-bins); arXiv:2403.17673
    (shuffling).
    """
    check_epsilon(epsilon)
    sigma = epoch.noise_multiplier

    def best_at(ceilings: Array) -> tuple[float, float]:
        log_p, log_q = (epoch.log_max_below(ceilings, shift) for shift in shifts)
        p_above, q_above = -np.expm1(log_p), np.maximum(-np.expm1(log_q), _SMALLEST)
        with np.errstate(over="ignore"):
            remove = (1 - _ROUNDING) * p_above - np.exp(epsilon + np.log(q_above))
            add = (1 - _ROUNDING) * np.exp(log_q) - np.exp(epsilon + log_p)
        gains = np.maximum(remove, add)
        best = int(np.argmax(gains))
        return float(gains[best]), float(ceilings[best])

    # Far from where a coordinate stands, counted in its deviation, no event tells P from Q.
    reach, step = 40.0 * sigma, 0.02 * sigma
    centres = sorted({0.0, *shifts})
    if reach > 0.5:
        ceilings = np.arange(-reach, centres[-1] + reach + step, step)
    else:
        window = np.arange(-reach, reach + step, step)
        ceilings = np.concatenate([centre + window for centre in centres])
    bound, ceiling = best_at(ceilings)
    for _ in range(3):
        ceilings = np.linspace(ceiling - step, ceiling + step, 101)
        step /= 50
        bound, ceiling = max((bound, ceiling), best_at(ceilings))
    return max(bound, 0.0)


_DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")


@dataclass(frozen=True)
class MonteCarloProfile(Profile):
    """Profile of balls-and-bins by samples: upper ends of confidence 1 - β.

    By default as its authors estimate it: importance sampling (one epoch) and, given ranks, order
    statistics. The lower end is the closed form of `max_event_lower_bound` and is proved. The
    confidence holds for one query.

    Attributes:
      noise_multiplier: Noise standard deviation σ, in units of the clipping norm.
      bins: Number T of batches of one epoch.
      epochs: Number of epochs, each with bins drawn anew.
      num_samples: Number m of samples for each direction.
      beta: β, the probability with which an upper end may fail.
      ranks: Ranks of the order statistics, or None to sample every coordinate.
      sampled: Variable that is sampled. "losses"; "rare losses": given an event that contains all
        losses above epsilon, for one epoch; "other bins": all bins but the example's, which is
        integrated, with a proved bound on the direction "add". The last is for one epoch, is not in
        the paper, and alone has finite ends far below 1/m.
      inequality: Inequality between samples and their expectation, see `mean_upper_bound`.
      seed: Seed of the samples; a query is a pure function of the attributes.

    Raises:
      ValueError: If an attribute is out of its range, or other bins are of several epochs.
    """

    noise_multiplier: Noise
    bins: Count
    epochs: Count = 1
    num_samples: Count = 100_000
    beta: float = 1e-3
    ranks: tuple[int, ...] | None = None
    sampled: Literal["losses", "rare losses", "other bins"] = "rare losses"
    inequality: Inequality = "chernoff-hoeffding"
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        ranks = (1,) if self.ranks is None else self.ranks
        if ranks[:1] != (1,) or any(a >= b for a, b in itertools.pairwise(ranks)):
            raise ValueError(f"ranks must begin with 1 and increase, got {ranks}")
        if self.sampled == "other bins" and self.epochs > 1:
            raise ValueError(f'sampled: "other bins" is for one epoch, got {self.epochs}')
        # A smaller β would round the confidence to 1, which means proved.
        if not 1e-12 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [1e-12, 1), got {self.beta}")

    @property
    def _epoch(self) -> Epoch:
        return Epoch(self.noise_multiplier, self.bins)

    @property
    def _rare(self) -> bool:
        return self.sampled == "rare losses" and self.epochs == 1

    def _lower(self, epsilon: float) -> float:
        # One of several redrawn epochs already costs this much.
        return max_event_lower_bound(epsilon, self._epoch)

    def _event_probability(self, event_epsilon: float, direction: Direction) -> float:
        if not self._rare:
            return 1.0
        return event_probability(event_epsilon, self._epoch, direction)

    def _least_upper(self, event_epsilon: float) -> float:
        """Returns delta's least possible upper end, of samples in which no loss exceeds epsilon."""
        if self.sampled == "other bins":
            return 0.0
        probability = max(self._event_probability(event_epsilon, d) for d in _DIRECTIONS)
        return probability * kl_upper_bound(0.0, self.num_samples, self.beta)

    def _curve(self, first: float, rest: float = 1.0) -> Callable[[float], tuple[float, float]]:
        """Returns a decreasing function from ε >= `first` to δ's estimate and upper end."""
        rng, epoch = np.random.default_rng(self.seed), self._epoch
        confidence: dict[str, Any] = {"beta": self.beta, "inequality": self.inequality}
        if self.sampled == "other bins":
            ranks = self.ranks or geometric_ranks(self.bins)
            sizes: dict[str, Any] = {"first": first, "rest": rest}
            return other_bins_curve(rng, self.num_samples, epoch, ranks, **sizes, **confidence)
        event = first if self._rare else None
        law: dict[str, Any] = {"epochs": self.epochs, "ranks": self.ranks, "event_epsilon": event}
        samples = [
            (
                sample_losses(rng, self.num_samples, epoch, direction, **law),
                self._event_probability(first, direction),
            )
            for direction in _DIRECTIONS
        ]

        def estimate_delta(epsilon: float) -> tuple[float, float]:
            """Returns the estimate and upper end of δ."""
            means = [p * float(hockey_stick_values(x, epsilon).mean()) for x, p in samples]
            uppers = [
                hockey_stick_upper_bound(x, epsilon, event_probability=p, **confidence)
                for x, p in samples
            ]
            return max(means), max(uppers)

        return estimate_delta

    def estimates(self, epsilons: Sequence[float]) -> Iterator[tuple[float, Bound]]:
        """Yields the estimate and bounds of δ at each ε.

        The estimate belongs to the direction with the larger one. The confidence holds for each
        answer alone. Losses without a condition are drawn once for all.
        """
        curve = None
        for epsilon in epsilons:
            if curve is None or self._rare or self.sampled == "other bins":
                curve = self._curve(epsilon)
            (mean, upper), lower = curve(epsilon), self._lower(epsilon)
            bound = Bound(lower, min(1.0, max(lower, upper)), 1.0 - self.beta)
            yield mean, bound

    def answer(self, question: Question) -> Bound:
        """Returns an interval whose width depends on the number of samples."""
        if question.wanted == "delta":
            [(_, bound)] = self.estimates([question.at])
            return bound
        lower = question.lower_end(self._lower, 1e-9)
        if self._least_upper(lower) > question.at:
            return Bound(lower, math.inf, 1.0 - self.beta, TOO_FEW)
        curve = self._curve(lower, 0.5 * question.at)
        upper = question.upper_end(lambda e: curve(max(e, lower))[1], 1e-6)
        note = "" if upper < math.inf else TOO_FEW
        return Bound(lower, max(lower, upper), 1.0 - self.beta, note)
