"""Checks the stated privacy costs of noises and samplers from other packages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from accounting import BallsAndBinsProfile, PoissonProfile, PrivacyProfile, ShuffleProfile
from accounting.profile import EPSILON_TOLERANCE, Bound, wanted_width
from dpsgd.audit.report import CheckResult
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from samplers import BatchSampler
from samplers.base import stated_law
from samplers.row_law import RandomOrders, TreeDraws
from samplers.settings import SAMPLERS
from samplers.tree import TreeShape
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
            compared: dict[str, tuple[list[range], bool]] = {
                "the run twice": ([run, run], False),
                "the run twice on the same rows": ([run, run], True),
                f"the segment {segment}": ([segment], False),
                f"the segment {inner}": ([inner], False),
            }
            for name, (steps, same_rows) in compared.items():
                costs[name] = (
                    noise.privacy_of(sampler, sigma, steps, same_rows=same_rows),
                    Noise.privacy_of(noise, sampler, sigma, steps, same_rows=same_rows),
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
    try:
        profiles = [sampler.privacy(sigma), sampler.privacy(2 * sigma)]
        profiles += [sampler.privacy_of(sigma, [steps]) for steps in (segment, inner, run)]
        profiles += [
            sampler.privacy_of(sigma, [run, run], same_rows=same) for same in (False, True)
        ]
        costs = [profile.epsilon(delta) for profile in profiles]
        least_short = _least_cost(sampler, sigma, segment, 1, delta)
        epoch = range(sampler.steps_per_epoch)
        least = _least_cost(sampler, sigma, epoch, sampler.epochs, delta)
    except Exception as error:  # what the user's class raises
        return [CheckResult(COSTS, False, f"{type(error).__name__}: {error}")]
    full_run, quiet, short, long, once, *twice = costs
    proved = all(0 <= cost.lower <= cost.upper and cost.confidence == 1 for cost in costs)
    falls = quiet.upper <= _above(full_run)
    grows = least_short.lower <= short.upper <= _above(long) and long.lower <= once.upper
    grows &= all(once.upper <= _above(cost) for cost in twice)
    lower = max(full_run.lower, once.lower, long.lower, least.lower)
    grows &= lower <= min(full_run.upper, once.upper)
    return [
        CheckResult(COSTS, proved, f"{full_run}"),
        CheckResult("its cost falls with more noise", falls, f"{full_run}, then {quiet}"),
        CheckResult(
            "its cost grows with the steps", grows,
            f"{segment} {short} (at least {least_short}), {inner} {long}, {run} {once} (at least "
            f"{least}), the run {full_run}, twice {twice[0]}, of the same rows {twice[1]}",
        ),
    ]  # fmt: skip


def _partial(sampler: BatchSampler) -> tuple[range, range]:
    """Returns steps inside the first epoch, and the run without a third of an epoch at each end."""
    third = sampler.steps_per_epoch // 3
    last = max(third + 1, sampler.num_steps - third)
    return range(third, third + max(1, third)), range(third, last)


def _least_cost(
    sampler: BatchSampler, sigma: float, steps: range, epochs: int, delta: float
) -> Bound:
    """Returns a lower bound on the cost of some steps in each of the first epochs.

    It is the cost of the example with the highest rate, in the steps of this rate alone, if all
    other gradients are 0. Orders of whole epochs have their own bound. The shape of a tree has no
    examples, and its bound is 0.

    Args:
      sampler: Sampler of the run.
      sigma: Noise multiplier.
      steps: Steps of an epoch.
      epochs: Number of epochs.
      delta: Delta of the cost.
    """
    law = stated_law(sampler)
    if law is None or (isinstance(law, TreeDraws) and isinstance(law.tree, TreeShape)):
        return Bound(0.0, 0.0)
    examples = np.unique(np.linspace(0, sampler.num_examples - 1, _EXAMPLES).astype(np.int64))
    compared = np.array(steps[:: -(-len(steps) // _STEPS)])
    rates = law.rate(examples[:, None], compared)
    rates = np.broadcast_to(rates, (examples.size, compared.size))
    rate, share = float(rates.max()), _kept_share(sampler)
    if rate == 0:
        return Bound(0.0, 0.0)
    count = int((rates == rate).sum(axis=1).max())
    cut = epochs * count * rate * (1 - share)  # probability that a participation is cut, at most
    if cut < delta:
        share, delta = 1.0, delta + cut
    if share == 1 and isinstance(law, RandomOrders) and len(steps) == law.steps_per_epoch:
        order: Any = "redrawn" if law.redrawn else "fixed"
        return ShuffleProfile(sigma, len(steps), epochs, order=order).epsilon(delta)
    if not law.redrawn:
        if share == 1:  # all epochs have the same rows, so that their mean has less noise
            sigma /= math.sqrt(epochs)
        epochs = 1
    profile: PrivacyProfile
    if law.once and share == 1 and math.isclose(rate * count, 1.0):
        profile = BallsAndBinsProfile(sigma, count, epochs)
    else:
        profile = PoissonProfile(sigma, rate * share, epochs * (1 if law.once else count))
    return profile.epsilon(delta)


def _kept_share(sampler: BatchSampler) -> float:
    """Returns at most the probability that a drawn row is not cut off by the cap."""
    cap = sampler.shard_batch_size
    if isinstance(sampler, CappedBatchSampler):
        if not sampler.truncates:
            return 1.0
        return -math.expm1(sampler.cap(cap).log_dropped_if_drawn())
    if type(sampler).passes is not BatchSampler.passes:
        # It may cut batches to the cap: of X rows, of mean <= 1 + b, a share min(1, cap / X) stays.
        return cap / (cap + 1 + sampler.expected_batch_size / sampler.num_shards)
    return 1.0


def _above(cost: Bound) -> float:
    return cost.upper + wanted_width(EPSILON_TOLERANCE, cost.upper)
