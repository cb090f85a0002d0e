"""Rows of raw text that `dpsgd prepare` turns into a store, a second of CPU time.

scripts/bench ingest --json ingest.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmarks.rows import Row, report
from experiments.criteo import display, synthetic


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if the bar does not hold."""
    parser = argparse.ArgumentParser("bench ingest", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="few rows, once")
    parser.add_argument("--rows", type=int, default=500_000, help="synthetic rows to prepare")
    parser.add_argument("--repetitions", type=int, default=3, help="runs for the median")
    options = parser.parse_args(argv)
    if options.rows < 1 or options.repetitions < 1:
        parser.error("--rows and --repetitions must be at least 1")
    if options.quick:
        options.rows, options.repetitions = 20_000, 1

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.tsv"
        synthetic.write_raw(raw, options.rows, seed=0)
        rates = []
        for repetition in range(options.repetitions):
            begin = time.process_time()
            display.prepare(raw, Path(folder) / str(repetition))
            rates.append(options.rows / (time.process_time() - begin))
        size = raw.stat().st_size
    rate = statistics.median(rates)
    return report(
        [
            Row.at_least("rows of raw text prepared", rate / 1e6, "M/s", 0.25),
            Row("text prepared", rate * size / options.rows / 1e6, "MB/s"),
        ],
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
