"""Rows of raw text that `dpsgd prepare` turns into a store, a second of CPU time.

`rehearsal` runs the commands of a full run, on a tenth of Criteo's rows or on `--rows`, and scales
to all of them. That a tenth of its rows takes a tenth shows that the cost is proportional to them.
Its bars are in CPU time: each command is one thread, so that on an idle machine this is the wall
time, the disk apart.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments import cli
from experiments.benchmarks.case import Estimate, Row, cases, figure
from experiments.benchmarks.timing import Spent, alone
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.tabular.format import TableFormat, table_schema

FULL = 46_000_000
"""Rows of the whole Criteo Display Ads data set, about."""
BARS = {"raw file generated": 10.0, "raw file prepared": 6.0}
"""CPU minutes of whole commands, at all rows."""


def raw_text(log: str, *, rows: int = 500_000, rounds: int = 3) -> Iterator[Row]:
    """Measures rows and bytes of raw text that become a store in a second of CPU time."""
    format = synthetic.LOGS[log].format
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.tsv"
        synthetic.write_raw(raw, rows, seed=0, log=synthetic.LOGS[log])
        found = _prepared(partial(format.prepare, raw), rows, rounds)
        size, name = raw.stat().st_size, format.schema.name
    yield figure(f"rows of raw text prepared, {name}", found, "M/s", at_least=0.25)
    yield figure(f"text prepared, {name}", found * size / rows, "MB/s")


def table(*, rows: int = 500_000, rounds: int = 3) -> Iterator[Row]:
    """Measures rows like Criteo's, 40 columns, as a table of named columns."""
    raw_format = synthetic.LOGS["criteo-display"].format
    schema = raw_format.schema
    texts = dict.fromkeys(schema.categories, pa.string())
    named = TableFormat(
        table_schema("label", categories=schema.categories, numbers=schema.integers)
    )
    with tempfile.TemporaryDirectory() as folder:
        tsv, parquet = Path(folder) / "table.tsv", Path(folder) / "table.parquet"
        synthetic.write_raw(tsv, rows, seed=0)
        tsv.write_text("\t".join(raw_format.columns) + "\n" + tsv.read_text())
        with pyarrow.csv.open_csv(
            tsv,
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
            convert_options=pyarrow.csv.ConvertOptions(column_types=texts),
        ) as batches:
            pyarrow.parquet.write_table(batches.read_all(), parquet)
        for name, file in {"TSV": tsv, "Parquet": parquet}.items():
            found = _prepared(partial(named.prepare, [file]), rows, rounds)
            yield figure(f"rows of a table prepared, {name}", found, "M/s", at_least=0.25)


def _prepared(prepare: Callable[[Path], object], rows: int, rounds: int) -> Estimate:
    """Returns millions of rows of which `prepare` makes a store in a second of CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        work = [partial(prepare, Path(folder) / str(number)) for number in range(rounds)]
        return Estimate.median([rows / 1e6 / Spent.on(once).cpu_seconds for once in work])


class Cost(NamedTuple):
    """CPU and wall seconds of one command, and its largest memory, GB."""

    cpu: float
    wall: float
    peak: float


def rehearsal(*, rows: int = 4_600_000) -> Iterator[Row]:
    few, many = (_commands(n) for n in (rows // 10, rows))
    for what, cost in many.items():
        name = f"{what}, {rows:,} rows"
        yield figure(name, cost.cpu, "CPU s")
        yield figure(name, cost.wall, "wall s")
        yield figure(f"{name}, peak memory", cost.peak, "GB", at_most=4.0)
        # Starting up costs the same for few rows as for many, and cancels.
        per_row = (cost.cpu - few[what].cpu) / (rows - rows // 10)
        minutes = (cost.cpu + per_row * (FULL - rows)) / 60
        scaled = f"{what}, scaled to {FULL:,} rows"
        yield figure(scaled, minutes, "CPU min", at_most=BARS.get(what))
        yield figure(f"{what}, memory at {rows:,} / a tenth", cost.peak / few[what].peak, "x")


def _commands(rows: int) -> dict[str, Cost]:
    with tempfile.TemporaryDirectory() as folder:
        raw, store, direct = (str(Path(folder) / name) for name in ("raw.txt", "store", "direct"))
        generate = ["prepare", "synthetic", "--num-rows", str(rows)]
        return {
            "raw file generated": _cost([*generate, raw, "--raw"]),
            "raw file prepared": _cost(["prepare", "criteo-display", raw, store]),
            "store generated directly": _cost([*generate, direct]),
        }


def _cost(words: list[str]) -> Cost:
    begin = time.perf_counter()
    found = alone(_command, words)
    return Cost(found.cpu_seconds, time.perf_counter() - begin, found.gigabytes)


def _command(words: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if status := cli.main(words):
        raise RuntimeError(f"dpsgd {' '.join(words)} ended with status {status}")


FEW = {"rows": 20_000, "rounds": 1}
CASES = [
    *cases(rehearsal, seconds=200, asked=True),
    *cases(raw_text, over={"log": synthetic.LOGS}, quick=FEW, all_quick=True),
    *cases(table, quick=FEW),
]
