"""What shards cost at the size of Criteo's terabyte, without its rows: draws, price and padding.

Each draw and each price is made in a process of its own, whose CPU seconds and largest memory are
measured from its first line on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from experiments.benchmarks.rows import Row
from samplers import BallsAndBins, BatchSource, Deterministic, EpochSampler, Poisson, Shuffle

NUM_EXAMPLES = 4_373_472_329
"""Rows of Criteo's terabyte click logs, of 24 days."""
SHARDS = 64
BATCH_SIZE = 65_536
SECONDS, GIGABYTES = 60.0, 2.0
"""Bars of a shard's epoch and of a price."""
PADDING = {
    (37_000_000, 1024, 1): {1: 32, 8: 98, 64: 338},
    (37_000_000, 8192, 5): {1: 11, 8: 32, 64: 100},
    (4_200_000_000, 65_536, 1): {8: 12, 64: 35},
}
"""Rows of padding for 100 of a batch that were predicted: by n, b and epochs, and by shards. (One
shard has 2^31 - 1 rows at most.)"""


def shard_rows(num_examples: int = NUM_EXAMPLES) -> list[Row]:
    """Returns the rows: draws of one shard's epoch, prices, and padding of balls-and-bins."""
    rows = []
    for kind in (Deterministic, Shuffle, Poisson, BallsAndBins):
        sampler = kind(num_examples, BATCH_SIZE, num_shards=SHARDS)
        rows += _alone(f"draw of one shard's epoch of {SHARDS}, {_named(sampler)}", _draw, sampler)
    for kind in (Poisson, BallsAndBins):
        sampler = kind(num_examples, BATCH_SIZE, num_shards=SHARDS)
        rows += _alone(f"price of {SHARDS} shards, {_named(sampler)}", _price, sampler)
    return rows + padding_rows()


def padding_rows() -> list[Row]:
    """Returns the padding of batches by shards, over what was predicted."""
    rows = []
    for (n, b, epochs), predicted in PADDING.items():
        for shards, percent in predicted.items():
            sampler = BallsAndBins(n, b, epochs, num_shards=shards, target_delta=1 / n)
            padding = 100 * (sampler.padded_batch_size / b - 1)
            name = f"padding, {shards} shards, n {n / 1e6:g}M, batch {b}, epochs {epochs}"
            rows.append(Row.at_most(name, padding, "%", percent + 0.5))
    return rows


def _named(sampler: EpochSampler) -> str:
    n, b = sampler.num_examples, sampler.batch_size
    return f"{type(sampler).__name__}, n {n / 1e6:.4g}M, batch {b}"


def _alone(name: str, measured: Callable[[EpochSampler], None], sampler: EpochSampler) -> list[Row]:
    """Returns CPU time and largest memory of a process that measures one thing."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        seconds, gigabytes = process.submit(_measured, measured, sampler).result()
    return [
        Row.at_most(f"CPU time, {name}", seconds, "s", SECONDS),
        Row.at_most(f"memory, {name}", gigabytes, "GB", GIGABYTES),
    ]


def _measured(measured: Callable[[EpochSampler], None], sampler: EpochSampler) -> tuple:
    measured(sampler)
    return time.process_time(), 1024 * _peak() / 1e9


def _peak() -> int:
    """Returns the largest memory of this process in KiB: on Linux, of this program alone.

    The usage of a process there counts what its parent had when it began it.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _draw(sampler: EpochSampler) -> None:
    shard = sampler.num_shards // 3
    BatchSource(sampler, seed=1, shards=range(shard, shard + 1)).passes(0)


def _price(sampler: EpochSampler) -> None:
    from accounting import epsilon

    epsilon(sampler.privacy(0.6), 1 / sampler.num_examples)
