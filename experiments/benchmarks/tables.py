"""Lazy tables: their law, and what a step costs beside dense noise and beside none at all.

`law`: the law of gaps beside the update rule taken step by step in float64 (brute force), beside
sums in closed form where these do not cancel, and beside a million draws, as a step makes them.
`steps`: blocks of steps in turns, of the papers' click model at 85 million parameters, batch 1,024,
on random rows, all alike, so that most look-ups are of different rows. `sizes`: the same step with
other numbers of rows. `large`: with a billion parameters, in a process of its own, which says how
much memory it took; the dense step at that size is on the line through those at 8 and 85 million.
`crossover`: how few rows are too few. `lazydp`: the tables of LazyDP (arXiv 2404.08847), 96 GB of
them. `epoch`: one epoch of generated rows, by `dpsgd train` with lazy tables, and the AUC beside
the best that their planted model has. `models`: AUC on the real rows of a store, with lazy tables
and by Adam alone, in 10 epochs of batches of 1,024; `defaults`: the same in batches and epochs by
default. `--written FOLDER` keeps the runs that are done.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dpsgd import RunSpec
from experiments.benchmarks.case import Row, cases, figure
from experiments.benchmarks.models import SEEDS, Models, lazy_and_dense
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
from experiments.benchmarks.tables_law import law, trained
from experiments.benchmarks.timing import Series, alone, in_turns
from experiments.benchmarks.train import steps_of_run
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

STEP = 1 / BLOCK_STEPS
BATCH, HIDDEN = 1024, PRESETS["paper"].hidden
LAZIES = {"SGD": 0.0, "momentum 0.9": 0.9}
"""How tables are trained, and their momentum."""
LARGE_GIGABYTES = 12.0
LAZYDP_BYTES = 96e9
THEIRS = 119
"""Times the throughput of DP-SGD, as LazyDP's paper says of a CPU with a GPU, on average."""


def _at(model: Model, batch_size: int) -> str:
    return f"{model.num_params / 1e6:.3g}M parameters, batch {batch_size:,}"


def _programs(model: Model, batch_size: int) -> tuple[dict[str, Program], dict[str, Program]]:
    """Returns DP steps by dense noise and with lazy tables."""
    steps = Steps(model, batch_size)
    deferred = {name: steps.private(ADAM, lazy(momentum)) for name, momentum in LAZIES.items()}
    return {"Adam": steps.private(ADAM), "SGD": steps.private(SGD)}, deferred


def _named(dense: Mapping[str, Program], deferred: Mapping[str, Program]) -> dict[str, Program]:
    return {f"dense {k}": x for k, x in dense.items()} | {
        f"lazy {k}": x for k, x in deferred.items()
    }


