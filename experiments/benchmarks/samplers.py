"""Time to draw an epoch of 46 million examples, and to read a batch of it, for each sampler.

scripts/bench samplers --json samplers.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from experiments.benchmarks.rows import Row, report
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson, Shuffle

NUM_EXAMPLES = 46_000_000
"""About the rows of the Criteo Display Ads data set."""
BATCH_BARS = {1024: 0.2, 65_536: 2.0}
"""Milliseconds a batch, by batch size."""
SAMPLERS = (Deterministic, Shuffle, Poisson, BallsAndBins)


def measure(kind: type, num_examples: int, batch_size: int, batches: int) -> list[Row]:
    """Returns the rows of one sampler and batch size: first the draw, then batches of its plan."""
    source = BatchSource(kind(num_examples, batch_size), seed=0)
    begin = time.process_time()
    source.passes(0)
    drawn = time.process_time() - begin
    spent = []
    for step in range(1, min(batches, source.sampler.steps_per_epoch - 1) + 1):
        begin = time.process_time()
        source.passes(step)
        spent.append(time.process_time() - begin)
    at = f"{kind.__name__}, n {num_examples / 1e6:g}M, batch {batch_size}"
    return [
        Row.at_most(f"draw of an epoch, {at}", drawn, "s", 10.0),
        Row.at_most(
            f"a batch, median, {at}", 1e3 * statistics.median(spent), "ms", BATCH_BARS[batch_size]
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = argparse.ArgumentParser("bench samplers", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="a million examples")
    parser.add_argument("--batches", type=int, default=100, help="batches for each median")
    options = parser.parse_args(argv)
    if options.batches < 1:
        parser.error("--batches must be at least 1")
    num_examples = 1_000_000 if options.quick else NUM_EXAMPLES
    rows = [
        row
        for kind in SAMPLERS
        for batch_size in BATCH_BARS
        for row in measure(kind, num_examples, batch_size, options.batches)
    ]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
