"""Time to draw an epoch of 46 million examples and to read a batch, and whether a run waits for it.

    scripts/bench samplers --json samplers.json      (some six minutes, most of them idle)
    scripts/bench samplers --quick                   (a million examples)

Draws and batches are timed in CPU seconds. What a run waits for is measured by the clock: two
epochs of blocks are made in the background, as the loop has them made, for an accelerator that
takes 0.7 ms a step, the least in which an H200 can move the bytes of a step of the papers' model.
It is played by sleeping, since meanwhile the host is free; so this needs a machine with a core to
spare. The first draw, for which every run waits, is not counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing

from dpsgd.engine.blocks import in_background, plan_blocks
from experiments.benchmarks.rows import Row, options_of, positive, report
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson, Shuffle

NUM_EXAMPLES = 46_000_000
"""About the rows of the Criteo Display Ads data set."""
BATCH_BARS = {1024: 0.2, 65_536: 2.0}
"""Milliseconds a batch, by batch size."""
STEP_SECONDS = 0.7e-3
"""Time of a step on a fast accelerator, batch 1024."""
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


def waiting(kind: type, num_examples: int) -> Row:
    """Returns the share of an epoch in which a run would wait for its batches."""
    sampler = kind(num_examples, min(BATCH_BARS), epochs=2)
    source = BatchSource(sampler, seed=0, read_ahead=True)
    plans = plan_blocks(source, first_step=0, block_steps=64)
    waited = []
    with closing(in_background(plans)) as blocks:
        begin = time.perf_counter()
        for steps, _ in blocks:
            waited.append(time.perf_counter() - begin)
            time.sleep(STEP_SECONDS * len(steps))
            begin = time.perf_counter()
    share = sum(waited[1:]) / (STEP_SECONDS * sampler.num_steps)
    at = f"{kind.__name__}, n {num_examples / 1e6:g}M, batch {sampler.expected_batch_size:g}"
    return Row.at_most(f"waiting for batches / computing, {at}", share, "x", 0.02)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("samplers", __doc__, quick="a million examples")
    parser.add_argument("--only", choices=["draws", "waiting"], help="measure nothing else")
    parser.add_argument("--batches", type=positive, default=100, help="batches for each median")
    options = parser.parse_args(argv)
    num_examples = 1_000_000 if options.quick else NUM_EXAMPLES
    rows = []
    if options.only != "waiting":
        for kind in SAMPLERS:
            for batch_size in BATCH_BARS:
                rows += measure(kind, num_examples, batch_size, options.batches)
    if options.only != "draws":
        rows += [waiting(kind, num_examples) for kind in SAMPLERS]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
