"""What becomes of a batch that is larger than the cap: cut uniformly, or taken in several passes.

A run's own cap may never be exceeded by chance, so `passes` is given members that are too many. See
docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import numpy as np

from dpsgd.audit.report import CheckResult, count_pvalue
from samplers import BatchSampler
from samplers.base import stated_law

KEPT = "a batch over the cap is cut to it, or taken in passes that are disjoint and complete"

_CUTS = 256  # at most
_RESIDUES = 64


def cut_checks(sampler: BatchSampler, seeds: list[int], rows: int) -> list[CheckResult]:
    """Returns the checks of `passes`; none where, by law, no batch is larger than the cap.

    Args:
      sampler: Who cuts.
      seeds: Several, none the run's.
      rows: Of all batches that are cut, about.
    """
    n, cap, law = len(sampler.shard_range(0)), sampler.shard_batch_size, stated_law(sampler)
    if cap >= n or law is None or law.batch_sizes is not None:
        return []
    rng = np.random.default_rng(seeds[0] % 2**128)
    largest = min(n, 4 * cap)
    sizes = sorted({cap + 1, min(2 * cap, n), min(2 * cap + 1, n), largest})
    for size in sizes:
        some = _some(rng, n, size)
        for shard in {0, sampler.num_shards - 1}:
            if fault := _fault(sampler, some, sampler.passes(some, seeds[0], 0, shard)):
                return [CheckResult(KEPT, False, fault)]
    made = CheckResult(KEPT, True, f"a cap of {cap:,}, and batches of up to {sizes[-1]:,}")
    return [made] if sampler.accumulates else [made, *_survivors(sampler, seeds, rows, rng)]


def _some(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Returns different examples, ascending: the first and the last, and others at random."""
    some = rng.permutation(n)[:size] if n <= 8 * size else np.unique(rng.integers(0, n, 2 * size))
    some = rng.permutation(some)[:size]
    some = np.setdiff1d(some, [0, n - 1])[: size - 2] if size > 2 else some
    return np.union1d(some, [0, n - 1][: size - some.size]).astype(np.int32)


def _fault(sampler: BatchSampler, members: np.ndarray, passes: list[np.ndarray]) -> str:
    """Returns what is wrong with the passes of a batch that is larger than the cap, if anything."""
    cap, rows = sampler.shard_batch_size, np.concatenate(passes)
    if any(part.size > cap for part in passes):
        return f"a pass has more rows than the cap of {cap}"
    if np.unique(rows).size < rows.size:
        return "an example is in several passes, or several times in one"
    if not np.isin(rows, members).all():
        return "a pass has an example that is not of the batch"
    if not sampler.accumulates and len(passes) > 1:
        return f"{len(passes)} passes of a batch that is to be cut"
    wanted = members.size if sampler.accumulates else cap
    return "" if rows.size == wanted else f"{rows.size} rows of {members.size}, for {wanted}"


def _survivors(
    sampler: BatchSampler, seeds: list[int], rows: int, rng: np.random.Generator
) -> list[CheckResult]:
    """Who survives, by place and number; and whether each step, shard and seed has its choice."""
    n, cap, last = len(sampler.shard_range(0)), sampler.shard_batch_size, sampler.num_shards - 1
    size = min(n, 2 * cap)  # the largest choice
    members, share = _some(rng, n, size), cap / size
    cuts = int(np.clip(rows // size, 24, _CUTS))
    steps = sorted({*range(min(cuts - cuts // 4, sampler.num_steps)), sampler.num_steps - 1})
    few = sorted({1, (last + 1) // 2, last} & {*range(1, last + 1)})
    drawn = [(seeds[0], step, 0) for step in steps]
    rest = [(seeds[0], step, shard) for step in steps[:8] for shard in few]
    rest += [(seed, step, 0) for step in steps for seed in seeds[1:9]]
    drawn += rest[: max(4 + len(few), cuts - len(drawn))]
    kept = np.zeros((len(drawn), size), np.float32)
    for row, (seed, step, shard) in zip(kept, drawn, strict=True):
        (survivors,) = sampler.passes(members, seed, step, shard)
        row[np.isin(members, survivors)] = 1
    count = kept.sum(axis=0).astype(np.int64)
    of_residue = np.bincount(residues := members % _RESIDUES, minlength=_RESIDUES)
    some, by_residue = of_residue > 0, np.bincount(residues, count, _RESIDUES)
    uniform = [
        count_pvalue(count, len(drawn), share),
        count_pvalue(np.cumsum(count)[:-1], len(drawn) * np.arange(1, size), share),
        count_pvalue(by_residue[some], len(drawn) * of_residue[some], share),
    ]
    # Any two cuts; steps and the next ones, and shards of a step, in pairs that share none.
    first, second = np.triu_indices(len(drawn), 1)
    both = (kept @ kept.T)[first, second].astype(np.int64)
    adjacent = both[(first < len(steps) - 1) & (first % 2 == 0) & (second == first + 1)]
    alike = [
        [kept[row] @ kept[steps.index(step)] for row, (_, step, of) in enumerate(drawn) if of == k]
        for k in few
    ]
    pooled = [np.asarray(pairs, np.int64) for pairs in (adjacent, *alike) if len(pairs)]
    apart = [count_pvalue(pairs.sum(), cap * pairs.size, share) for pairs in pooled]
    return [
        CheckResult.of(
            "survivors of a cut are uniform",
            uniform,
            f"of {len(drawn)} cuts of {size:,} rows, each survives {count.min()} to "
            f"{count.max()}, {share * len(drawn):.4g} expected",
        ),
        CheckResult.of(
            "every step and every seed cuts by itself",
            [count_pvalue(both, cap, share), *apart],
            f"{both.size:,} pairs of cuts share {both.min()} to {both.max()} of {cap:,} "
            f"survivors, {cap * share:.4g} expected",
        ),
    ]
