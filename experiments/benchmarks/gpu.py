"""All that only a GPU can tell, in one command and one record: is it right there, how fast is it.

    scripts/bench gpu --minutes 8 --json gpu.json
    python -m experiments.benchmarks.gpu          (the same, in a bare checkout)
    scripts/bench gpu --tiny                      (a rehearsal on a CPU: figures mean nothing)

It needs JAX, flax, optax, NumPy and SciPy, and nothing installed of this project. The parts come in
the order of their worth: first that clipping, noise, draws and sums are on this device what they
are by definition; then steps at 85 million parameters, an epoch of 37 million rows, a whole run.
The record is written after every figure: what stops one part loses nothing, and the next goes on.
The bars of speed are for an H200.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

# The CPU draws the secure noise, and is what the device is compared with.
if os.environ.get("JAX_PLATFORMS", "cpu") not in ("", "cpu") and (
    "cpu" not in os.environ["JAX_PLATFORMS"].split(",")
):
    os.environ["JAX_PLATFORMS"] += ",cpu"

from experiments.benchmarks import gpu_equality as equality
from experiments.benchmarks import gpu_tables as tables
from experiments.benchmarks import gpu_training as training
from experiments.benchmarks.gpu_record import Part, Record
from experiments.benchmarks.gpu_training import Size
from experiments.benchmarks.rows import report
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig

RECORD = Path(__file__).parents[1] / "records" / "gpu.json"

PAPER = Size(PRESETS["paper"], 64, 7, 1 << 20, 1 << 28)
TINY = Size(ModelConfig(2, 2**4, ()), 3, 2, 1 << 10, 1 << 16)


def parts() -> list[Part]:
    """Returns what is measured on a GPU, the worthiest first."""
    middle = ModelConfig(embedding_dim=14, max_buckets=2**11, hidden=(256, 256))
    return [
        Part("clipping", 40, partial(equality.clipping, middle, 256)),
        Part("noise", 10, partial(equality.noise, (4096, 301))),
        Part("draws", 15, partial(equality.draws, 100_000, 1024)),
        Part("secure", 15, partial(equality.secure, ModelConfig(8, 2**8, (64,)), 32)),
        Part("audit", 15, equality.audit),
        Part("copies", 2, partial(training.copies, PAPER)),
        Part("steps 1024", 45, partial(training.steps, PAPER, 1024)),
        Part("steps 8192", 90, partial(training.steps, PAPER, 8192, variants=True)),
        Part("steps 65536", 60, partial(training.steps, PAPER, 65_536)),
        Part("tables 85M", 60, partial(tables.click_steps, 2**20, (598, 598, 598), 1024, 64, 7)),
        Part("tables 1B", 60, partial(tables.click_steps, 2**24, (598, 598, 598), 1024, 64, 7)),
        Part("dlrm 10B", 60, partial(tables.dlrm_steps, 26, 3_000_000, 2048, 64, 7)),
        Part("epoch", 90, partial(training.epoch, PAPER.model, 37_000_000, 1 << 20, 8192)),
        Part("interrupted", 30, partial(equality.interrupted, middle, 200_000, 1024)),
        Part("run", 60, partial(training.whole_run, PAPER.model, 1_000_000, 8192)),
        Part("precisions", 10, partial(training.precisions, 65_536, (598, 598), 7)),
    ]


def tiny_parts() -> list[Part]:
    """Returns the same parts, so small that a CPU rehearses them in a minute at most."""
    one_layer = ModelConfig(2, 2**4, (4,))
    return [
        Part("clipping", 1, partial(equality.clipping, one_layer, 16, ("the highest",))),
        Part("noise", 1, partial(equality.noise, (64, 33))),
        Part("draws", 1, partial(equality.draws, 1000, 100)),
        Part("secure", 1, partial(equality.secure, TINY.model, 8)),
        Part("audit", 1, equality.audit),
        Part("copies", 1, partial(training.copies, TINY)),
        Part("steps 32", 1, partial(training.steps, TINY, 32, variants=True)),
        Part("tables", 1, partial(tables.click_steps, 2**4, (4,), 16, 2, 1, barred=False)),
        Part("dlrm", 1, partial(tables.dlrm_steps, 3, 64, 8, 2, 1, barred=False)),
        Part("epoch", 1, partial(training.epoch, TINY.model, 8_000, 2_000, 50)),
        Part("interrupted", 1, partial(equality.interrupted, TINY.model, 10_000, 50)),
        Part("run", 1, partial(training.whole_run, TINY.model, 2_000, 50, audit=False)),
        Part("precisions", 1, partial(training.precisions, 64, (8, 8), 2)),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measures what fits into the time; the status is 1 if a part failed or a bar does not hold."""
    parser = argparse.ArgumentParser("bench gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, written as it goes")
    parser.add_argument("--minutes", type=float, default=8.0, help="time that it may take")
    parser.add_argument("--tiny", action="store_true", help="rehearse everything, very small")
    parser.add_argument(
        "--parts", nargs="+", metavar="NAME", help="only those that begin like this"
    )
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error("--minutes must be greater than 0")
    offered = {part.name: part for part in (tiny_parts() if options.tiny else parts())}
    for name in options.parts or ():
        if name not in offered:
            parser.error(f"--parts: there is no {name!r}; there are {', '.join(offered)}")
    chosen = [offered[name] for name in offered if name in (options.parts or offered)]
    file = options.json or (Path("gpu-tiny.json") if options.tiny else RECORD)
    record = Record(file, options.minutes, tiny=options.tiny)
    try:
        for part in chosen:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            record.run(part)
    finally:  # also when it is interrupted
        report(record.rows(), None)
        print(f"written: {file}")
    return int(not record.holds)


if __name__ == "__main__":
    sys.exit(main())
