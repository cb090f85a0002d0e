"""What steps with lazy tables cost on a GPU, beside dense noise and beside none at all."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from experiments.benchmarks.gpu_record import peak_memory
from experiments.benchmarks.rows import Row
from experiments.benchmarks.tables_lazydp import dlrm
from experiments.benchmarks.tables_steps import (
    ADAM,
    SGD,
    Blocks,
    Model,
    Setting,
    clicks,
    lazy,
    step_seconds,
)
from experiments.benchmarks.timing import in_turns


def click_steps(
    max_buckets: int,
    hidden: tuple[int, ...],
    batch: int,
    block_steps: int,
    rounds: int,
    *,
    barred: bool = True,
) -> Iterator[Row]:
    """Times steps of the click model: dense by Adam and SGD, lazy, and without privacy."""
    dense = {"Adam": ADAM, "SGD": SGD}
    return _steps(clicks(max_buckets, hidden), (batch, block_steps), rounds, dense, barred)


def dlrm_steps(
    tables: int, rows: int, batch: int, block_steps: int, rounds: int, *, barred: bool = True
) -> Iterator[Row]:
    """Times steps with tables of so many rows of 128 numbers: lazy, and without privacy."""
    return _steps(dlrm(rows, tables), (batch, block_steps), rounds, {}, barred)


def _steps(
    model: Model, sizes: tuple[int, int], rounds: int, dense: dict[str, Any], barred: bool
) -> Iterator[Row]:
    batch, block_steps = sizes
    at = f"{model.num_params / 1e6:.3g}M parameters, batch {batch}"
    setting = Setting(model, batch, block_steps)
    # One state at a time: the large ones fill the device. So they take no turns.
    kinds: dict[str, Callable[[], Blocks]] = {
        "DP step, tables lazy": lambda: setting.private(ADAM, lazy()),
        "DP step, tables lazy, momentum 0.9": lambda: setting.private(ADAM, lazy(0.9)),
        "step without privacy, tables by sparse SGD": lambda: setting.ordinary(ADAM, lazy()),
    }
    for name, optimizer in dense.items():
        kinds[f"DP step, all by {name}"] = functools.partial(setting.private, optimizer)
    found: dict[str, float] = {}
    for name, made in kinds.items():
        blocks = made()
        series = in_turns({name: blocks}, rounds, time.perf_counter)
        found[name] = step_seconds(series, name, block_steps)
        yield Row(f"{name}, {at}", 1e3 * found[name], "ms")
        if blocks.state.tables:
            flush = in_turns({"flush": blocks.flush}, rounds, time.perf_counter).median("flush")
            yield Row(f"flush, {name}, {at}", 1e3 * flush, "ms")
        memory: Any = blocks.compiled.memory_analysis()
        yield Row(f"temporary memory, {name}, {at}", memory.temp_size_in_bytes / 1e6, "MB")
        del blocks
    late, _, ordinary, *others = found.values()
    name, ratio = f"DP step, tables lazy / without privacy, {at}", late / ordinary
    yield Row.at_most(name, ratio, "x", 2.0) if barred else Row(name, ratio, "x")
    for optimizer, seconds in zip(dense, others, strict=True):
        name, ratio = f"DP step, all by {optimizer} / tables lazy, {at}", seconds / late
        bar = barred and optimizer == "Adam"
        yield Row.at_least(name, ratio, "x", 5.0) if bar else Row(name, ratio, "x")
    peak = peak_memory()
    yield Row(f"peak memory so far, tables, {at}", None if peak is None else peak / 1e9, "GB")
