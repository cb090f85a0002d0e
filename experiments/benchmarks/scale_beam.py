"""Stores and batches by many workers: rows a core second, equality, and workers that are killed.

The work is carried out here by one process without Beam, and by Beam's local runner where Beam is
installed (see `docs/how-to/beam.md`). A rate is that of the rows beyond the first tenth: to
start a pipeline costs the same for few rows as for many.
"""

from __future__ import annotations

import dataclasses
import filecmp
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dpsgd.engine.batch_files import Draw, draw_here, write_manifest
from experiments.beam.draws import BatchWork, drawn_by
from experiments.beam.pieces import Piece
from experiments.beam.prepare import StoreWork, prepare
from experiments.benchmarks.case import Case, Row, cases, figure
from experiments.benchmarks.timing import Spent
from experiments.processes import SPAWN
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import Poisson

BAR = 0.25
"""Million rows a second of a core's time."""
ENOUGH = 200_000
"""Rows from which a rate tells more than how long it takes to begin."""
SEED = 2**127 + 1
"""Of batches that no run trains on."""

HERE, BEAMS = "one process", "Beam's local runner"


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
        raw.prepare(many, folder / "alone")
        same = equal(folder / "many", folder / "alone")
    yield _rate(f"rows to a store, {format}, {way}", rows - rows // 10, seconds, rows)
    yield figure(f"store equals that of `prepare`, {format}, {way}", same, "yes", at_least=1)


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
        _batches(folder / "alone", draw, data, draw_here)
        same = equal(out, folder / "alone")
    yield _rate(f"rows to batches, {way}", drawn[1] - drawn[0], seconds, rows)
    yield figure(f"batches equal those of `BatchSource`, {way}", same, "yes", at_least=1)


def killed(*, rows: int = 200_000, kills: int = 6) -> Iterator[Row]:
    """Kills workers that parse, at random moments; others take their ranges anew."""
    left, moments = [kills], random.Random(0)

    def carry_out(work: StoreWork) -> None:
        pieces: list[Piece] = []
        for span in work.ranges:
            if left[0]:
                left[0] -= 1
                _begin_and_kill(work, span, moments.random())
            pieces.append(work.parse(span))
        for shard, column in work.lay_out(pieces):
            work.write(shard, column)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = _raw(folder, "criteo-display", rows)
        raw = synthetic.LOGS["criteo-display"].format
        size = sum(file.stat().st_size for file in files) // (kills + 2)
        store = prepare(files, folder / "a", raw, carry_out, range_bytes=size)
        raw.prepare(files, folder / "b")
        same = equal(store.path, folder / "b")
    yield figure("workers that were killed in the midst", kills - left[0])
    yield figure("store equals that of `prepare` after the kills", same, "yes", at_least=1)


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


def _begin_and_kill(work: StoreWork, span: Any, fraction: float) -> None:
    """Has another process begin a range, and kills it while it writes."""
    worker = SPAWN.Process(target=work.parse, args=(span,))
    worker.start()
    assert worker.pid is not None
    while worker.is_alive() and not list(work.folder.glob(f".{span.name}.*")):
        time.sleep(0.001)
    time.sleep(0.1 * fraction)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def equal(one: Path, other: Path) -> float:
    """Returns 1 if two folders hold the same files, byte for byte, and 0 if they do not."""
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return 0.0
    return float(all(filecmp.cmp(one / name, other / name, shallow=False) for name in names))


def _beam(way: str, **rest: Any) -> list[Case]:
    few: dict[str, Any] = {"quick": {"rows": 2_000}, "all_quick": True, "exact": True}
    one = {"way": (way,)}
    return [
        *cases(stores, "beam, store", over={**one, "format": synthetic.LOGS}, **few, **rest),
        *cases(batches, "beam, batches", over=one, **few, **rest),
    ]


BEAM = [
    *_beam(HERE),
    *_beam(BEAMS, needs=("apache_beam",)),
    *cases(killed, "beam, killed", quick={"rows": 2_000, "kills": 1}, exact=True),
]
