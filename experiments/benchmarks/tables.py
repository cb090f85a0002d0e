"""What a step with lazy tables costs beside dense noise and beside none at all.

`steps`: blocks of steps in turns, of the click model at 85M parameters, batch 1,024, on rows whose
look-ups mostly differ; `sizes`: other numbers of rows; `crossover`: how few are too few; `large`: a
billion parameters, in a process of its own, dense steps scaled from 8 and 85M; `lazydp`: the tables
of LazyDP (arXiv 2404.08847), 96 GB of them; `epoch`: an epoch of generated rows by `dpsgd train`,
and the AUC beside the best of their planted model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax

from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.programs import (
    ADAM,
    BLOCK_STEPS,
    DLRM_WIDTH,
    SGD,
    Model,
    Program,
    Steps,
    clicks,
    dlrm,
    lazy,
)
from experiments.benchmarks.timing import Series, alone, in_turns
from experiments.benchmarks.train import generated, run_of, steps_of_run
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig

STEP = 1 / BLOCK_STEPS
BATCH, HIDDEN = 1024, PRESETS["large"].hidden
LAZIES = {"SGD": 0.0, "momentum 0.9": 0.9}
"""How tables are trained, and their momentum."""
LARGE_GIGABYTES = 12.0
LAZYDP_BYTES = 96e9
THEIRS = 119
"""Times the throughput of DP-SGD, as LazyDP's paper says of a CPU with a GPU, on average."""


def _at(num_params: int, batch_size: int) -> str:
    return f"{num_params / 1e6:.3g}M parameters, batch {batch_size:,}"


def _kinds(
    model: Model, batch_size: int, block_steps: int = BLOCK_STEPS, dense: bool = True
) -> dict[str, Callable[[], Program]]:
    """Returns what makes DP steps with lazy tables, and by `dense` noise."""
    made = Steps(model, batch_size, block_steps).private
    by = {"Adam": ADAM, "SGD": SGD} if dense else {}
    kinds: dict[str, Callable[[], Program]] = {
        f"all by {name}": partial(made, optimizer) for name, optimizer in by.items()
    }
    return kinds | {f"tables lazy by {k}": partial(made, ADAM, lazy(x)) for k, x in LAZIES.items()}


