"""Draws and privacy costs of Criteo's terabyte, and stores and batches by many workers.

`shards` has the size of Criteo's terabyte, without its rows. `beam` measures rows a core second: by
one process without Beam, and by Beam's local runner where Beam is installed. A rate is that of the
rows beyond the first tenth: to start a pipeline costs the same for few rows as for many. That bits
are equal is tested: several devices in `tests/dpsgd/engine`, many workers in
`tests/experiments/beam`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import samplers
from dpsgd.engine.batch_files import Draw, write_manifest
from experiments.beam.draws import BatchWork, drawn_by
from experiments.beam.prepare import StoreWork, prepare
from experiments.benchmarks.case import Case, Row, cases, figure
from experiments.benchmarks.timing import Spent, alone
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import BatchSource, EpochSampler, Poisson

TERABYTE = 4_373_472_329
"""Rows of Criteo's terabyte click logs, of 24 days."""
SHARDS, SHARDED_BATCH = 64, 65_536
SECONDS, GIGABYTES = 60.0, 2.0
"""Bars of a shard's epoch and of a privacy cost."""
BAR = 0.25
"""Million rows a second of a core's time."""
ENOUGH = 200_000
"""Rows from which a rate tells more than how long it takes to begin."""
SEED = 2**127 + 1
"""Of batches that no run trains on."""
HERE, BEAMS = "one process", "Beam's local runner"


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


def stores(way: str, format: str, *, rows: int = 1_000_000) -> Iterator[Row]:
    """Measures a store of generated rows in two raw files; of few, no rate is held to its bar."""
    raw = synthetic.LOGS[format].format
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = (_raw(folder, format, n) for n in (rows // 10, rows))

        def write(files: list[Path], out: Path) -> None:
            prepare(files, out, raw, _ways(way)[0], range_bytes=1 << 24)

        seconds = [
            Spent.on(partial(write, files, folder / name)).cpu_seconds
            for name, files in (("few", few), ("many", many))
        ]
    yield _rate(f"rows to a store, {format}, {way}", rows - rows // 10, seconds, rows)


def batches(way: str, *, rows: int = 1_000_000) -> Iterator[Row]:
    """Measures batches of Poisson sampling, written by many workers."""
    seconds, drawn = [], []
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
            write = drawn_by(_ways(way)[1], columns)
            seconds.append(Spent.on(partial(_batches, out, draw, data, write)).cpu_seconds)
            drawn.append(n)
    yield _rate(f"rows to batches, {way}", drawn[1] - drawn[0], seconds, rows)


def _ways(way: str) -> tuple[Callable[[StoreWork], None], Callable[[BatchWork], None]]:
    """Returns what carries out the work of a store, and that of batches."""
    if way == HERE:
        return _store_here, _batches_here
    from experiments.beam.pipelines import Runner

    return Runner().write_store, Runner().write_batches


def _store_here(work: StoreWork) -> None:
    for shard, column in work.lay_out([work.parse(span) for span in work.ranges]):
        work.write(shard, column)


def _batches_here(work: BatchWork) -> None:
    files: dict[int, list[Any]] = {file: [] for file in range(work.draw.num_files)}
    for task in work.tasks():
        for file, part in work.part(*task):
            files[file].append(part)
    for file, parts in files.items():
        work.write(file, parts)


def _raw(folder: Path, format: str, num_rows: int) -> list[Path]:
    """Writes two raw files of so many rows together."""
    files = [folder / f"{num_rows}-{part}.txt" for part in range(2)]
    for seed, file in enumerate(files):
        synthetic.write_raw(file, num_rows // 2, seed=seed, log=synthetic.LOGS[format])
    return files


def _rate(name: str, more: int, seconds: list[float], rows: int) -> Row:
    bar = BAR if rows >= ENOUGH else None
    return figure(name, more / (seconds[1] - seconds[0]) / 1e6, "M/s", at_least=bar)


def _training_rows(store: Path) -> Columns:
    return Store.open(store).load("train")


def _batches(out: Path, draw: Draw, data: Columns, write: Callable[..., list[str]]) -> None:
    out.mkdir(0o700)
    write_manifest(out, draw, SEED, write(out, draw, SEED, data), data)


def _beam(way: str, **rest: Any) -> list[Case]:
    few: dict[str, Any] = {"quick": {"rows": 2_000}, "all_quick": True}
    one = {"way": (way,)}
    return [
        *cases(stores, "beam, store", over={**one, "format": synthetic.LOGS}, **few, **rest),
        *cases(batches, "beam, batches", over=one, **few, **rest),
    ]


DRAWN, COSTED = ("Deterministic", "Shuffle", "Poisson", "BallsAndBins"), ("Poisson", "BallsAndBins")
CASES = [
    *cases(sharded, "shards", over={"what": ("draw",), "sampler": DRAWN}),
    *cases(sharded, "shards", over={"what": ("cost",), "sampler": COSTED}),
    *_beam(HERE),
    *_beam(BEAMS, needs=("apache_beam",)),
]
