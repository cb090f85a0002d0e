"""Orders that are drawn shard by shard: some are held against their laws, and one another.

See docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from accounting import PrivacyProfile
from dpsgd.audit.report import CheckResult, order_pvalue
from dpsgd.audit.samplers.draws import Draws
from dpsgd.audit.samplers.independence import coincidence_checks
from dpsgd.audit.samplers.participation import share_checks
from samplers import BatchSampler, Participations
from samplers.plans import EpochPlan
from samplers.row_law import RandomOrders

APART = "shards are drawn each by itself"


@dataclass(frozen=True)
class _Shard(BatchSampler):
    """One shard of a sampler, as a sampler of its rows alone."""

    sampler: BatchSampler
    number: int

    @property
    def num_examples(self) -> int:
        return len(self.sampler.shard_range(self.number))

    @property
    def epochs(self) -> int:
        return self.sampler.epochs

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def expected_batch_size(self) -> float:
        return self.num_examples / self.steps_per_epoch

    @property
    def padded_batch_size(self) -> int:
        return self.sampler.shard_batch_size

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        return self.sampler.privacy(noise_multiplier)

    def drawn_epoch(self, epoch: int) -> int:
        return self.sampler.drawn_epoch(epoch)

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        return self.sampler.shard_plan(seed, epoch, self.number)

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        return self.plan(seed, epoch).rows(self.chunk_range(chunk))


def shard_checks(
    sampler: BatchSampler, law: RandomOrders, seed: int, entries: int | None = None
) -> list[CheckResult]:
    """Returns the checks of some shards' orders: each name once, whichever shard it is of.

    Args:
      sampler: Who draws, of several shards.
      law: With which its draws are compared.
      seed: Not the run's.
      entries: As for `sampler_checks`, of each shard.
    """
    shards = sorted({0, 1, sampler.num_shards - 1})
    draws = [Draws(_Shard(sampler, shard), law.of_shard(shard), seed, entries) for shard in shards]
    of_shards = [
        [*share_checks(some, law.of_shard(shard)), *coincidence_checks(some, law.of_shard(shard))]
        for shard, some in zip(shards, draws, strict=True)
    ]
    checks = [_worst(shards, same) for same in zip(*of_shards, strict=True)]
    return [*checks, _apart(draws, law, shards)]


def _worst(shards: list[int], checks: tuple[CheckResult, ...]) -> CheckResult:
    """Returns the check of the shard that comes nearest to failing, corrected by their number."""
    pvalues = [1.0 * check.passed if check.pvalue is None else check.pvalue for check in checks]
    worst = int(np.argmin(pvalues))
    check = checks[worst]
    check = check._replace(
        detail=f"shard {shards[worst]} of {len(shards)} looked at: {check.detail}"
    )
    return check if check.pvalue is None else CheckResult.of(check.name, pvalues, check.detail)


def _apart(draws: list[Draws], law: RandomOrders, shards: list[int]) -> CheckResult:
    """Counts the rows that have the same step in two shards, in each of several draws."""
    pvalues, found, wanted = [], 0, 0.0
    for one, other in itertools.combinations(range(len(shards)), 2):
        rates = law.of_shard(shards[other]).rate(0, np.arange(law.steps_per_epoch))
        count, expected = 0, 0.0
        for first, second in zip(draws[one].independent, draws[other].independent, strict=True):
            rows = min(draws[one].rows, draws[other].rows)
            steps = first.steps[first.examples < rows]
            count += int(np.count_nonzero(steps == second.steps[second.examples < rows]))
            expected += float(rates[steps].sum())
        pvalues.append(order_pvalue(count, expected))
        found, wanted = found + count, wanted + expected
    detail = (
        f"shards {', '.join(map(str, shards))}: {found:,} rows share a step, {wanted:,.1f} expected"
    )
    return CheckResult.of(APART, pvalues, detail)
