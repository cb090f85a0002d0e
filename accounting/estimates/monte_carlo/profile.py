"""The estimators' answers as a profile: its upper ends hold with a confidence below one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from accounting.algebra.cells import Array
from accounting.estimates.episodic import Estimate
from accounting.estimates.monte_carlo.confidence import (
    TOO_FEW,
    Inequality,
    hockey_stick_upper_bound,
    hockey_stick_values,
    kl_upper_bound,
)
from accounting.estimates.monte_carlo.losses import event_probability, sample_losses
from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    Direction,
    check_count,
    check_delta,
    check_noise_multiplier,
    epsilon_from_delta,
)
from accounting.profiles.gaussian import as_redrawn
from accounting.profiles.max_events import max_event_lower_bound

_DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")


@dataclass(frozen=True)
class MonteCarloProfile:
    """The profile of balls-and-bins as its authors estimate it: upper ends of confidence 1 - β.

    The upper end combines importance sampling (one epoch) and order statistics; the lower end is
    the closed form of `max_event_lower_bound` and is proved. The confidence is that of one query.

    Attributes:
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      epochs: Number of epochs.
      assignment: "redrawn": bins are drawn anew in each epoch; "fixed": once. The E observations of
        a fixed bin have their mean as a sufficient statistic: one epoch at σ/√E.
      num_samples: m, samples for each direction.
      beta: β, the probability with which an upper end may fail.
      ranks: Ranks of the order statistics, or None to sample every coordinate.
      importance: Whether samples of one epoch are drawn given the event that importance sampling
        takes; several epochs are always sampled without condition.
      inequality: By which samples bound their expectation: "chernoff-hoeffding", as published, or
        "bennett", which is tighter where the samples' variance is small.
      seed: Seed of the samples; a query is a pure function of the attributes.
    """

    noise_multiplier: float
    bins: int
    epochs: int = 1
    assignment: Literal["redrawn", "fixed"] = "redrawn"
    num_samples: int = 100_000
    beta: float = 1e-3
    ranks: tuple[int, ...] | None = None
    importance: bool = True
    inequality: Inequality = "chernoff-hoeffding"
    seed: int = 0

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("bins", self.bins)
        check_count("epochs", self.epochs)
        check_count("num_samples", self.num_samples)
        if self.assignment not in ("redrawn", "fixed"):
            raise ValueError(f'assignment must be "redrawn" or "fixed", got {self.assignment!r}')
        if self.inequality not in get_args(Inequality):
            raise ValueError(
                f"inequality must be one of {get_args(Inequality)}, got {self.inequality!r}"
            )
        # A smaller β would round the confidence to 1, which means proved.
        if not 1e-12 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [1e-12, 1), got {self.beta}")

    @property
    def _one_epoch(self) -> tuple[float, int]:
        return as_redrawn(self.noise_multiplier, self.epochs, self.assignment)

    @property
    def _conditional(self) -> bool:
        return self.importance and self._one_epoch[1] == 1

    def _lower(self, epsilon: float) -> float:
        # One of several redrawn epochs already costs this much.
        return max_event_lower_bound(epsilon, noise_multiplier=self._one_epoch[0], bins=self.bins)

    def _samples(self, event_epsilon: float) -> list[tuple[Array, float]]:
        """Losses and the probability of the event that they are drawn under, for each direction."""
        noise_multiplier, epochs = self._one_epoch
        rng = np.random.default_rng(self.seed)
        samples = []
        for direction in _DIRECTIONS:
            losses = sample_losses(
                rng,
                self.num_samples,
                noise_multiplier=noise_multiplier,
                bins=self.bins,
                direction=direction,
                epochs=epochs,
                ranks=self.ranks,
                event_epsilon=event_epsilon if self._conditional else None,
            )
            samples.append((losses, self._event_probability(event_epsilon, direction)))
        return samples

    def _event_probability(self, event_epsilon: float, direction: Direction) -> float:
        if not self._conditional:
            return 1.0
        noise_multiplier, _ = self._one_epoch
        return event_probability(
            event_epsilon, noise_multiplier=noise_multiplier, bins=self.bins, direction=direction
        )

    def _least_upper(self, event_epsilon: float) -> float:
        """Returns what delta's upper end cannot go below, even if no loss exceeded epsilon."""
        probability = max(self._event_probability(event_epsilon, way) for way in _DIRECTIONS)
        return probability * kl_upper_bound(0.0, self.num_samples, self.beta)

    def _upper(self, samples: list[tuple[Array, float]], epsilon: float) -> float:
        return max(
            hockey_stick_upper_bound(
                losses,
                epsilon,
                beta=self.beta,
                event_probability=probability,
                inequality=self.inequality,
            )
            for losses, probability in samples
        )

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds δ at `epsilon` >= 0; `tolerance` is not used."""
        [(_, bound)] = self.estimates([epsilon])
        return bound

    def estimates(self, epsilons: Sequence[float]) -> Iterator[tuple[Estimate, Bound]]:
        """Yields, at each of `epsilons` >= 0, the samples' mean and the bounds on δ.

        The mean is of the direction of which it is larger. The confidence is that of each answer by
        itself. Without importance sampling one set of samples serves all.
        """
        samples: list[tuple[Array, float]] = []
        for epsilon in epsilons:
            if self._conditional or not samples:
                samples = self._samples(epsilon)
            values = (share * hockey_stick_values(losses, epsilon) for losses, share in samples)
            mean = max(float(np.mean(found)) for found in values)
            lower, upper = self._lower(epsilon), self._upper(samples, epsilon)
            bound = Bound(lower, min(1.0, max(lower, upper)), 1.0 - self.beta)
            yield Estimate(mean, "the mean of samples"), bound

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest ε >= 0 at `delta` in (0, 1); `tolerance` is not used."""
        check_delta(delta)
        lower = epsilon_from_delta(lambda e: 1.0, self._lower, delta, resolution=1e-9).lower
        if self._least_upper(lower) > delta:
            return Bound(lower, math.inf, 1.0 - self.beta, TOO_FEW)
        samples = self._samples(lower)
        found = epsilon_from_delta(
            lambda e: self._upper(samples, max(e, lower)), lambda e: 0.0, delta, resolution=1e-9
        )
        note = "" if found.upper < math.inf else TOO_FEW
        return Bound(lower, max(lower, found.upper), 1.0 - self.beta, note)
