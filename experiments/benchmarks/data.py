"""Raw files to stores, rows to batch files, and draws of batches.

A rate, rows per second of CPU time, counts the rows beyond the first tenth, which leaves out the
time to start.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import samplers
from dpsgd.engine.batch_files import Draw, draw_here, write_manifest
from dpsgd.engine.blocks import in_background, plan_blocks
from experiments.benchmarks.case import Figure, Spent, alone, figure, figure_at, require
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.splits import Columns
from samplers import BatchSource, EpochSampler, Poisson

FULL = 46_000_000
"""Approximate number of rows of the Criteo Display Ads data set."""
BAR = ">= 0.25"
"""Bar of a rate, in millions of rows per second of a core's time."""
ENOUGH = 200_000
"""Least number of rows at which a rate is held to its bar."""
SEED = 2**127 + 1
"""Seed of batches that no run trains on."""
STEP_SECONDS = 0.7e-3
"""Least time in which an H200 moves the bytes of a step of the large model."""


def stores(format: str, way: str, rows: int) -> Iterator[Figure]:
    """Measures the preparation of a store of generated rows.

    Args:
      format: Name of a Criteo format.
      way: "here", or "beam" for Beam's local runner.
      rows: Number of rows; rates below `ENOUGH` rows have no bar.
    """
    if way == "beam":
        require("apache_beam")
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (rows // 10, rows):
            files, table = _raw(Path(folder) / str(count), format, count)
            processes.append(alone(_store, files, Path(folder) / f"store {count}", table, way))
    small_seconds, large_seconds = (process.cpu_seconds for process in processes)
    row, rate = figure_at(f"{format}, {way}"), (rows - rows // 10) / (large_seconds - small_seconds)
    yield row("rows to a store", rate / 1e6, "M/s", BAR if rows >= ENOUGH else "")
    yield row(f"store of {FULL:,} rows", (large_seconds + (FULL - rows) / rate) / 60, "CPU min")
    yield row(f"memory at {rows:,} rows", processes[1].gigabytes, "GB", "<= 4")


def _store(files: list[Path], out: Path, format: Any, way: str) -> None:
    if way == "here":
        format.prepare(files, out)
        return
    from experiments.beam.pipelines import Runner
    from experiments.beam.prepare import prepare

    prepare(files, out, format, Runner().write_store, range_bytes=1 << 24)


def _raw(folder: Path, format: str, rows: int) -> tuple[list[Path], Any]:
    """Writes two raw files with `rows` rows together; returns them and their format."""
    folder.mkdir()
    log, files = synthetic.LOGS[format], [folder / f"{number}.txt" for number in range(2)]
    for seed, file in enumerate(files):
        synthetic.write_raw(file, rows // 2, seed=seed, log=log)
    return files, log.format


def batches(way: str, rows: int) -> Iterator[Figure]:
    """Measures the drawing of batch files by Poisson sampling, see `stores`."""
    if way == "beam":
        require("apache_beam")
    seconds, counts = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in (rows // 10, rows):
            store = folder / f"store-{count}"
            synthetic.write_store(store, count * 10 // 8, seed=0)  # four fifths train
            columns = partial(_training_rows, store)
            data = columns()
            n = len(data["label"])
            sampler = Poisson(n, min(4_096, n), max_batch_size=5_000)
            draw = Draw.plan(sampler, data, run="benchmark", attempt=0, first_step=0)
            draw = dataclasses.replace(draw, steps_per_file=32)
            out = folder / f"batches-{count}"
            write: Callable[..., list[str]] = draw_here
            if way == "beam":
                from experiments.beam.draws import drawn_by
                from experiments.beam.pipelines import Runner

                write = drawn_by(Runner().write_batches, columns)
            seconds.append(Spent.measure(partial(_batches, out, draw, data, write)).cpu_seconds)
            counts.append(n)
    rate = (counts[1] - counts[0]) / (seconds[1] - seconds[0]) / 1e6
    yield figure(f"rows to batches, {way}", rate, "M/s", BAR if rows >= ENOUGH else "")


def _training_rows(store: Path) -> Columns:
    return Store.open(store).load("train")


def _batches(out: Path, draw: Draw, data: Columns, write: Callable[..., list[str]]) -> None:
    out.mkdir(0o700)
    write_manifest(out, draw, SEED, write(out, draw, SEED, data), data)


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