def steps(
    buckets: int = 2**20,
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = BATCH,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    return table_steps(clicks(buckets, hidden), batch_size, rounds)


def table_steps(
    model: Model,
    batch_size: int,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    *,
    block_steps: int = BLOCK_STEPS,
    dense: bool = True,
    alone: bool = False,
) -> Iterator[Row]:
    """Times steps with lazy tables, without privacy, and by `dense` noise; `alone`: no two at once.

    Several large states may not fit on a device.
    """
    row, step = at(_at(model.num_params, batch_size)), 1 / block_steps
    ordinary = partial(Steps(model, batch_size, block_steps).ordinary, ADAM, lazy())
    kinds: dict[str, Callable[[], Program]] = {"ordinary": ordinary}
    kinds |= _kinds(model, batch_size, block_steps, dense)
    spent, flushes = Series(), Series()
    temporary: dict[str, float] = {}
    for names in [[name] for name in kinds] if alone else [list(kinds)]:
        work = {name: kinds[name]() for name in names}
        spent |= in_turns(work, rounds, clock)
        late = {name: one.flush for name, one in work.items() if "lazy" in name}
        flushes |= in_turns(late, rounds, clock)
        temporary |= {name: one.temporary_bytes / 1e6 for name, one in work.items()}
        del work, late
    name = "step without privacy, tables by sparse SGD"
    yield row(name, spent.median("ordinary", step), "s")
    for kind in kinds:
        if kind != "ordinary":
            yield row(f"DP step, {kind}", spent.median(kind, step), "s")
    for kind, flush in ((kind, flushes.median(kind)) for kind in flushes):
        for other, bar in {"all by Adam": 5.0, "all by SGD": None}.items():
            if other in kinds:
                ratio = spent.ratio(other, kind)
                yield row(f"DP step, {other} / {kind}", ratio, "x", at_least=bar)
        ratio = spent.ratio(kind, "ordinary")
        yield row(f"DP step, {kind} / without privacy", ratio, "x", at_most=2.0)
        yield row(f"flush, {kind}", flush, "s")
        yield row(f"flush / step, {kind}", flush / spent.median(kind, step), "x")
    for kind, size in temporary.items():
        yield row(f"temporary memory, {kind}", size, "MB")


def sizes(
    sizes: tuple[int, ...] = (2**11, 2**16, 2**20),
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = BATCH,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    models = [clicks(buckets, hidden) for buckets in sizes]
    smallest, *_, largest = (model.num_params / 1e6 for model in models)
    for what, momentum in LAZIES.items():
        work = {
            _at(model.num_params, batch_size): Steps(model, batch_size).private(
                ADAM, lazy(momentum)
            )
            for model in models
        }
        spent = in_turns(work, rounds)
        for size in work:
            name = f"DP step, other sizes, tables lazy by {what}, {size}"
            yield figure(name, spent.median(size, STEP), "s")
        least = min(work, key=spent.median)
        most = max(spent.ratio(size, least) for size in work)
        of = f"{len(models)} sizes, {smallest:.3g}M to {largest:.3g}M parameters"
        name = f"DP step, tables lazy by {what}, dearest / cheapest of {of}"
        yield figure(name, most, "x", at_most=1.25)


def crossover(buckets: int, batch_size: int = BATCH, *, rounds: int = 5) -> Iterator[Row]:
    """Measures few rows, and dense layers that are next to nothing."""
    model = clicks(buckets, (8,))
    spent = in_turns({k: made() for k, made in _kinds(model, batch_size).items()}, rounds)
    rows = max(leaf.shape[0] for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
    row = at(f"{rows / (batch_size * len(DISPLAY_ADS.categories)):.2g} rows a look-up")
    for one, other in itertools.product(("Adam", "SGD"), LAZIES):
        dense, these = f"all by {one}", f"tables lazy by {other}"
        yield row(f"DP step, {dense} / {these}", spent.ratio(dense, these), "x")


class Large(NamedTuple):
    """Seconds of blocks of steps, "large" and "small", and of a flush of the large model."""

    num_params: int
    spent: Series
    flush: float


def _large(
    many: int, few: int, hidden: tuple[int, ...], momentum: float, batch_size: int, rounds: int
) -> Large:
    work = {
        name: Steps(clicks(buckets, hidden), batch_size).private(ADAM, lazy(momentum))
        for name, buckets in (("large", many), ("small", few))
    }
    spent = in_turns(work, rounds)
    flush = in_turns({"flush": work["large"].flush}, 1).median("flush")
    return Large(clicks(many, hidden).num_params, spent, flush)


def large(
    sizes: tuple[int, int, int] = (2**15, 2**20, 2**24),
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = BATCH,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    """Measures very many rows: the last of three sizes; of the others a dense step."""
    *few, many = sizes
    models = {str(buckets): clicks(buckets, hidden) for buckets in few}
    dense = in_turns(
        {name: Steps(model, batch_size).private(ADAM) for name, model in models.items()}, rounds
    )
    (x, y), (x2, y2) = ((m.num_params, dense.median(k, STEP)) for k, m in models.items())
    for what, momentum in LAZIES.items():
        process = alone(_large, many, few[0], hidden, momentum, batch_size, rounds)
        found: Large = process.value
        this = f"tables lazy by {what}"
        place = _at(found.num_params, batch_size)
        row, step = at(place), found.spent.median("large", STEP)
        yield row(f"DP step, {this}", step, "s")
        scaled = y + (y2 - y) / (x2 - x) * (found.num_params - x)
        name = f"DP step, all by Adam, scaled from {x / 1e6:.3g}M and {x2 / 1e6:.3g}M"
        yield row(name, scaled, "s")
        yield row(f"{name} / {this}", scaled / step, "x", at_least=50.0)
        ratio = found.spent.ratio("large", "small")
        yield figure(f"DP step, {this}, {place} / {x / 1e6:.3g}M", ratio, "x", at_most=1.25)
        yield row(f"flush, {this}", found.flush, "s")
        yield row(f"flush / step, {this}", found.flush / step, "x")
        most, bar = process.gigabytes, LARGE_GIGABYTES
        yield row(f"most memory of the process, {this}", most, "GB", at_most=bar)


def lazydp(
    sizes: tuple[int, int] = (2**14, 2**16),
    tables: int = 26,
    batch_size: int = 2048,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    """Measures steps, tables by SGD, of two numbers of rows, and scales them to 96 GB."""
    seconds = []
    for rows in sizes:
        one = Steps(dlrm(rows, tables), batch_size)
        work = {"all": one.private(SGD), "tables lazy": one.private(SGD, lazy())}
        spent = in_turns(work, rounds)
        held = 4 * tables * DLRM_WIDTH * rows
        size = f"{held / 1e9:.3g} GB, batch {batch_size:,}"
        row = at(f"{tables} tables of {DLRM_WIDTH} columns, {size}")
        dense, deferred = (spent.median(name, STEP) for name in work)
        seconds.append((held, dense))
        yield row("DP step, SGD", dense, "s")
        yield row("DP step, SGD, tables lazy", deferred, "s")
        yield row("DP step, SGD, all / tables lazy", spent.ratio("all", "tables lazy"), "x")
        for what, program in work.items():
            yield row(f"compiling that step, SGD, {what}", program.compiling.cpu_seconds, "s")
        del work
    (x, y), (x2, y2) = seconds
    scaled = y + (y2 - y) / (x2 - x) * (LAZYDP_BYTES - x)
    to = f"{LAZYDP_BYTES / 1e9:g} GB"
    name = f"DP step, SGD, all (scaled from {x / 1e9:.3g} and {x2 / 1e9:.3g} GB to {to})"
    yield figure(name, scaled, "s")
    name = f"{name} / tables lazy ({x2 / 1e9:.3g} GB); LazyDP: {THEIRS}"
    yield figure(name, scaled / deferred, "x")


def epoch(
    model: ModelConfig = PRESETS["large"],
    batch_size: int = BATCH,
    epsilon: float = 3.0,
    *,
    rows: int = 4_600_000,
) -> Iterator[Row]:
    chosen = {"target_epsilon": epsilon, "tables": "lazy", "audit": False}
    spec = run_of("balls-and-bins", batch_size, 1, **chosen)
    with generated(round(rows / 0.8), model) as (task, folder, made):  # of which so many train
        record, (seconds, spent) = steps_of_run(task, spec, folder / "run")
    size = _at(record["num_params"], batch_size)
    yield figure(f"an epoch of {rows:,} rows, tables lazy, {size}", spent, "s")
    yield figure(f"the same by the clock, {size}", seconds, "s")
    yield figure(f"an epoch of 46M rows, scaled, {size}", spent * 46e6 / rows, "s")
    yield figure(f"its epsilon, {rows:,} rows", record["epsilon_upper"], at_most=epsilon)
    found, best = record["metrics"]["test_auc"], made.summary.test_bayes_auc
    yield figure(f"test AUC after the epoch, epsilon {epsilon:g}, {rows:,} rows", found)
    yield figure(f"best reachable AUC of its test rows, {rows:,} rows", best)
    yield figure(f"test AUC short of the best by, {rows:,} rows", best - found)


SMALL = {"hidden": (8,), "batch_size": 64, "rounds": 1}
SMALL_SIZES = {"sizes": (2**4, 2**6, 2**8), **SMALL}
FEW_BUCKETS = {"buckets": 2**4, "batch_size": 64, "rounds": 1}
SMALL_LAZYDP = {"sizes": (2**4, 2**6), "tables": 3, "batch_size": 8, "rounds": 1}
SMALL_EPOCH = {"model": ModelConfig(2, 2**6, (4,)), "batch_size": 50, "rows": 2_000}
CASES = [
    *cases(steps, quick={"buckets": 2**6, **SMALL}, seconds=200),
    *cases(sizes, quick=SMALL_SIZES, seconds=120),
    *cases(crossover, over={"buckets": (2**11, 2**12, 2**13)}, quick=FEW_BUCKETS),
    *cases(large, quick=SMALL_SIZES, seconds=600, asked=True, needs=(f"{LARGE_GIGABYTES:g} GB",)),
    *cases(lazydp, quick=SMALL_LAZYDP, seconds=300),
    *cases(epoch, quick=SMALL_EPOCH, seconds=600),
]
