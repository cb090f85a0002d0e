"""Checks the stated privacy costs of noises and samplers from other packages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from accounting import (
    BallsAndBinsProfile,
    PoissonProfile,
    PrivacyProfile,
    ShuffleProfile,
    UserPoissonProfile,
)
from accounting.profile import EPSILON_TOLERANCE, Bound, wanted_width
from dpsgd.audit.report import CheckResult
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from samplers import BatchSampler, UserPoisson
from samplers.base import stated_law
from samplers.row_law import IndependentRows, RandomOrders, RowLaw, TreeDraws
from samplers.settings import SAMPLERS
from samplers.tree import TreeShape
from samplers.truncation import CappedBatchSampler

PRICE = "the cost of a noise is proved, and at least that of its bands and columns"
COSTS = "the sampler's costs are proved intervals"
GROWTH = "the sampler's cost grows with the steps, and is at least its law's"

DELTA = 1e-6
"""Default delta at which costs are compared."""

_STEPS, _RATES = 4096, 2**22  # most steps and entries whose rates are compared


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
        setting = f"under {type(sampler).__name__} with noise multiplier {sigma:.4g}"
        for name, profiles in costs.items():
            cost, least = (profile.epsilon(delta) for profile in profiles)
            if cost.confidence != 1 or least.upper > _above(cost):
                return True, f"{name} {setting}: stated {cost:.4g}, proved {least:.4g}"
        details.append(setting)
    return False, "; ".join(details)


def cost_checks(
    sampler: BatchSampler, noise_multiplier: float, delta: float = DELTA
) -> list[CheckResult]:
    """Checks that a sampler's costs are proved, monotone, and at least its law's.

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
        law, epoch = stated_law(sampler), range(sampler.steps_per_epoch)
        least_short, least, least_twice = (
            _least_cost(sampler, law, sigma, taken, delta)
            for taken in (
                _Taken(segment),
                _Taken(epoch, sampler.epochs),
                _Taken(epoch, sampler.epochs, 2),
            )
        )
    except Exception as error:  # what the user's class raises
        return [CheckResult(COSTS, False, f"{type(error).__name__}: {error}")]
    full_run, quiet, short, long, once, *twice = costs
    proved = all(0 <= cost.lower <= cost.upper and cost.confidence == 1 for cost in costs)
    falls = quiet.upper <= _above(full_run)
    grows = least_short.lower <= short.upper <= _above(long) and long.lower <= once.upper
    grows &= all(max(once.upper, least_twice.lower) <= _above(cost) for cost in twice)
    lower = max(full_run.lower, once.lower, long.lower, least.lower)
    grows &= lower <= min(full_run.upper, once.upper)
    return [
        CheckResult(COSTS, proved, f"{full_run}"),
        CheckResult("the sampler's cost falls with more noise", falls, f"{full_run}, then {quiet}"),
        CheckResult(
            GROWTH, grows,
            f"part of an epoch {short} (law: {least_short}), the run without its ends {long}, the "
            f"run as one segment {once} (law: {least}), the run {full_run}, the run twice "
            f"{twice[0]} (law: {least_twice}), the run twice on the same rows {twice[1]}",
        ),
    ]  # fmt: skip


def _partial(sampler: BatchSampler) -> tuple[range, range]:
    """Returns steps inside the first epoch, and the run without a third of an epoch at each end."""
    third = sampler.steps_per_epoch // 3
    last = max(third + 1, sampler.num_steps - third)
    return range(third, third + max(1, third)), range(third, last)


class _Taken(NamedTuple):
    """Counted steps: `steps` of each of the first `epochs`, in `runs` independent runs."""

    steps: range
    epochs: int = 1
    runs: int = 1


def _least_cost(
    sampler: BatchSampler, law: RowLaw | None, sigma: float, taken: _Taken, delta: float
) -> Bound:
    """Returns a lower bound on the cost of the counted steps; 0 if none is known.

    None is known without a law, and for the shape of a unit tree. The bound is the cost of the
    example with the highest rate, in the steps in which it has that rate, if all other gradients
    are 0. A user has several such examples. Random orders of whole epochs have a separate bound.
    Profiles of this package price the bound, not the methods of the sampler.

    Args:
      sampler: Sampler of the run.
      law: Law of its draws.
      sigma: Noise multiplier.
      taken: Counted steps.
      delta: Delta of the cost.
    """
    if law is None or (isinstance(law, TreeDraws) and isinstance(law.tree, TreeShape)):
        return Bound(0.0, 0.0)
    steps, epochs, runs = taken
    whole_epochs = len(steps) == law.steps_per_epoch
    compared = np.array(steps[:: -(-len(steps) // _STEPS)])
    last, most = sampler.num_examples - 1, _RATES // compared.size
    examples = np.unique(np.linspace(0, last, min(last + 1, most)).round().astype(np.int64))
    rates = law.rate(examples[:, None], compared)
    rates = np.broadcast_to(rates, (examples.size, compared.size))
    busiest = int(np.argmax(np.count_nonzero(rates == rates.max(), axis=1)))
    rates = law.rate(examples[[busiest], None], np.array(steps))
    rates = np.broadcast_to(rates, (1, len(steps)))
    rate = float(rates.max())
    count, share = int(np.count_nonzero(rates == rate)), _kept_share(sampler, law, rate)
    if rate * share == 0:
        return Bound(0.0, 0.0)
    # Bounds the probability of a cut participation: the delta of a removal changes by no more.
    rows = sampler.max_contributions if isinstance(sampler, UserPoisson) else 1
    cut = rows * runs * epochs * count * rate * (1 - share)
    if cut < delta:
        share, delta = 1.0, delta + cut
    if share == 1 and whole_epochs and isinstance(law, RandomOrders) and (law.redrawn or runs == 1):
        order: Any = "redrawn" if law.redrawn else "fixed"
        return ShuffleProfile(sigma, len(steps), epochs * runs, order=order).epsilon(delta)
    if not law.redrawn:
        if share == 1:  # all epochs have the same rows, so that their mean has less noise
            sigma /= math.sqrt(epochs)
        epochs = 1
    profile: PrivacyProfile
    if law.once and share == 1 and math.isclose(rate * count, 1.0):
        profile = BallsAndBinsProfile(sigma, count, epochs * runs)
    else:
        releases = runs * epochs * (1 if law.once else count)
        profile = PoissonProfile(sigma, rate * share, releases)
        if rows > 1 and share == 1 and isinstance(law, IndependentRows):
            profile = UserPoissonProfile(sigma, releases, rate, rows)
    return profile.epsilon(delta)


def _cuts_itself(sampler: BatchSampler) -> bool:
    """Returns True if a sampler overrides `passes`, which cuts its batches."""
    kinds = BatchSampler, CappedBatchSampler
    return all(type(sampler).passes is not kind.passes for kind in kinds)


def _kept_share(sampler: BatchSampler, law: RowLaw, rate: float) -> float:
    """Returns a lower bound on the probability that a drawn row stays in its batch."""
    cap = sampler.shard_batch_size
    if not _cuts_itself(sampler):
        if not (isinstance(sampler, CappedBatchSampler) and sampler.truncates):
            return 1.0
        return -math.expm1(sampler.cap(cap).log_dropped_if_drawn())
    if not isinstance(law, IndependentRows):
        return 0.0
    # A batch of X rows that is cut to the cap keeps a share min(1, cap / X); E[X] <= 1 + n q.
    return cap / (cap + 1 + sampler.num_examples * rate)


def _above(cost: Bound) -> float:
    return cost.upper + wanted_width(EPSILON_TOLERANCE, cost.upper)
