"""A lazy step of a large model, in a process of its own, which says how much memory it took."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.tables_steps import ADAM, Setting, clicks, lazy
from experiments.benchmarks.timing import Series, in_turns


class Large(NamedTuple):
    """What was measured."""

    num_params: int
    steps: Series
    """Seconds of a block of steps: "large", and "small", of a model that is."""
    flush: float
    """Seconds."""
    peak: float
    """Bytes."""


def alone(
    max_buckets: int, small: int, hidden: tuple[int, ...], momentum: float, batch: int, rounds: int
) -> Large:
    """Returns what `_measured` does in a new process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        what = max_buckets, small, hidden, momentum, batch, rounds
        return process.submit(_measured, *what).result()


def _measured(
    max_buckets: int, small: int, hidden: tuple[int, ...], momentum: float, batch: int, rounds: int
) -> Large:
    blocks = {}
    for name, buckets in (("large", max_buckets), ("small", small)):
        model = clicks(buckets, hidden)
        blocks[name] = Setting(model, batch).private(ADAM, lazy(momentum))
    steps = in_turns(blocks, rounds)
    flush = in_turns({"flush": blocks["large"].flush}, 1).median("flush")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_params = clicks(max_buckets, hidden).num_params
    return Large(num_params, steps, flush, peak * (1 if sys.platform == "darwin" else 1024))


def free_memory() -> float:
    """Returns the bytes that a process could take; 0 where nothing says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    found = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines)}
    return 1024.0 * int(found.get("MemAvailable", 0))
