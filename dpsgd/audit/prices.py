"""Checks the stated privacy costs of noises and samplers from other packages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from accounting import PoissonProfile
from accounting.profile import EPSILON_TOLERANCE, Bound, wanted_width
from dpsgd.audit.report import CheckResult
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from samplers import BatchSampler
from samplers.base import stated_law
from samplers.settings import SAMPLERS
from samplers.truncation import CappedBatchSampler

PRICE = "the cost of a noise is proved, and at least that of its bands and columns"
COSTS = "its costs are proved intervals"

DELTA = 1e-6
"""Default delta at which costs are compared."""

_EXAMPLES, _STEPS = 64, 4096  # most examples and steps whose rates are compared


def own_price_checks(
    noise: Noise, runs: Sequence[tuple[BatchSampler, float]], delta: float
) -> list[CheckResult]:
    """Checks the costs that a noise and samplers from outside the package state.

    Args:
      noise: Noise of the runs.
      runs: Samplers and noise multipliers of the runs.
      delta: Delta of the guarantee.
    """
    checks = [price_check(noise, runs, delta)] if NOISES.is_own(noise) else []
    for sampler, sigma in runs:
        if SAMPLERS.is_own(sampler):
            checks += cost_checks(sampler, sigma, delta)
    return checks


def price_check(
    noise: Noise, runs: Iterable[tuple[BatchSampler, float]], delta: float = DELTA
) -> CheckResult:
    """Checks that a noise's own cost is not below `Noise`'s.

    `Noise` proves its cost from the bands and columns of the noise matrix. For a noise that
    overrides `privacy` or `privacy_of`, costs are compared for a run, the run as one segment, the
    run twice, a part of an epoch, and the run without its ends.

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
    kind, details = type(noise), []
    for sampler, sigma in runs:
        run, (segment, inner) = range(sampler.num_steps), _partial(sampler)
        stated, proved = noise.privacy(sampler, sigma), Noise.privacy(noise, sampler, sigma)
        costs = {} if kind.privacy is Noise.privacy else {"a run": (stated, proved)}
        if kind.privacy_of is not Noise.privacy_of:
            costs["a run as one segment"] = noise.privacy_of(sampler, sigma, [run]), proved
            for segments in ([run, run], [segment], [inner]):
                name = "the run twice" if segments[1:] else f"the segment {segments[0]}"
                costs[name] = (
                    noise.privacy_of(sampler, sigma, segments),
                    Noise.privacy_of(noise, sampler, sigma, segments),
                )
        where = f"under {type(sampler).__name__} with noise multiplier {sigma:.4g}"
        for name, profiles in costs.items():
            cost, least = (profile.epsilon(delta) for profile in profiles)
            if cost.confidence != 1 or least.upper > _above(cost):
                return True, f"{name} {where}: stated {cost:.4g}, proved {least:.4g}"
        details.append(where)
    return False, "; ".join(details)


def cost_checks(
    sampler: BatchSampler, noise_multiplier: float, delta: float = DELTA
) -> list[CheckResult]:
    """Checks that a sampler's costs are proved, and monotone in noise and steps.

    Args:
      sampler: Sampler whose `privacy` and `privacy_of` are checked.
      noise_multiplier: Noise multiplier of the costs.
      delta: Delta of the costs.
    """
    sigma, run, (segment, inner) = noise_multiplier, range(sampler.num_steps), _partial(sampler)
    attempts = [segment], [inner], [run], [run, run]
    try:
        profiles = [sampler.privacy(sigma), sampler.privacy(2 * sigma)]
        profiles += [sampler.privacy_of(sigma, steps) for steps in attempts]
        costs = [profile.epsilon(delta) for profile in profiles]
        least = _least_cost(sampler, sigma, segment, delta)
    except Exception as error:  # what the user's class raises
        return [CheckResult(COSTS, False, f"{type(error).__name__}: {error}")]
    full_run, quiet, short, long, once, twice = costs
    proved = all(0 <= cost.lower <= cost.upper and cost.confidence == 1 for cost in costs)
    falls, grows = quiet.upper <= _above(full_run), full_run.lower <= once.upper <= _above(twice)
    grows &= least.lower <= short.upper <= _above(long) and long.lower <= once.upper
    return [
        CheckResult(COSTS, proved, f"{full_run}"),
        CheckResult("its cost falls with more noise", falls, f"{full_run}, then {quiet}"),
        CheckResult(
            "its cost grows with the steps", grows,
            f"{segment} {short} (at least {least}), {inner} {long}, {run} {once}, twice {twice}",
        ),
    ]  # fmt: skip


def _partial(sampler: BatchSampler) -> tuple[range, range]:
    """Returns steps inside the first epoch, and the run without a third of an epoch at each end."""
    third = sampler.steps_per_epoch // 3
    last = max(third + 1, sampler.num_steps - third)
    return range(third, third + max(1, third)), range(third, last)


def _least_cost(sampler: BatchSampler, sigma: float, segment: range, delta: float) -> Bound:
    """Returns a lower bound on the cost of a segment of one epoch.

    It is the cost of the example with the highest rate if all other gradients are 0: of one step if
    an epoch draws each example once, else of all steps with that rate.
    """
    if (law := stated_law(sampler)) is None:
        return Bound(0.0, 0.0)
    examples = np.unique(np.linspace(0, sampler.num_examples - 1, _EXAMPLES).astype(np.int64))
    compared = np.array(segment[:: -(-len(segment) // _STEPS)])
    rates = law.rate(examples[:, None], compared)
    rates = np.broadcast_to(rates, (examples.size, compared.size))
    rate = float(rates.max())
    steps = 1 if law.once else int((rates == rate).sum(axis=1).max())
    cap = sampler.shard_batch_size
    if isinstance(sampler, CappedBatchSampler):
        if sampler.truncates:
            rate *= -math.expm1(sampler.cap(cap).log_dropped_if_drawn())
    elif type(sampler).passes is not BatchSampler.passes:
        # It may cut batches to the cap: of X rows, of mean <= 1 + b, a share min(1, cap / X) stays.
        rate *= cap / (cap + 1 + sampler.expected_batch_size / sampler.num_shards)
    return PoissonProfile(sigma, rate, steps).epsilon(delta) if rate > 0 else Bound(0.0, 0.0)


def _above(cost: Bound) -> float:
    return cost.upper + wanted_width(EPSILON_TOLERANCE, cost.upper)
