"""Rows of raw text that `dpsgd prepare` turns into a store, a second of CPU time.

scripts/bench ingest --json ingest.json                 # the rate of each reader
scripts/bench ingest --rehearsal 4600000 --json x.json  # and whole commands, on a tenth of Criteo
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments.benchmarks.rows import Row, options_of, positive, report
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.tabular.format import TableFormat, table_schema

FULL = 46_000_000
"""Rows of the whole Criteo Display Ads data set, about."""


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("ingest", __doc__, quick="few rows, once")
    parser.add_argument("--rows", type=positive, default=500_000, help="synthetic rows to prepare")
    parser.add_argument("--repetitions", type=positive, default=3, help="runs for the median")
    parser.add_argument("--rehearsal", type=int, metavar="ROWS", help="run whole commands on these")
    options = parser.parse_args(argv)
    if (options.rehearsal or 10) < 10:
        parser.error("--rehearsal must be at least 10")
    if options.quick:
        options.rows, options.repetitions = 20_000, 1

    # First the commands: Linux counts the memory of this process, still small, as their own.
    rows = list(_rehearsal(options.rehearsal)) if options.rehearsal else []
    for log in synthetic.LOGS.values():
        rows += _rates(log, options.rows, options.repetitions)
    rows += _table_rates(options.rows, options.repetitions)
    return report(rows, options.json)


def _rates(log: synthetic.Log, num_rows: int, repetitions: int) -> Iterator[Row]:
    """Yields rows and bytes of raw text that become a store in a second of CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.tsv"
        synthetic.write_raw(raw, num_rows, seed=0, log=log)
        rate = _rate(partial(log.format.prepare, raw), num_rows, repetitions)
        size, name = raw.stat().st_size, log.format.schema.name
    yield Row.at_least(f"rows of raw text prepared, {name}", rate / 1e6, "M/s", 0.25)
    yield Row(f"text prepared, {name}", rate * size / num_rows / 1e6, "MB/s")


def _table_rates(num_rows: int, repetitions: int) -> Iterator[Row]:
    """Yields rows like Criteo's, 40 columns, that become a store as a table of named columns."""
    raw_format = synthetic.LOGS["criteo-display"].format
    schema = raw_format.schema
    texts = dict.fromkeys(schema.categories, pa.string())
    table = TableFormat(
        table_schema("label", categories=schema.categories, numbers=schema.integers)
    )
    with tempfile.TemporaryDirectory() as folder:
        tsv, parquet = Path(folder) / "table.tsv", Path(folder) / "table.parquet"
        synthetic.write_raw(tsv, num_rows, seed=0)
        tsv.write_text("\t".join(raw_format.columns) + "\n" + tsv.read_text())
        with pyarrow.csv.open_csv(
            tsv,
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
            convert_options=pyarrow.csv.ConvertOptions(column_types=texts),
        ) as batches:
            pyarrow.parquet.write_table(batches.read_all(), parquet)
        for name, file in {"TSV": tsv, "Parquet": parquet}.items():
            rate = _rate(partial(table.prepare, [file]), num_rows, repetitions)
            yield Row.at_least(f"rows of a table prepared, {name}", rate / 1e6, "M/s", 0.25)


def _rate(prepare: Callable[[Path], object], num_rows: int, repetitions: int) -> float:
    """Returns how many rows `prepare` makes a store of in a second of CPU time."""
    rates = []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.process_time()
            prepare(Path(folder) / "store")
            rates.append(num_rows / (time.process_time() - begin))
    return statistics.median(rates)


# --- Whole commands ------------------------------------------------------------------------------


class _Cost(NamedTuple):
    """What one command took."""

    cpu: float
    wall: float
    peak: float
    """Largest resident memory, GB."""


def _rehearsal(num_rows: int) -> Iterator[Row]:
    """Yields what the commands of a full run cost, on `num_rows` rows, and scaled to all of them.

    A tenth of the rows shows that the cost is proportional to them. Bars are in CPU time: each
    command is one thread, so that on an idle machine this is the wall time, the disk apart.
    """
    few, many = (_commands(n) for n in (num_rows // 10, num_rows))
    bars = {"raw file generated": 10.0, "raw file prepared": 6.0}
    for what, cost in many.items():
        name = f"{what}, {num_rows:,} rows"
        yield Row(name, cost.cpu, "CPU s")
        yield Row(name, cost.wall, "wall s")
        yield Row.at_most(f"{name}, peak memory", cost.peak, "GB", 4.0)
        # Starting up costs the same for few rows as for many, and cancels.
        per_row = (cost.cpu - few[what].cpu) / (num_rows - num_rows // 10)
        minutes = (cost.cpu + per_row * (FULL - num_rows)) / 60
        scaled = f"{what}, scaled to {FULL:,} rows"
        if what in bars:
            yield Row.at_most(scaled, minutes, "CPU min", bars[what])
        else:
            yield Row(scaled, minutes, "CPU min")
        yield Row(f"{what}, memory at {num_rows:,} / a tenth", cost.peak / few[what].peak, "x")


def _commands(num_rows: int) -> dict[str, _Cost]:
    with tempfile.TemporaryDirectory() as folder:
        raw, store, direct = (str(Path(folder) / name) for name in ("raw.txt", "store", "direct"))
        generate = ["prepare", "synthetic", "--num-rows", str(num_rows)]
        return {
            "raw file generated": _cost([*generate, raw, "--raw"]),
            "raw file prepared": _cost(["prepare", "criteo-display", raw, store]),
            "store generated directly": _cost([*generate, direct]),
        }


def _cost(words: list[str]) -> _Cost:
    """Runs `dpsgd` with these words in a process of its own."""
    program = "import sys; from experiments.cli import main; sys.exit(main(sys.argv[1:]))"
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"dpsgd {' '.join(words)} ended with status {child.returncode}")
    unit = 1e9 if sys.platform == "darwin" else 1e6  # bytes there, kilobytes elsewhere
    return _Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / unit)


if __name__ == "__main__":
    sys.exit(main())
