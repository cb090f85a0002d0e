"""What becomes of a batch that is larger than the cap: cut uniformly, or taken in several passes.

A run's own cap may never be exceeded by chance, so `passes` is given members that are too many. See
docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import numpy as np

from dpsgd.audit.report import CheckResult, count_pvalue, smallest
from samplers import BatchSampler
from samplers.base import stated_law

KEPT = "a batch over the cap is cut to it, or taken in passes that are disjoint and complete"

_ROWS = 400_000  # of all batches that are cut, about
_CUTS = 256  # at most
_RESIDUES = 64


def cut_checks(sampler: BatchSampler, seeds: list[int]) -> list[CheckResult]:
    """Returns the checks of `passes`; none where, by law, no batch is larger than the cap.

    Args:
      sampler: Who cuts.
      seeds: Several, none the run's.
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
    return [made] if sampler.accumulates else [made, *_survivors(sampler, seeds, rng)]


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
    sampler: BatchSampler, seeds: list[int], rng: np.random.Generator
) -> list[CheckResult]:
    """Who survives, by place and number; and whether each step, shard and seed has its choice."""
    n, cap = len(sampler.shard_range(0)), sampler.shard_batch_size
    size = min(n, 2 * cap)  # the largest choice
    members = _some(rng, n, size)
    cuts = int(np.clip(_ROWS // size, 24, _CUTS))
    steps = sorted({*range(min(cuts - cuts // 4, sampler.num_steps)), sampler.num_steps - 1})
    drawn = [(seeds[0], step, 0) for step in steps]
    few = sorted(
        {0, 1, sampler.num_shards // 2, sampler.num_shards - 1} & {*range(1, sampler.num_shards)}
    )
    rest = [(seeds[0], step, shard) for step in steps[:8] for shard in few]
    rest += [(seed, step, 0) for step in steps for seed in seeds[1:9]]
    drawn += rest[: max(4 + len(few), cuts - len(drawn))]
    kept = np.zeros((len(drawn), size), np.float32)
    for row, (seed, step, shard) in zip(kept, drawn, strict=True):
        (survivors,) = sampler.passes(members, seed, step, shard)
        row[np.isin(members, survivors)] = 1
    count, share = kept.sum(axis=0).astype(np.int64), cap / size
    up_to = np.arange(1, size)
    residues = members % _RESIDUES
    of_residue = np.bincount(residues, minlength=_RESIDUES)
    some = of_residue > 0
    pvalues = [
        smallest(count_pvalue(count, len(drawn), share)),
        smallest(count_pvalue(np.cumsum(count)[:-1], len(drawn) * up_to, share)),
        smallest(
            count_pvalue(
                np.bincount(residues, count, _RESIDUES)[some], len(drawn) * of_residue[some], share
            )
        ),
    ]
    detail = (
        f"of {len(drawn)} cuts of {size:,} rows, each survives {count.min()} to {count.max()}, "
        f"{share * len(drawn):.4g} expected"
    )
    uniform = CheckResult.of("survivors of a cut are uniform", smallest(pvalues), detail)
    # Any two cuts; steps and the next ones, and shards of a step, in pairs that share none.
    first, second = np.triu_indices(len(drawn), 1)
    both = (kept @ kept.T)[first, second].astype(np.int64)
    adjacent = both[(first < len(steps) - 1) & (first % 2 == 0) & (second == first + 1)]
    pvalues = [smallest(count_pvalue(both, cap, share))]
    if adjacent.size:
        pvalues.append(float(count_pvalue(adjacent.sum(), cap * adjacent.size, share)))
    for shard in few:
        at = [row for row, (_, _, of) in enumerate(drawn) if of == shard]
        alike = [int(kept[row] @ kept[steps.index(drawn[row][1])]) for row in at]
        pvalues.append(float(count_pvalue(sum(alike), cap * len(alike), share)))
    detail = (
        f"{both.size:,} pairs of cuts share {both.min()} to {both.max()} of {cap:,} survivors, "
        f"{cap * share:.4g} expected"
    )
    return [
        uniform,
        CheckResult.of("every step and every seed cuts by itself", smallest(pvalues), detail),
    ]
