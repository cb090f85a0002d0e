"""CPU time to draw an epoch of 46 million examples and a batch, and whether a run waits for it.

What a run waits for is measured by the clock: two epochs of blocks are made in the background, as
the loop has them made, for an accelerator that takes 0.7 ms a step, the least in which an H200 can
move the bytes of a step of the large model. It is played by sleeping, since meanwhile the host is
free; so this needs a machine with a core to spare. The first draw, for which every run waits, is
not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import samplers
from dpsgd.engine.blocks import in_background, plan_blocks
from experiments.benchmarks.case import Estimate, Row, at, cases
from experiments.benchmarks.timing import Spent
from samplers import BatchSource

NUM_EXAMPLES = 46_000_000
"""About the rows of the Criteo Display Ads data set."""
BATCH_BARS = {1024: 0.2, 65_536: 2.0}
"""Milliseconds a batch, by batch size."""
STEP_SECONDS = 0.7e-3
"""Time of a step on a fast accelerator, batch 1024."""
SAMPLERS = "Deterministic", "Shuffle", "Poisson", "BallsAndBins"


def draw(
    sampler: str, batch_size: int, num_examples: int = NUM_EXAMPLES, *, batches: int = 100
) -> Iterator[Row]:
    """Times first the draw of an epoch, then batches of its plan."""
    source = BatchSource(getattr(samplers, sampler)(num_examples, batch_size), seed=0)
    row = at(f"{sampler}, n {num_examples / 1e6:g}M, batch {batch_size}")
    drawn = Spent.on(lambda: source.passes(0)).cpu_seconds
    yield row("draw of an epoch", drawn, "s", at_most=10.0)
    steps = range(1, min(batches, source.sampler.steps_per_epoch - 1) + 1)
    spent = [1e3 * Spent.on(partial(source.passes, step)).cpu_seconds for step in steps]
    yield row("a batch, median", Estimate.median(spent), "ms", at_most=BATCH_BARS[batch_size])


def waiting(sampler: str, num_examples: int = NUM_EXAMPLES) -> Iterator[Row]:
    """Measures the share of an epoch in which a run would wait for its batches."""
    drawn_by = getattr(samplers, sampler)(num_examples, min(BATCH_BARS), epochs=2)
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
    row = at(f"{sampler}, n {num_examples / 1e6:g}M, batch {drawn_by.expected_batch_size:g}")
    yield row("waiting for batches / computing", share, "x", at_most=0.02)


FEWER: dict[str, Any] = {"quick": {"num_examples": 1_000_000}, "all_quick": True}
OVER = {"sampler": SAMPLERS}
CASES = [
    *cases(draw, over={**OVER, "batch_size": tuple(BATCH_BARS)}, seconds=10, **FEWER),
    *cases(waiting, over=OVER, seconds=75, **FEWER),
]
