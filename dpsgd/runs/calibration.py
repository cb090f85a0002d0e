"""Whether a run ends in a calibration of its model, and by which sums: decided before it begins."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from samplers import BatchSampler, Population

if TYPE_CHECKING:
    from accounting import PrivacyProfile
    from dpsgd.core.mechanism import Mechanism
    from dpsgd.core.queries import FullSums
    from dpsgd.engine.queries import Refinement
    from dpsgd.noise.base import Noise
    from dpsgd.runs.config import RunConfig

_ABOUT = 0.05
"""How closely the epsilon is known that sums are chosen by."""

_LEAST = 1e-6
"""Epsilon at which no number of rows is enough."""


def decided(
    task: Any,
    config: RunConfig,
    population: Population,
    progress: Callable[[str], None] = lambda line: None,
) -> RunConfig:
    """Returns a configuration that says whether its run is calibrated: by default, if it can be.

    Args:
      task: What is trained.
      config: As it was asked for.
      population: What is public of the training rows.
      progress: Called with one line of text, if the task offers what its run cannot have.

    Raises:
      ValueError: if it is asked for and cannot be had.
    """
    if config.calibration == "none":
        return config
    why = _why_not(task, config, population)
    if why and config.calibration:
        raise ValueError(f"calibration {config.calibration} cannot be had: {why}; leave it out")
    if why and _offers(task) and not config.non_private:
        progress(f"no calibration: {why}")
    return dataclasses.replace(config, calibration="none" if why else "platt")


def _why_not(task: Any, config: RunConfig, population: Population) -> str:
    """Returns why a run cannot be calibrated; empty if it can."""
    if config.non_private:
        return "it mends what clipping does to predictions, and without privacy nothing is clipped"
    if not _offers(task):
        return f"the task, a {type(task).__name__}, offers none (see dpsgd.runs.task.Task)"
    try:
        config.full_sums(config.build_sampler(population), config.delta(population))
    except ValueError as error:
        return str(error)
    return ""


def refinement_of(task: Any, mechanism: Mechanism) -> Refinement | None:
    """Returns what a task makes of the sums that its run ends in, if there are any.

    Raises:
      ValueError: if it makes nothing of them.
    """
    if mechanism.full_sums is None:
        return None
    if not _offers(task):
        raise ValueError(
            f"the run ends in {mechanism.full_sums}, of which its task, a {type(task).__name__}, "
            "makes nothing: it has no calibration() (see dpsgd.runs.task.Task)"
        )
    return task.calibration()


def _offers(task: Any) -> bool:
    return callable(getattr(task, "calibration", None))


def platt(
    sampler: BatchSampler,
    delta: float,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_advantage: float | None = None,
) -> FullSums:
    """Returns the sums over all rows for the Platt scaling of a run with this sampler.

    They are chosen by how much the run may cost, of which one is said: its noise, or a target.

    Args:
      sampler: Of the run.
      delta: Of its guarantee.
      noise_multiplier: Of its steps.
      target_epsilon: Of the whole.
      target_advantage: Of a membership attack on the whole.

    Raises:
      ValueError: if they cannot be had, or would not pay; the line says why.
    """
    from accounting import GaussianProfile, calibrate_advantage
    from dpsgd.engine.platt import platt_sums

    if sampler.unit != "example":
        raise ValueError(f"its sums clip each row by itself, and a {sampler.unit} is protected")
    if target_epsilon is not None:
        budget = target_epsilon
    elif target_advantage is not None:  # that of the Gaussian release which lets as much be done
        sigma = calibrate_advantage(GaussianProfile, advantage=target_advantage)
        budget = GaussianProfile(sigma).epsilon(delta).upper
    else:
        assert noise_multiplier is not None, "one of the three is given"
        budget = sampler.privacy(noise_multiplier).epsilon(delta, _ABOUT).upper
    if math.isinf(budget):
        raise ValueError("no finite epsilon is certified for the run")
    if (sums := platt_sums(sampler.num_examples, epsilon=max(budget, _LEAST), delta=delta)) is None:
        raise ValueError(
            f"on {sampler.num_examples:,} training rows, at epsilon {budget:.3g}, its noise would "
            "cost more than it mends"
        )
    return sums


def privacy_with(
    sums: FullSums | None, sampler: BatchSampler, noise: Noise | None = None
) -> Callable[[float], PrivacyProfile]:
    """Returns what a run costs by the noise multiplier of its steps, if it ends in `sums`.

    Args:
      sums: Over all rows, if it ends in some.
      sampler: Of its steps.
      noise: Its law; by default that of independent noise.
    """
    from dpsgd.core.mechanism import Mechanism
    from dpsgd.noise.base import Independent

    law = noise or Independent()
    if sums is None:
        return functools.partial(law.privacy, sampler)
    return lambda sigma: Mechanism(sampler, sigma, 1.0, law, sums).privacy()
