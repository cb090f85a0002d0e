"""Draws and privacy costs of Criteo's terabyte, and stores and batches by many workers.

`shards` has the size of Criteo's terabyte, without its rows; `beam`: see `scale_beam`. What runs
over several devices exchange and compute is tested in `tests/dpsgd/engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import samplers
from experiments.benchmarks.case import Row, cases, figure
from experiments.benchmarks.scale_beam import BEAM
from experiments.benchmarks.timing import alone
from samplers import BatchSource, EpochSampler

TERABYTE = 4_373_472_329
"""Rows of Criteo's terabyte click logs, of 24 days."""
SHARDS, SHARDED_BATCH = 64, 65_536
SECONDS, GIGABYTES = 60.0, 2.0
"""Bars of a shard's epoch and of a privacy cost."""


def sharded(sampler: str, what: str) -> Iterator[Row]:
    """Measures a process that draws one shard's epoch, or that finds the cost of all shards."""
    made = getattr(samplers, sampler)(TERABYTE, SHARDED_BATCH, num_shards=SHARDS)
    place = f"{sampler}, n {TERABYTE / 1e6:.4g}M, batch {SHARDED_BATCH}"
    if what == "draw":
        yield from took(f"draw of one shard's epoch of {SHARDS}, {place}", draw, made)
    else:
        yield from took(f"privacy cost of {SHARDS} shards, {place}", cost, made)


def took(name: str, measure: Callable[[EpochSampler], None], sampler: EpochSampler) -> list[Row]:
    """Returns CPU time and largest memory of a process that measures one thing."""
    found = alone(measure, sampler)
    return [
        figure(f"CPU time, {name}", found.cpu_seconds, "s", at_most=SECONDS),
        figure(f"memory, {name}", found.gigabytes, "GB", at_most=GIGABYTES),
    ]


def draw(sampler: EpochSampler) -> None:
    shard = sampler.num_shards // 3
    BatchSource(sampler, seed=1, shards=range(shard, shard + 1)).passes(0)


def cost(sampler: EpochSampler) -> None:
    from accounting import epsilon

    epsilon(sampler.privacy(0.6), 1 / sampler.num_examples)


DRAWN, COSTED = ("Deterministic", "Shuffle", "Poisson", "BallsAndBins"), ("Poisson", "BallsAndBins")
CASES = [
    *cases(sharded, "shards", over={"what": ("draw",), "sampler": DRAWN}),
    *cases(sharded, "shards", over={"what": ("cost",), "sampler": COSTED}),
    *BEAM,
]