def steps(
    buckets: int = 2**20,
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = BATCH,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    model = clicks(buckets, hidden)
    at, (dense, deferred) = _at(model, batch_size), _programs(model, batch_size)
    ordinary = {"ordinary": Steps(model, batch_size).ordinary(ADAM, lazy())}
    spent = in_turns(ordinary | _named(dense, deferred), rounds)
    flushes = in_turns({name: program.flush for name, program in deferred.items()}, rounds)
    name = f"step without privacy, tables by sparse SGD, {at}"
    yield figure(name, spent.median("ordinary", STEP), "s")
    for name in dense:
        yield figure(f"DP step, all by {name}, {at}", spent.median(f"dense {name}", STEP), "s")
    for name in deferred:
        what, this = f"tables lazy by {name}", f"lazy {name}"
        yield figure(f"DP step, {what}, {at}", spent.median(this, STEP), "s")
        ratio = spent.ratio("dense Adam", this)
        yield figure(f"DP step, all by Adam / {what}, {at}", ratio, "x", at_least=5.0)
        ratio = spent.ratio("dense SGD", this)
        yield figure(f"DP step, all by SGD / {what}, {at}", ratio, "x")
        ratio = spent.ratio(this, "ordinary")
        yield figure(f"DP step, {what} / without privacy, {at}", ratio, "x", at_most=2.0)
        yield from _flush(flushes.median(name), spent.median(this, STEP), what, at)


def _flush(flush: float, step: float, what: str, at: str) -> Iterator[Row]:
    yield figure(f"flush, {what}, {at}", flush, "s")
    yield figure(f"flush / step, {what}, {at}", flush / step, "x")


def sizes(
    sizes: tuple[int, ...] = (2**11, 2**16, 2**20),
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = BATCH,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    for what, momentum in LAZIES.items():
        models = [clicks(buckets, hidden) for buckets in sizes]
        work = {
            _at(model, batch_size): Steps(model, batch_size).private(ADAM, lazy(momentum))
            for model in models
        }
        spent = in_turns(work, rounds)
        for at in work:
            name = f"DP step, other sizes, tables lazy by {what}, {at}"
            yield figure(name, spent.median(at, STEP), "s")
        least = min(work, key=spent.median)
        most = max(spent.ratio(at, least) for at in work)
        smallest, *_, largest = (model.num_params / 1e6 for model in models)
        name = (
            f"DP step, tables lazy by {what}, dearest / cheapest of {len(models)} sizes, "
            f"{smallest:.3g}M to {largest:.3g}M parameters"
        )
        yield figure(name, most, "x", at_most=1.25)


def crossover(buckets: int, batch_size: int = BATCH, *, rounds: int = 5) -> Iterator[Row]:
    """Measures few rows, and dense layers that are next to nothing."""
    model = clicks(buckets, (8,))
    dense, deferred = _programs(model, batch_size)
    spent = in_turns(_named(dense, deferred), rounds)
    rows = max(leaf.shape[0] for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
    at = f"{rows / (batch_size * len(DISPLAY_ADS.categories)):.2g} rows a look-up"
    for one, other in itertools.product(dense, deferred):
        ratio = spent.ratio(f"dense {one}", f"lazy {other}")
        yield figure(f"DP step, all by {one} / tables lazy by {other}, {at}", ratio, "x")


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
        at = f"{found.num_params / 1e6:.3g}M parameters, batch {batch_size:,}"
        step = found.spent.median("large", STEP)
        yield figure(f"DP step, tables lazy by {what}, {at}", step, "s")
        scaled = y + (y2 - y) / (x2 - x) * (found.num_params - x)
        name = f"scaled from {x / 1e6:.3g}M and {x2 / 1e6:.3g}M"
        yield figure(f"DP step, all by Adam, {name}, {at}", scaled, "s")
        name = f"DP step, all by Adam, {name} / tables lazy by {what}, {at}"
        yield figure(name, scaled / step, "x", at_least=50.0)
        name = f"DP step, tables lazy by {what}, {at} / {x / 1e6:.3g}M"
        yield figure(name, found.spent.ratio("large", "small"), "x", at_most=1.25)
        yield from _flush(found.flush, step, f"tables lazy by {what}", at)
        name = f"most memory of the process, tables lazy by {what}, {at}"
        yield figure(name, process.gigabytes, "GB", at_most=LARGE_GIGABYTES)


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
        at = f"{tables} tables of {DLRM_WIDTH} columns, {held / 1e9:.3g} GB, batch {batch_size:,}"
        seconds.append((held, *(spent.median(name, STEP) for name in work)))
        yield figure(f"DP step, SGD, {at}", seconds[-1][1], "s")
        yield figure(f"DP step, SGD, tables lazy, {at}", seconds[-1][2], "s")
        ratio = spent.ratio("all", "tables lazy")
        yield figure(f"DP step, SGD, all / tables lazy, {at}", ratio, "x")
        for what, program in work.items():
            yield figure(
                f"compiling that step, SGD, {what}, {at}", program.compiling.cpu_seconds, "s"
            )
        del work
    (x, y, _), (x2, y2, deferred) = seconds
    scaled = y + (y2 - y) / (x2 - x) * (LAZYDP_BYTES - x)
    to = f"{LAZYDP_BYTES / 1e9:g} GB"
    name = f"DP step, SGD, all (scaled from {x / 1e9:.3g} and {x2 / 1e9:.3g} GB to {to})"
    yield figure(name, scaled, "s")
    yield figure(
        f"{name} / tables lazy ({x2 / 1e9:.3g} GB); LazyDP: {THEIRS}", scaled / deferred, "x"
    )


def epoch(
    model: ModelConfig = PRESETS["paper"],
    batch_size: int = BATCH,
    epsilon: float = 3.0,
    *,
    rows: int = 4_600_000,
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        made = synthetic.write_store(store, round(rows / 0.8), seed=0)  # of which so many train
        config = RunSpec.of(
            SETTINGS["balls-and-bins"](batch_size=batch_size, epochs=1),
            target_epsilon=epsilon,
            tables="lazy",
            audit=False,  # made before a run, and no part of what is timed
        )
        task = Clicks(store, **asdict(model))
        record, (seconds, spent) = steps_of_run(task, config, Path(folder) / "run")
    at = f"{record['num_params'] / 1e6:.3g}M parameters, batch {batch_size:,}"
    yield figure(f"an epoch of {rows:,} rows, tables lazy, {at}", spent, "s")
    yield figure(f"the same by the clock, {at}", seconds, "s")
    yield figure(f"an epoch of 46M rows, scaled, {at}", spent * 46e6 / rows, "s")
    yield figure(f"its epsilon, {rows:,} rows", record["epsilon_upper"], at_most=epsilon)
    found, best = record["metrics"]["test_auc"], made.summary.test_bayes_auc
    yield figure(f"test AUC after the epoch, epsilon {epsilon:g}, {rows:,} rows", found)
    yield figure(f"best reachable AUC of its test rows, {rows:,} rows", best)
    yield figure(f"test AUC short of the best by, {rows:,} rows", best - found)


def models(
    batch_size: int | None = 1024,
    epochs: int | None = 10,
    *,
    store: str | None = None,
    seeds: int = SEEDS,
    written: str | None = None,
) -> Iterator[Row]:
    return lazy_and_dense(Models.of(store, seeds, written), batch_size, epochs)


SMALL = {"hidden": (8,), "batch_size": 64, "rounds": 1}
SMALL_SIZES = {"sizes": (2**4, 2**6, 2**8), **SMALL}
FEW_BUCKETS = {"buckets": 2**4, "batch_size": 64, "rounds": 1}
SMALL_LAZYDP = {"sizes": (2**4, 2**6), "tables": 3, "batch_size": 8, "rounds": 1}
SMALL_EPOCH = {"model": ModelConfig(2, 2**6, (4,)), "batch_size": 50, "rows": 2_000}
FEW_DRAWS = {"steps": 1_000, "draws": 10_000, "kinds": 1}
OF_STORE: dict[str, Any] = {"seconds": 3_600, "needs": ("--store",)}
CASES = [
    *cases(trained, "law, trained", quick={"steps": 30}, exact=True),
    *cases(law, "law, gaps", quick=FEW_DRAWS, seconds=120, exact=True),
    *cases(steps, quick={"buckets": 2**6, **SMALL}, seconds=200),
    *cases(sizes, quick=SMALL_SIZES, seconds=120),
    *cases(crossover, over={"buckets": (2**11, 2**12, 2**13)}, quick=FEW_BUCKETS),
    *cases(large, quick=SMALL_SIZES, seconds=600, asked=True, needs=(f"{LARGE_GIGABYTES:g} GB",)),
    *cases(lazydp, quick=SMALL_LAZYDP, seconds=300),
    *cases(epoch, quick=SMALL_EPOCH, seconds=600),
    *cases(models, **OF_STORE),
    *cases(models, "defaults", over={"batch_size, epochs": ((None, None),)}, **OF_STORE),
]
