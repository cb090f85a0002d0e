"""Lazy tables: their law, and what a step costs beside dense noise and beside none at all.

    scripts/bench tables --json tables.json              (ten minutes of CPU time and 4 GB)
    scripts/bench tables --parts large --large --json tables.json    (a billion parameters: 9 GB)
    scripts/bench tables --parts models defaults --store STORE --written FOLDER --json tables.json
                         (an hour of CPU time; FOLDER keeps the runs that are done)
    scripts/bench tables --quick                         (a minute: small models, no bars)

Parts that are measured alone are written into the file beside those that are there.

`law`: the law of gaps beside the update rule taken step by step in float64 (brute force), beside
sums in closed form where these do not cancel, and beside a million draws, as a step makes them.
`steps`: blocks of steps in turns, of the papers' click model at 85 million parameters, batch 1,024,
on random rows, all alike, so that most look-ups are of different rows. `sizes`: the same step with
other numbers of rows. `large`: with a billion parameters, in a process of its own, which says how
much memory it took; the dense step at that size is on the line through those at 8 and 85 million.
`crossover`: how few rows are too few. `lazydp`: the tables of LazyDP (arXiv 2404.08847). `epoch`:
one epoch of 4.6 million generated rows, by `dpsgd train` with lazy tables, and the AUC beside the
best that their planted model has.
`models`: AUC on the real rows of STORE, with lazy tables and by Adam alone, in 10 epochs of batches
of 1,024; `defaults`: the same in batches and epochs by default.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax

from experiments.benchmarks import click_models, tables_law, tables_lazydp, tables_models
from experiments.benchmarks.rows import Row, merged, options_of, positive, report
from experiments.benchmarks.tables_epoch import epoch_rows
from experiments.benchmarks.tables_large import alone, free_memory
from experiments.benchmarks.tables_steps import ADAM, SGD, Setting, clicks, lazy, step_seconds
from experiments.benchmarks.timing import in_turns
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig

BATCH = 1024
HIDDEN = PRESETS["paper"].hidden
QUICK_HIDDEN = (8,)
PAPER_BUCKETS = 2**20
LARGE_BUCKETS = 2**24
SIZES = 2**11, 2**16, PAPER_BUCKETS
CROSSOVER = 2**11, 2**12, 2**13
LARGE_BYTES = 12e9
LAZIES = {"SGD": 0.0, "momentum 0.9": 0.9}
"""How tables are trained, and their momentum."""


def _at(num_params: int, batch: int) -> str:
    return f"{num_params / 1e6:.3g}M parameters, batch {batch:,}"


def step_rows(max_buckets: int, hidden: tuple[int, ...], batch: int, rounds: int) -> Iterator[Row]:
    """Yields what steps and flushes of one model take."""
    model = clicks(max_buckets, hidden)
    setting, at = Setting(model, batch), _at(model.num_params, batch)
    late = {name: setting.private(ADAM, lazy(momentum)) for name, momentum in LAZIES.items()}
    dense = {"Adam": setting.private(ADAM), "SGD": setting.private(SGD)}
    work = {
        "ordinary": setting.ordinary(ADAM, lazy()),
        **{f"dense {name}": blocks for name, blocks in dense.items()},
        **{f"lazy {name}": blocks for name, blocks in late.items()},
    }
    steps = in_turns(work, rounds)
    flushes = in_turns({name: blocks.flush for name, blocks in late.items()}, rounds)
    yield Row(
        f"step without privacy, tables by sparse SGD, {at}", step_seconds(steps, "ordinary"), "s"
    )
    for name in dense:
        yield Row(f"DP step, all by {name}, {at}", step_seconds(steps, f"dense {name}"), "s")
    for name in late:
        what, this = f"tables lazy by {name}", f"lazy {name}"
        yield Row(f"DP step, {what}, {at}", step_seconds(steps, this), "s")
        ratio = steps.ratio("dense Adam", this)
        yield Row.at_least(f"DP step, all by Adam / {what}, {at}", ratio, "x", 5.0)
        ratio = steps.ratio("dense SGD", this)
        yield Row(f"DP step, all by SGD / {what}, {at}", ratio, "x")
        ratio = steps.ratio(this, "ordinary")
        yield Row.at_most(f"DP step, {what} / without privacy, {at}", ratio, "x", 2.0)
        yield from _flush_rows(flushes.median(name), step_seconds(steps, this), what, at)


def _flush_rows(flush: float, step: float, what: str, at: str) -> Iterator[Row]:
    yield Row(f"flush, {what}, {at}", flush, "s")
    yield Row(f"flush / step, {what}, {at}", flush / step, "x")


def size_rows(
    sizes: tuple[int, ...], hidden: tuple[int, ...], batch: int, rounds: int
) -> Iterator[Row]:
    """Yields what a lazy step takes with more rows or fewer."""
    for what, momentum in LAZIES.items():
        models = [clicks(buckets, hidden) for buckets in sizes]
        work = {
            _at(model.num_params, batch): Setting(model, batch).private(ADAM, lazy(momentum))
            for model in models
        }
        steps = in_turns(work, rounds)
        for at in work:
            yield Row(
                f"DP step, other sizes, tables lazy by {what}, {at}", step_seconds(steps, at), "s"
            )
        least = min(work, key=steps.median)
        most = max(steps.ratio(at, least) for at in work)
        smallest, *_, largest = (model.num_params / 1e6 for model in models)
        yield Row.at_most(
            f"DP step, tables lazy by {what}, dearest / cheapest of {len(models)} sizes, "
            f"{smallest:.3g}M to {largest:.3g}M parameters",
            most, "x", 1.25,
        )  # fmt: skip


def crossover_rows(sizes: tuple[int, ...], batch: int, rounds: int) -> Iterator[Row]:
    """Yields what lazy steps gain with few rows, and dense layers that are next to nothing."""
    for buckets in sizes:
        model = clicks(buckets, QUICK_HIDDEN)
        setting = Setting(model, batch)
        late = {name: setting.private(ADAM, lazy(momentum)) for name, momentum in LAZIES.items()}
        dense = {"Adam": setting.private(ADAM), "SGD": setting.private(SGD)}
        steps = in_turns(dense | {f"lazy {name}": blocks for name, blocks in late.items()}, rounds)
        rows = max(leaf.shape[0] for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
        at = f"{rows / (batch * len(DISPLAY_ADS.categories)):.2g} rows a look-up"
        for one, other in itertools.product(dense, late):
            ratio = steps.ratio(one, f"lazy {other}")
            yield Row(f"DP step, all by {one} / tables lazy by {other}, {at}", ratio, "x")


def large_rows(
    sizes: tuple[int, int, int], hidden: tuple[int, ...], batch: int, rounds: int
) -> Iterator[Row]:
    """Yields what a lazy step takes with very many rows.

    Args:
      sizes: Buckets of a column, at most, of the model, and of two of which a dense step is
        measured.
      hidden: Units of each dense layer.
      batch: Examples of a step.
      rounds: For each median.
    """
    *few, many = sizes
    models = {buckets: clicks(buckets, hidden) for buckets in few}
    dense = in_turns({str(k): Setting(m, batch).private(ADAM) for k, m in models.items()}, rounds)
    (x, y), (x2, y2) = ((m.num_params, step_seconds(dense, str(k))) for k, m in models.items())
    for what, momentum in LAZIES.items():
        found = alone(many, few[0], hidden, momentum, batch, rounds)
        at, step = _at(found.num_params, batch), step_seconds(found.steps, "large")
        yield Row(f"DP step, tables lazy by {what}, {at}", step, "s")
        scaled = y + (y2 - y) / (x2 - x) * (found.num_params - x)
        name = f"scaled from {x / 1e6:.3g}M and {x2 / 1e6:.3g}M"
        yield Row(f"DP step, all by Adam, {name}, {at}", scaled, "s")
        yield Row.at_least(
            f"DP step, all by Adam, {name} / tables lazy by {what}, {at}", scaled / step, "x", 50.0
        )
        ratio = found.steps.ratio("large", "small")
        yield Row.at_most(
            f"DP step, tables lazy by {what}, {at} / {x / 1e6:.3g}M", ratio, "x", 1.25
        )
        yield from _flush_rows(found.flush, step, f"tables lazy by {what}", at)
        name = f"most memory of the process, tables lazy by {what}, {at}"
        yield Row.at_most(name, found.peak / 1e9, "GB", LARGE_BYTES / 1e9)


def _part(name: str, quick: bool, rounds: int, large: bool, epoch: int) -> Iterator[Row]:
    hidden, batch = (QUICK_HIDDEN, 64) if quick else (HIDDEN, BATCH)
    if name == "law":
        yield from tables_law.trained_rows(30 if quick else 300)
        yield from tables_law.law_rows(*((1_000, 10_000, 1) if quick else (100_000, 1_000_000)))
    elif name == "steps":
        yield from step_rows(2**6 if quick else PAPER_BUCKETS, hidden, batch, rounds)
    elif name == "sizes":
        yield from size_rows((2**4, 2**6, 2**8) if quick else SIZES, hidden, batch, rounds)
    elif name == "crossover":
        yield from crossover_rows((2**4,) if quick else CROSSOVER, batch, rounds)
    elif name == "lazydp" and quick:
        yield from tables_lazydp.lazydp_rows((2**4, 2**6), 3, 8, rounds)
    elif name == "lazydp":
        theirs = tables_lazydp.TABLES, tables_lazydp.BATCH
        yield from tables_lazydp.lazydp_rows((2**14, 2**16), *theirs, rounds)
    elif name == "epoch":
        model = ModelConfig(2, 2**6, (4,)) if quick else PRESETS["paper"]
        yield from epoch_rows(model, 2_000 if quick else epoch, 50 if quick else batch)
    elif name == "large" and quick:
        yield from large_rows((2**4, 2**6, 2**8), hidden, batch, rounds)
    elif name == "large":
        free = free_memory()
        if large and free >= LARGE_BYTES:
            yield from large_rows((2**15, PAPER_BUCKETS, LARGE_BUCKETS), hidden, batch, rounds)
        else:
            why = f"{free / 1e9:.0f} GB of memory are free, not 12" if large else "see --large"
            yield Row(f"DP step with a billion parameters ({why})", None, "s")


PARTS = ("law", "steps", "sizes", "crossover", "large", "lazydp", "epoch", *tables_models.SIZES)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("tables", __doc__, quick="small models, short runs, few draws")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which of them")
    parser.add_argument("--rounds", type=positive, default=5, help="blocks for each median")
    parser.add_argument("--large", action="store_true", help="a billion parameters as well")
    parser.add_argument("--epoch-rows", type=positive, default=4_600_000, help="rows of the epoch")
    parser.add_argument("--store", type=Path, help="prepared rows, see `dpsgd prepare`, for models")
    parser.add_argument(
        "--seeds", type=positive, default=tables_models.SEEDS, help="models of each kind"
    )
    parser.add_argument(
        "--written", type=Path, metavar="FOLDER", help="keep what each run gave, to go on later"
    )
    options = parser.parse_args(argv)
    merged([], options.json)  # refuses another file before anything is measured
    found: list[Row] = []
    for part in options.parts:
        rounds = 1 if options.quick else options.rounds
        rows = _part(part, options.quick, rounds, options.large, options.epoch_rows)
        if part in tables_models.SIZES:
            if options.store is None:
                rows = iter([Row(f"AUC with lazy tables, {part} (see --store)", None, "")])
            else:
                task = click_models.FewerRows(options.store)
                models = click_models.Models(task, options.seeds, options.written)
                rows = tables_models.rows(models, tables_models.SIZES[part])
        no_bars = options.quick and part != "law"
        found += (replace(row, bar="", holds=None) if no_bars else row for row in rows)
        print(f"measured {part}", file=sys.stderr)
    return report(merged(found, options.json), options.json)


if __name__ == "__main__":
    sys.exit(main())
