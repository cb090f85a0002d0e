"""Tests a sampler's draws statistically under the law of its cost.

Binomial and chi-square tests count many draws under fixed seeds, so that their results depend on
the code alone. A check corrects its p-values by their number (Bonferroni), and fails by chance with
probability 1e-8. Which counts are binomial: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dpsgd.audit.participation import RowTests, UnitTests, law_seed
from dpsgd.audit.report import CheckResult
from dpsgd.audit.subsets import Draw, Subsets, binomial
from dpsgd.audit.truncation import cuts, some_members
from samplers import BatchSampler
from samplers.base import stated_law

FALSE_ALARM = 1e-8
"""Largest probability that a statistical check of a sound sampler fails."""

ENTRIES = 2**18
"""Approximate number of participations that an audit before a run counts."""

THOROUGH = 2**21
"""Approximate number of participations that `check_sampler` counts."""

_GROUPS = 64  # groups of rows that survive truncation
_CUTS = 96  # first steps whose batches are truncated


def law_checks(
    sampler: BatchSampler, claimed: BatchSampler | None = None, *, entries: int = ENTRIES
) -> list[CheckResult]:
    """Tests the draws of `sampler` under the law of `claimed`.

    Args:
      sampler: Sampler of the run, at its own size.
      claimed: Sampler whose guarantee is claimed; by default `sampler`.
      entries: Approximate number of participations to count.
    """
    law = stated_law(claimed or sampler)
    if law is None or law.certain or (law.any_order and claimed not in (None, sampler)):
        return []
    if law.steps_per_epoch != sampler.steps_per_epoch:
        return []  # an exact check says so
    kind = RowTests if law.units is None else UnitTests
    tests = kind(sampler, law, entries)
    named = [*tests.pvalues(), *_cut_pvalues(sampler)]
    return [_check(name, pvalues) for name, pvalues in named]


def _check(name: str, pvalues: list[Any]) -> CheckResult:
    """Returns a check of groups of p-values, with Bonferroni corrections."""
    groups = [np.ravel(group) for group in pvalues if np.size(group)]
    smallest = [float(np.min(group) * group.size) for group in groups]
    pvalue = min(1.0, min(smallest, default=1.0) * len(groups))
    return CheckResult(name, pvalue > FALSE_ALARM, f"p = {pvalue:.2g}")


def _cut_pvalues(sampler: BatchSampler) -> Iterator[tuple[str, list[Any]]]:
    """Yields p-values of the rows that remain in truncated batches, which are uniform subsets."""
    if sampler.accumulates or not cuts(sampler):
        return
    n, cap, last = len(sampler.shard_range(0)), sampler.shard_batch_size, sampler.num_shards - 1
    members = some_members(np.random.default_rng(0), n, min(n, 2 * cap))
    num_steps, length = sampler.num_steps, sampler.steps_per_epoch
    second_epoch = range(length, min(length + 8, num_steps))
    steps = sorted({*range(min(_CUTS, num_steps)), *second_epoch, num_steps - 1})
    draws = [(0, step) for step in steps]
    draws += [(seed, step) for seed in range(1, 9) for step in steps[:8]]
    shards, entries = sorted({0, (last + 1) // 2, last}), []
    for number, (seed, step) in enumerate(draws):
        for kind, shard in enumerate(shards[: None if number < 8 else 1]):
            survivors = sampler.passes(members, law_seed(seed), step, shard)[0]
            rank = np.flatnonzero(np.isin(members, survivors))
            entries.append((np.full(rank.size, number), np.full(rank.size, kind), rank))
    numbers, kinds, ranks = (np.concatenate(column) for column in zip(*entries, strict=True))
    none, sizes = np.zeros(0, np.int64), np.full(len(shards), members.size)
    subsets = Subsets(
        [Draw(*pair, none, none) for pair in draws], (numbers, kinds, ranks), sizes, len(shards)
    )
    residues = members % _GROUPS
    by_residue = binomial(
        np.bincount(residues[ranks], minlength=_GROUPS),
        len(entries) * np.bincount(residues, minlength=_GROUPS),
        cap / members.size,
    )
    name = "rows that survive truncation are uniform"
    yield name, [*subsets.ranks(), *subsets.pairs(), by_residue]
    lags = [(1, 0), *((0, k) for k in range(1, _CUTS)), (0, length)]
    name = "every step, shard and seed truncates independently"
    yield name, [*subsets.repeated(lags), *subsets.neighbours()]
