"""Draws of batches: epochs, shards of Criteo's terabyte, and waiting times of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import samplers
from dpsgd.engine.blocks import in_background, plan_blocks
from experiments.benchmarks.case import Figure, figure_at
from experiments.benchmarks.timing import Spent, alone
from samplers import BatchSource, EpochSampler

STEP_SECONDS = 0.7e-3
"""Least time in which an H200 moves the bytes of a step of the large model."""


def draw(
    sampler: str, batch_size: int, rows: int, bar: str, batches: int = 100
) -> Iterator[Figure]:
    """Measures the draw of an epoch and of its batches."""
    source = BatchSource(getattr(samplers, sampler)(rows, batch_size), seed=0)
    row = figure_at(f"{sampler}, n {rows / 1e6:g}M, batch {batch_size}")
    epoch_seconds = Spent.measure(lambda: source.passes(0)).cpu_seconds
    yield row("draw of an epoch", epoch_seconds, "s", "<= 10")
    steps = range(1, min(batches, source.sampler.steps_per_epoch - 1) + 1)
    spent = [1e3 * Spent.measure(partial(source.passes, step)).cpu_seconds for step in steps]
    yield row("a batch, median", spent, "ms", bar)


def waiting(sampler: str, batch_size: int, rows: int) -> Iterator[Figure]:
    """Measures the share of time that a run waits for batches.

    A thread makes blocks while the main thread sleeps in place of an accelerator, which needs a
    spare core. The first draw, for which every run waits, does not count.
    """
    drawn_by = getattr(samplers, sampler)(rows, batch_size, epochs=2)
    source = BatchSource(drawn_by, seed=0, read_ahead=True)
    plans = plan_blocks(source, first_step=0, block_steps=64)
    waited = []
    with closing(in_background(plans)) as blocks:
        begin = time.perf_counter()
        for steps, _ in blocks:
            waited.append(time.perf_counter() - begin)
            time.sleep(STEP_SECONDS * len(steps))
            begin = time.perf_counter()
    share = sum(waited[1:]) / (STEP_SECONDS * drawn_by.num_steps)
    row = figure_at(f"{sampler}, n {rows / 1e6:g}M, batch {batch_size}")
    yield row("waiting for batches / computing", share, "x", "<= 0.02")


def shards(
    what: str, sampler: str, rows: int, batch_size: int, num_shards: int
) -> Iterator[Figure]:
    """Measures the draw of one shard, or the cost of all.

    `what` is "draw" or "cost"; `rows` and `batch_size` count all shards.
    """
    configured = getattr(samplers, sampler)(rows, batch_size, num_shards=num_shards)
    process = alone(_draw_shard if what == "draw" else _cost, configured)
    place = f"{what} of {num_shards} shards, {sampler}, n {rows / 1e6:.4g}M, batch {batch_size}"
    row = figure_at(place)
    yield row("CPU time", process.cpu_seconds, "s", "<= 60")
    yield row("memory", process.gigabytes, "GB", "<= 2")


def _draw_shard(sampler: EpochSampler) -> None:
    shard = sampler.num_shards // 3
    BatchSource(sampler, seed=1, shards=range(shard, shard + 1)).passes(0)


def _cost(sampler: EpochSampler) -> None:
    from accounting import epsilon

    epsilon(sampler.privacy(0.6), 1 / sampler.num_examples)
