"""Checks the stated privacy costs of noises and samplers from other packages."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from accounting import PoissonProfile
from accounting.profile import EPSILON_TOLERANCE, Bound, wanted_width
from dpsgd.audit.report import CheckResult
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from samplers import BatchSampler, FullBatch
from samplers.base import stated_law
from samplers.settings import KINDS
from samplers.truncation import CappedBatchSampler

PRICE = "the cost of a noise is proved, and at least that of its bands and columns"

_DELTA = 1e-6
_EXAMPLES = 64  # examples whose rates are compared


def own_price_checks(mechanism: Mechanism, delta: float) -> list[CheckResult]:
    """Checks the costs that a run's own noise and sampler state, at its delta.

    Args:
      mechanism: Mechanism of the run.
      delta: Delta of the guarantee.
    """
    sampler, noise, sigma = mechanism.sampler, mechanism.noise, mechanism.noise_multiplier
    checks = []
    if type(noise) not in NOISES.built_in.values():
        checks.append(price_check(noise, [(sampler, sigma)], delta))
    if type(sampler) not in (*KINDS, FullBatch):
        checks += cost_checks(sampler, sigma, delta)
    return checks


def price_check(
    noise: Noise, runs: Iterable[tuple[BatchSampler, float]], delta: float = _DELTA
) -> CheckResult:
    """Checks that a noise's own cost is not below `Noise`'s.

    `Noise` proves its cost from the bands and columns of the noise matrix. Compared are a run, a
    run as one segment, two segments, a part of an epoch, and a run without its ends.

    Args:
      noise: Noise whose `privacy` and `privacy_of` are checked.
      runs: Samplers and noise multipliers under which costs are compared.
      delta: Delta at which costs are compared.
    """
    try:
        fault, detail = _underpriced(noise, runs, delta)
    except Exception as error:  # what the user's class raises
        fault, detail = True, f"{type(error).__name__}: {error}"
    return CheckResult(PRICE, not fault, detail)


def _underpriced(
    noise: Noise, runs: Iterable[tuple[BatchSampler, float]], delta: float
) -> tuple[bool, str]:
    """Returns whether a cost is below `Noise`'s and which costs were compared."""
    details = []
    for sampler, sigma in runs:
        run, (segment, inner) = range(sampler.num_steps), _partial(sampler)
        proved = Noise.privacy(noise, sampler, sigma)
        costs = {
            "a run": (noise.privacy(sampler, sigma), proved),
            "a run as one segment": (noise.privacy_of(sampler, sigma, [run]), proved),
        }
        for segments in ([run, run], [segment], [inner]):
            name = "two segments" if segments[1:] else f"the segment {segments[0]}"
            costs[name] = (
                noise.privacy_of(sampler, sigma, segments),
                Noise.privacy_of(noise, sampler, sigma, segments),
            )
        where = f"under {type(sampler).__name__} with noise multiplier {sigma:.4g}"
        for name, profiles in costs.items():
            stated, bound = (profile.epsilon(delta) for profile in profiles)
            if stated.confidence != 1 or bound.upper > _above(stated):
                return True, f"{name} {where}: {stated:.4g}, and at least {bound:.4g}"
        details.append(where)
    return False, "; ".join(details)


def cost_checks(
    sampler: BatchSampler, noise_multiplier: float, delta: float = _DELTA
) -> list[CheckResult]:
    """Checks that a sampler's costs are proved, and monotone in noise and steps.

    Args:
      sampler: Sampler whose `privacy` and `privacy_of` are checked.
      noise_multiplier: Noise multiplier of the costs.
      delta: Delta of the costs.
    """
    sigma, run, (segment, inner) = noise_multiplier, range(sampler.num_steps), _partial(sampler)
    profiles = [sampler.privacy(sigma), sampler.privacy(2 * sigma)]
    profiles += [
        sampler.privacy_of(sigma, steps) for steps in ([segment], [inner], [run], [run, run])
    ]
    costs = full_run, quiet, short, long, once, twice = [
        profile.epsilon(delta) for profile in profiles
    ]
    proved = all(0 <= cost.lower <= cost.upper and cost.confidence == 1 for cost in costs)
    falls, grows = quiet.upper <= _above(full_run), full_run.lower <= once.upper <= _above(twice)
    least = _least_cost(sampler, sigma, segment, delta)
    grows &= least.lower <= short.upper <= _above(long) and long.lower <= once.upper
    return [
        CheckResult("its costs are proved intervals", proved, f"{full_run}"),
        CheckResult("its cost falls with more noise", falls, f"{full_run}, then {quiet}"),
        CheckResult(
            "its cost grows with the steps", grows,
            f"at least {least}: {segment} {short}, {inner} {long}, {run} {once}, twice {twice}",
        ),
    ]  # fmt: skip


def _partial(sampler: BatchSampler) -> tuple[range, range]:
    """Returns the middle of the first epoch, and a run without its ends, which lie in epochs."""
    third = sampler.steps_per_epoch // 3
    last = max(third + 1, sampler.num_steps - third)
    return range(third, third + max(1, third)), range(third, last)


def _least_cost(sampler: BatchSampler, sigma: float, segment: range, delta: float) -> Bound:
    """Bounds the cost of a part of an epoch: of its likeliest example, beside zero gradients.

    The sampler's law has that example's rate; steps of an epoch that has each example once count
    as one.
    """
    if (law := stated_law(sampler)) is None:
        return Bound(0.0, 0.0)
    examples = np.arange(min(sampler.num_examples, _EXAMPLES))
    rates = law.rate(examples[:, None], np.array(segment))
    rates = np.broadcast_to(rates, (examples.size, len(segment)))
    rate = float(rates.max())
    steps = 1 if law.once else int((rates == rate).sum(axis=1).max())
    if isinstance(sampler, CappedBatchSampler) and sampler.truncates:
        rate *= -math.expm1(sampler.cap(sampler.shard_batch_size).log_dropped_if_drawn())
    return PoissonProfile(sigma, rate, steps).epsilon(delta) if rate > 0 else Bound(0.0, 0.0)


def _above(cost: Bound) -> float:
    return cost.upper + wanted_width(EPSILON_TOLERANCE, cost.upper)
