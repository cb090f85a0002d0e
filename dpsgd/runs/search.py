"""The noise multiplier of a run, and the full-batch sums of its Platt scaling, by search."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from accounting import (
    Bound,
    DataRelease,
    GaussianProfile,
    PrivacyProfile,
    calibrate,
    calibrate_advantage,
)
from accounting.profile import EPSILON_TOLERANCE
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.queries import FullSums
from dpsgd.noise.base import Independent, Noise
from dpsgd.runs.spec import NoiseMultiplier, TargetAdvantage, TargetEpsilon
from samplers import BatchSampler

Goal = NoiseMultiplier | TargetEpsilon | TargetAdvantage
"""What is asked of the privacy of a run that has any."""

_ABOUT = 0.05
"""How closely the epsilon is known that sums are chosen by."""

_LEAST = 1e-6
"""Epsilon at which no number of rows is enough."""


def privacy_with(
    sums: FullSums | None,
    sampler: BatchSampler,
    noise: Noise | None = None,
    released: DataRelease | None = None,
) -> Callable[[float], PrivacyProfile]:
    """Returns what a run costs by the noise multiplier of its steps, if it ends in `sums`.

    Args:
      sums: Over all rows, if it ends in some.
      sampler: Of its steps.
      noise: Its law; by default that of independent noise.
      released: What was released of the rows before, if anything.
    """
    law = noise or Independent()
    if sums is None and released is None:
        return functools.partial(law.privacy, sampler)
    return lambda sigma: Mechanism(sampler, sigma, 1.0, law, sums, released).privacy()


@functools.lru_cache
def smallest_noise(
    goal: Goal,
    delta: float,
    sampler: BatchSampler,
    noise: Noise,
    sums: FullSums | None,
    released: DataRelease | None = None,
) -> float:
    """Returns the smallest sufficient noise multiplier: once for all equal runs of a process.

    Args:
      goal: What suffices.
      delta: Of the guarantee.
      sampler: Of the steps.
      noise: Its law.
      sums: Over all rows, if the run ends in some.
      released: What was released of the rows before, if anything.

    Raises:
      ValueError: if no noise suffices.
    """
    if isinstance(goal, NoiseMultiplier):
        return goal.noise_multiplier
    privacy = privacy_with(sums, sampler, noise, released)
    if isinstance(goal, TargetAdvantage):
        return calibrate_advantage(privacy, advantage=goal.advantage)
    if goal.optimistic:
        return calibrate(lambda sigma: _LowerEnd(privacy(sigma)), epsilon=goal.epsilon, delta=delta)
    return calibrate(privacy, epsilon=goal.epsilon, delta=delta)


@dataclass(frozen=True)
class _LowerEnd:
    """The lower ends of a profile as if they were the truth: to choose noise by, nothing else."""

    profile: PrivacyProfile

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        return Bound(*2 * (self.profile.delta(epsilon, tolerance).lower,))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        return Bound(*2 * (self.profile.epsilon(delta, tolerance).lower,))


def platt(sampler: BatchSampler, delta: float, goal: Goal) -> FullSums:
    """Returns the sums over all rows for the Platt scaling of a run with this sampler.

    They are chosen by how much the run may cost.

    Args:
      sampler: Of the run.
      delta: Of its guarantee.
      goal: The noise of its steps, or a target of the whole.

    Raises:
      ValueError: if they cannot be had, or would not pay; the line says why.
    """
    from dpsgd.engine.platt import platt_sums

    if isinstance(goal, TargetEpsilon):
        budget = goal.epsilon
    elif isinstance(goal, TargetAdvantage):  # that of the Gaussian release of this advantage
        sigma = calibrate_advantage(GaussianProfile, advantage=goal.advantage)
        budget = GaussianProfile(sigma).epsilon(delta).upper
    else:
        budget = sampler.privacy(goal.noise_multiplier).epsilon(delta, _ABOUT).upper
    if math.isinf(budget):
        raise ValueError("no finite epsilon is certified for the run")
    if (sums := platt_sums(sampler.num_examples, epsilon=max(budget, _LEAST), delta=delta)) is None:
        raise ValueError(
            f"on {sampler.num_examples:,} training rows, at epsilon {budget:.3g}, its noise would "
            "cost more than it mends"
        )
    return sums
