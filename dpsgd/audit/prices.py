"""Checks the stated privacy costs of noises and samplers from other packages."""

from __future__ import annotations

from collections.abc import Iterable

from accounting.profile import EPSILON_TOLERANCE, Bound, wanted_width
from dpsgd.audit.report import CheckResult
from dpsgd.core.noise import Noise
from samplers import BatchSampler

PRICE = "the cost of a noise is proved, and at least that of its bands and columns"

_DELTA = 1e-6


def price_check(noise: Noise, runs: Iterable[tuple[BatchSampler, float]]) -> CheckResult:
    """Checks that a noise's own cost is not below `Noise`'s.

    `Noise` proves its cost from the bands and columns of the noise matrix. Compared are a run, a
    run as one segment, and two segments.

    Args:
      noise: Noise whose `privacy` and `privacy_of` are checked.
      runs: Samplers and noise multipliers under which costs are compared.
    """
    details = []
    for sampler, sigma in runs:
        once, twice = ([range(sampler.num_steps)] * count for count in (1, 2))
        proved = Noise.privacy(noise, sampler, sigma)
        costs = {
            "a run": (noise.privacy(sampler, sigma), proved),
            "a run as one segment": (noise.privacy_of(sampler, sigma, once), proved),
            "two segments": (
                noise.privacy_of(sampler, sigma, twice),
                Noise.privacy_of(noise, sampler, sigma, twice),
            ),
        }
        where = f"under {type(sampler).__name__} with noise multiplier {sigma:.4g}"
        for segments, profiles in costs.items():
            stated, bound = (profile.epsilon(_DELTA) for profile in profiles)
            if stated.confidence != 1 or bound.upper > _above(stated):
                detail = f"{segments} {where}: {stated:.4g}, and at least {bound:.4g}"
                return CheckResult(PRICE, False, detail)
        details.append(where)
    return CheckResult(PRICE, True, "; ".join(details))


def cost_checks(sampler: BatchSampler, noise_multiplier: float) -> list[CheckResult]:
    """Checks that a sampler's costs are proved, and monotone in noise and steps."""
    run = range(sampler.num_steps)
    full_run, quiet, once, twice = (
        profile.epsilon(_DELTA)
        for profile in (
            sampler.privacy(noise_multiplier),
            sampler.privacy(2 * noise_multiplier),
            sampler.privacy_of(noise_multiplier, [run]),
            sampler.privacy_of(noise_multiplier, [run, run]),
        )
    )
    costs = full_run, quiet, once, twice
    proved = all(0 <= cost.lower <= cost.upper and cost.confidence == 1 for cost in costs)
    falls, grows = quiet.upper <= _above(full_run), full_run.lower <= once.upper <= _above(twice)
    return [
        CheckResult("its costs are proved intervals", proved, f"{full_run}"),
        CheckResult("its cost falls with more noise", falls, f"{full_run}, then {quiet}"),
        CheckResult("its cost grows with the steps", grows, f"{once}, twice {twice}"),
    ]


def _above(cost: Bound) -> float:
    return cost.upper + wanted_width(EPSILON_TOLERANCE, cost.upper)
