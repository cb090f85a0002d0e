"""Stores and batches by many workers: rows a core second, equality, and workers that are killed.

The work is carried out here by one process without Beam, and by Beam's local runner where Beam is
installed (see `experiments/beam/README.md`). A rate is that of the rows beyond the first tenth: to
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
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpsgd.engine.batch_files import Draw, draw_here, write_manifest
from experiments.beam.draws import BatchWork, drawn_by
from experiments.beam.pieces import Piece, RawSource
from experiments.beam.prepare import StoreWork, prepare
from experiments.benchmarks.rows import Row
from experiments.processes import SPAWN
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.splits import FRACTIONS
from samplers import Poisson

BAR = 0.25
"""Million rows a second of a core's time."""

ENOUGH = 200_000
"""Rows from which a rate tells more than how long it takes to begin."""

SEED = 2**127 + 1
"""Of batches that are nobody's."""


def beam_rows(num_rows: int = 1_000_000, kills: int = 6) -> list[Row]:
    """Returns the rows: stores of both raw formats, batches of Poisson, and killed workers.

    Args:
      num_rows: Generated rows of each format, in two files; of few, no rate is held to its bar.
      kills: Workers that are killed while they write a store.
    """
    ways: dict[str, tuple[Callable[[StoreWork], None], Callable[[BatchWork], None]]]
    ways = {"one process": (_store_here, _batches_here)}
    if find_spec("apache_beam") is not None:
        from experiments.beam.pipelines import Runner

        ways["Beam's local runner"] = Runner().write_store, Runner().write_batches
    rows = []
    for format in synthetic.LOGS:
        with tempfile.TemporaryDirectory() as folder:
            few, many = (_raw(Path(folder), format, n) for n in (num_rows // 10, num_rows))
            for way, (stores, _) in ways.items():
                rows += _store_rows(format, way, stores, few, many, num_rows)
    with tempfile.TemporaryDirectory() as folder:
        for way, (_, batches) in ways.items():
            rows += _batch_rows(Path(folder) / way, way, batches, num_rows)
    return [*rows, *_killed_rows(min(num_rows, 200_000), kills)]


def _raw(folder: Path, format: str, num_rows: int) -> list[Path]:
    """Writes two raw files of so many rows together."""
    files = [folder / f"{num_rows}-{part}.txt" for part in range(2)]
    for seed, file in enumerate(files):
        synthetic.write_raw(file, num_rows // 2, seed=seed, log=synthetic.LOGS[format])
    return files


def _store_rows(
    format: str,
    way: str,
    carry_out: Callable[[StoreWork], None],
    few: list[Path],
    many: list[Path],
    num_rows: int,
) -> list[Row]:
    raw = synthetic.LOGS[format].format
    with tempfile.TemporaryDirectory() as folder:
        write = partial(_store, format=format, carry_out=carry_out)
        seconds = [
            _cpu(partial(write, files, Path(folder) / name))
            for name, files in {"few": few, "many": many}.items()
        ]
        raw.prepare(many, Path(folder) / "alone")
        same = _same(Path(folder) / "many", Path(folder) / "alone")
    rate = (num_rows - num_rows // 10) / (seconds[1] - seconds[0]) / 1e6
    return [
        _rate_row(f"rows to a store, {format}, {way}", rate, num_rows),
        Row.at_least(f"store equals that of `prepare`, {format}, {way}", same, "yes", 1),
    ]


def _store(
    files: list[Path], out: Path, format: str, carry_out: Callable[[StoreWork], None]
) -> None:
    raw = synthetic.LOGS[format].format
    source = RawSource(raw, 0, FRACTIONS)
    prepare(files, out, source, raw.source(files), carry_out, range_bytes=1 << 24)


def _store_here(work: StoreWork) -> None:
    """Carries out the work of a store in this process."""
    for shard, column in work.lay_out([work.parse(span) for span in work.ranges]):
        work.write(shard, column)


def _batches_here(work: BatchWork) -> None:
    """Carries out the work of batches in this process."""
    files: dict[int, list[Any]] = {file: [] for file in range(work.draw.num_files)}
    for task in work.tasks():
        for file, part in work.part(*task):
            files[file].append(part)
    for file, parts in files.items():
        work.write(file, parts)


def _batch_rows(
    folder: Path, way: str, carry_out: Callable[[BatchWork], None], num_rows: int
) -> list[Row]:
    folder.mkdir()
    seconds, drawn = [], []
    for count in (num_rows // 10, num_rows):
        store = folder / f"store-{count}"
        synthetic.write_store(store, count * 10 // 8, seed=0)  # four fifths train
        columns = partial(_training_rows, store)
        data = columns()
        n = len(data["label"])
        sampler = Poisson(n, min(4_096, n), max_batch_size=5_000)
        draw = Draw.of(sampler, data, run="benchmark", generation=0, first_step=0)
        draw = dataclasses.replace(draw, steps_per_file=32)
        out = folder / f"batches-{count}"
        write = drawn_by(carry_out, columns)
        seconds.append(_cpu(partial(_batches, out, draw, data, write)))
        drawn.append(n)
    _batches(folder / "alone", draw, data, draw_here)
    rate = (drawn[1] - drawn[0]) / (seconds[1] - seconds[0]) / 1e6
    same = _same(out, folder / "alone")
    return [
        _rate_row(f"rows to batches, {way}", rate, num_rows),
        Row.at_least(f"batches equal those of `BatchSource`, {way}", same, "yes", 1),
    ]


def _rate_row(name: str, rate: float, num_rows: int) -> Row:
    if num_rows < ENOUGH:
        return Row(name, rate, "M/s")
    return Row.at_least(name, rate, "M/s", BAR)


def _training_rows(store: Path) -> Columns:
    return Store.open(store).load("train")


def _batches(out: Path, draw: Draw, data: Columns, write: Callable[..., list[str]]) -> None:
    out.mkdir(0o700)
    write_manifest(out, draw, SEED, write(out, draw, SEED, data), data)


def _killed_rows(num_rows: int, kills: int) -> list[Row]:
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
        files = _raw(folder, "criteo-display", num_rows)
        raw = synthetic.LOGS["criteo-display"].format
        source = RawSource(raw, 0, FRACTIONS)
        size = sum(file.stat().st_size for file in files) // (kills + 2)
        store = prepare(files, folder / "a", source, raw.source(files), carry_out, range_bytes=size)
        raw.prepare(files, folder / "b")
        same = _same(store.path, folder / "b")
    return [
        Row("workers that were killed in the midst", float(kills - left[0]), ""),
        Row.at_least("store equals that of `prepare` after the kills", same, "yes", 1),
    ]


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


def _same(one: Path, other: Path) -> float:
    """Returns 1 if two folders hold the same files, byte for byte, and 0 if they do not."""
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return 0.0
    return float(all(filecmp.cmp(one / name, other / name, shallow=False) for name in names))


def _cpu(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of this process that a piece of work takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin
