"""Builds the mechanism of a run whose settings are chosen.

`dpsgd.runs.resolve` chooses the settings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from accounting import Bound, PrivacyProfile, calibrate
from accounting.profile import EPSILON_TOLERANCE
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.core.queries import FullSums
from dpsgd.runs.spec import Banded, NoiseMultiplier, NonPrivate, RunSpec, TargetEpsilon
from dpsgd.runs.support import conflict_of, with_separation
from samplers import BatchSampler, Population
from samplers.settings import SAMPLERS, SamplerSettings

_ABOUT = 0.05
"""Tolerance of the epsilon that determines the noise of calibration sums."""

_LEAST = 1e-6
"""Smallest epsilon of a calibration, at which no number of rows is enough."""


class ResolvedRun(NamedTuple):
    """A run without open choices; the size of its noise is open before `scaled`."""

    spec: RunSpec
    """Resolved settings, whose delta is a number."""
    mechanism: Mechanism
    """Sampler, noise and clipping norm, which determine the guarantee."""
    chosen: dict[str, Any] = {}  # noqa: RUF012
    """Choices and reasons, as JSON values: "settings" by option, "tables" and "noise" if they were
    open, and "warm" if an earlier model lowered the learning rate."""

    @property
    def delta(self) -> float:
        """Delta of the guarantee."""
        assert isinstance(self.spec.delta, float), "callers replace it by `delta_of`"
        return self.spec.delta


def build_sampler(spec: RunSpec, population: Population) -> BatchSampler:
    """Returns the sampler of a run.

    It has the minimum separation that correlated noise needs.

    Args:
      spec: Settings of the run.
      population: Public facts about the rows.

    Raises:
      ValueError: if sampler, bands and data do not go together.
    """
    bands: Any = spec.noise.bands
    sampler = with_separation(spec.sampler, bands)
    try:
        if isinstance(sampler, SamplerSettings):
            built = sampler.build(population, spec.delta_of(population))
        else:
            built = sampler.with_population(population)
    except ValueError as error:
        if re.search("cycle.length", str(error)) and sampler != spec.sampler:
            raise ValueError(f"bands {bands}: {error}") from None
        raise
    if bands != "auto" and bands > built.separation > 1:
        raise ValueError(
            f"bands={bands} exceeds {built.separation}, the minimum separation of "
            f"{SAMPLERS.name_of(type(built))}; use fewer bands"
        )
    # `full_sums` checks the calibration.
    if conflict := conflict_of(dataclasses.replace(spec, calibration=None), built):
        raise ValueError(str(conflict))
    return built


def full_sums(spec: RunSpec, sampler: BatchSampler) -> FullSums | None:
    """Returns the full-batch queries of a run's calibration, or None.

    Args:
      spec: Settings of the run, whose delta is a number.
      sampler: Sampler of the run.

    Raises:
      ValueError: if the run cannot be calibrated, or calibration would not pay.
    """
    if spec.calibration in (None, "none"):
        return None
    if conflict := conflict_of(spec, sampler):
        raise ValueError(f"{conflict.rule.reason} (here one {sampler.unit})")
    goal, delta = spec.privacy, spec.delta
    assert not isinstance(goal, NonPrivate), "refused by the table"
    assert isinstance(delta, float), "callers replace it by `delta_of`"
    from dpsgd.engine.calibration import calibration_sums

    if isinstance(goal, TargetEpsilon):
        budget = goal.epsilon
    else:
        budget = sampler.privacy(goal.noise_multiplier).epsilon(delta, _ABOUT).upper
    if math.isinf(budget):
        raise ValueError("no finite epsilon is certified for the run")
    kind, budget = spec.calibration, max(budget, _LEAST)
    sums = calibration_sums(kind, sampler.num_examples, epsilon=budget, delta=delta)
    if sums is None:
        raise ValueError(
            f"on {sampler.num_examples:,} training rows, at epsilon {budget:.3g}, the "
            "calibration's noise adds more error than calibration removes"
        )
    return sums


def unscaled(spec: RunSpec, sampler: BatchSampler, sums: FullSums | None) -> Mechanism:
    """Returns the mechanism of a run; a private one has noise multiplier and clipping norm 1.

    Args:
      spec: Settings of the run; the noise is independent while its bands are open.
      sampler: Sampler of the run.
      sums: Full-batch queries of the run's calibration, or None.
    """
    if not spec.private:
        return Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=math.inf)
    law = spec.noise.law if isinstance(spec.noise, Banded) else spec.noise
    return Mechanism(sampler, 1.0, 1.0, law or Independent(), sums)


def privacy_with(mechanism: Mechanism, noise_multiplier: float) -> PrivacyProfile:
    """Returns the privacy profile of a mechanism under another noise multiplier.

    >>> from samplers import Deterministic
    >>> mechanism = Mechanism(Deterministic(10_000, batch_size=100), 1.0, 1.0)
    >>> epsilons = [privacy_with(mechanism, sigma).epsilon(1e-5).upper for sigma in (1.0, 2.0)]
    >>> epsilons[0] > epsilons[1]
    True

    Args:
      mechanism: Sampler, noise law and full-batch queries.
      noise_multiplier: Noise multiplier of the steps.
    """
    if mechanism.full_sums is None:  # calibration tries multipliers beyond those of a run
        return mechanism.noise.privacy(mechanism.sampler, noise_multiplier)
    return dataclasses.replace(mechanism, noise_multiplier=noise_multiplier).privacy()


@functools.lru_cache
def _smallest_noise(
    goal: NoiseMultiplier | TargetEpsilon, delta: float, mechanism: Mechanism
) -> float:
    """Returns the smallest sufficient noise multiplier, cached for equal runs."""
    if isinstance(goal, NoiseMultiplier):
        return goal.noise_multiplier
    privacy = functools.partial(privacy_with, mechanism)
    if goal.optimistic:
        return calibrate(lambda sigma: LowerEnd(privacy(sigma)), epsilon=goal.epsilon, delta=delta)
    return calibrate(privacy, epsilon=goal.epsilon, delta=delta)


@dataclass(frozen=True)
class LowerEnd:
    """Lower ends of a profile as exact values, only for choosing noise."""

    profile: PrivacyProfile

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        return Bound(*2 * (self.profile.delta(epsilon, tolerance).lower,))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        return Bound(*2 * (self.profile.epsilon(delta, tolerance).lower,))


def scaled(run: ResolvedRun) -> ResolvedRun:
    """Returns a run with the smallest noise that meets its privacy goal.

    Args:
      run: Run whose mechanism is from `unscaled`.
    """
    norm: Any = run.spec.l2_clip_norm
    if isinstance(goal := run.spec.privacy, NonPrivate):
        return run
    sigma = _smallest_noise(goal, run.delta, run.mechanism)
    scaled = dataclasses.replace(run.mechanism, noise_multiplier=sigma, l2_clip_norm=norm)
    return run._replace(mechanism=scaled)


def resolved(spec: RunSpec, population: Population) -> ResolvedRun:
    """Returns a run whose noise multiplier is found.

    Args:
      spec: Settings; only the noise multiplier may be open.
      population: Public facts about the rows.

    Raises:
      ValueError: if the options do not go together, or no noise meets the target.
    """
    spec = dataclasses.replace(spec, delta=spec.delta_of(population))
    sampler = build_sampler(spec, population)
    try:
        sums = full_sums(spec, sampler)
    except ValueError as error:
        raise ValueError(impossible(spec.calibration, error)) from None
    return scaled(ResolvedRun(spec, unscaled(spec, sampler, sums)))


def impossible(calibration: str | None, why: object) -> str:
    """Returns the message that refuses a calibration.

    Args:
      calibration: Kind of the calibration that was asked for.
      why: Reason in words.
    """
    return f"calibration={calibration} is not possible: {why}; leave it out"
