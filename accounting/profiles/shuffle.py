"""Shuffling: each epoch a uniformly random order, cut into batches; bounds from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import scipy

from accounting.algebra.composition import composed
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import release_ratio
from accounting.algebra.refinement import GridError, Point, largest_delta
from accounting.checks import Noise, Release
from accounting.max_events import (
    Epoch,
    maximum_buckets,
    sum_of_maxima_lower_bound,
)
from accounting.profile import Bound, Curve, Question
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import WithRelease, as_redrawn, known_order
from accounting.records import Count

_SHIFTS = 2.0, 1.0
"""Mean of the example's coordinate under P and under Q."""
_GRID = 16_001
_BUCKET_STEP = 0.005
_UNKNOWN = "no tight accounting of shuffled batches is known"


@dataclass(frozen=True)
class ShuffleProfile(WithRelease):
    """The profile of shuffled batches, between the best known lower and upper bounds.

    No tight accounting of shuffling is known. With T = `steps_per_epoch`, s = `noise_multiplier`:

    - upper: a shuffled order is a mixture of deterministic ones, so that the deterministic order's
      profile holds, E = `epochs` epochs being one at s / sqrt(E). It is never Poisson's.
    - lower: concrete neighbouring data sets, and balls-and-bins' certified lower bound
      (docs/explanation/lower-bounds-for-shuffled-batches.md).

    Attributes:
      noise_multiplier: s.
      steps_per_epoch: T >= 1.
      epochs: E >= 1.
      order: 'redrawn' ('dynamic' in the papers): every epoch draws a new order, and the epochs
        compose; 'fixed' ('persistent'): one random order is kept: one epoch at s / sqrt(E).
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Sources: Chua et al., "How Private are DP-SGD Implementations?", ICML 2024 (the pair and its
    events); "Scalable DP-SGD", NeurIPS 2024 (several epochs); "Balls-and-Bins Sampling for DP-SGD",
    AISTATS 2025, Proposition 3.3 (the order of the samplers).

    Raises:
      ValueError: If a number is out of range, or `order` is neither of both.
    """

    noise_multiplier: Noise
    steps_per_epoch: Count
    epochs: Count = 1
    order: Literal["redrawn", "fixed"] = "redrawn"
    release: Release = math.inf

    def answer(self, question: Question) -> Bound:
        """Answers by closed forms, and wide intervals' lower ends by grids."""
        known_order_bound = question.ask(
            known_order(self.noise_multiplier, self.epochs, self.release)
        )
        if self.steps_per_epoch == 1 or question.upper_only:
            return (
                known_order_bound
                if self.steps_per_epoch == 1
                else replace(known_order_bound, lower=0.0)
            )

        def proved(curve: Curve) -> float:
            return question.lower_end(curve, 1e-6)

        def wide(bound: Bound) -> bool:
            by_delta = question.wanted == "delta"
            return bound.width > (1e-3 * bound.lower if by_delta else question.width(bound))

        epoch, epochs = self._epochs()
        little_noise = proved(lambda e: sum_of_maxima_lower_bound(e, epoch, epochs))
        bound = Bound(little_noise, known_order_bound.upper)
        if wide(bound):
            bins = BallsAndBinsProfile(
                self.noise_multiplier, self.steps_per_epoch, self.epochs, self.order, self.release
            )
            lower = max(question.ask(bins).lower, proved(self._event_delta(question)))
            bound = bound.intersection(Bound(lower, math.inf))
        return replace(bound, note=_UNKNOWN) if wide(bound) else bound

    def _epochs(self) -> tuple[Epoch, int]:
        sigma, epochs = as_redrawn(self.noise_multiplier, self.epochs, self.order)
        return Epoch(sigma, self.steps_per_epoch), epochs

    def _event_delta(self, question: Question) -> Curve:
        """Lower bounds on delta by tests of max_t x_t, or of its values in several epochs.

        For several epochs the bounds are tight near the point of the question.
        """
        epoch, epochs = self._epochs()
        ratio = _one_epoch(epoch)
        if epochs == 1 and self.release == math.inf:
            return ratio.delta
        point = Point(question.at) if question.wanted == "epsilon" else Point(1.0, question.at)
        laws = [(ratio, epochs), *release_ratio(self.release, ratio)]
        try:
            return largest_delta(composed(laws, point))
        except GridError:
            return lambda epsilon: 0.0


@lru_cache(maxsize=16)
def _one_epoch(epoch: Epoch) -> LowerRatio:
    """Returns a lower likelihood ratio of max_t x_t of one epoch, in buckets."""
    # Values of c around those that max_t x_t takes under P and under Q.
    sigma = epoch.noise_multiplier
    low = sigma * float(scipy.special.ndtri_exp(-100.0 / epoch.bins))
    thresholds = np.linspace(low, max(_SHIFTS) + 14.0 * sigma, _GRID)
    (p, p_drift), (q, q_drift) = (maximum_buckets(epoch, thresholds, x) for x in _SHIFTS)
    # Log X of a bucket is contracted within this part of its deviation, 1/sigma.
    step = _BUCKET_STEP / sigma
    return LowerRatio.from_masses(p, q, step, drift=max(p_drift, q_drift))
