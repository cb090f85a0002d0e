"""All that only a GPU can tell, in one command and one record: is it right there, how fast is it.

    scripts/bench gpu --minutes 8 --json gpu.json     (`--quick` rehearses it on a CPU)

It needs JAX, flax, optax, NumPy and SciPy, and nothing installed of this project. The cases come in
the order of their worth: first that clipping, noise, draws and sums are on this device what they
are by definition; then steps at 85 million parameters, an epoch of 37 million rows, a whole run.
All is timed by the clock, from dispatch to `block_until_ready`; a step is one of a block in one
program, as in training. The bars of speed are for an H200.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import samplers
from dpsgd import Mechanism, RootKey, Run, dpsgd, train_blocks
from dpsgd.engine.programs import compiler_options
from dpsgd.runs.optimizer import ADAM as OPTIMIZER
from dpsgd.runs.optimizer import hyperparameters
from dpsgd.runs.result import FinishedRun
from experiments.benchmarks import gpu_equality as equality
from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.gpu_program import traffic
from experiments.benchmarks.programs import (
    ADAM,
    BYTES_PER_PARAMETER,
    Program,
    Steps,
    clicks,
    copies_of,
    copy_rate,
    dlrm,
)
from experiments.benchmarks.record import peak_memory
from experiments.benchmarks.tables import table_steps
from experiments.benchmarks.timing import Spent, in_turns
from experiments.benchmarks.train import generated, run_of
from experiments.tasks.clicks.evaluate import evaluate
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic

PyTree = Any

PAPER = PRESETS["large"]
RECORD, MINUTES = Path(__file__).parents[1] / "records" / "gpu.json", 8.0
STEP_BARS = {1024: 1.1, 8192: 1.1, 65_536: 1.15}
"""DP step / ordinary one on an H200, 85M parameters, by batch."""
EPOCH_BAR = 6.0
"""Seconds of an epoch of 37M rows at batch 8,192, on an H200."""
clock = time.perf_counter


def before_devices() -> None:
    """Lets the CPU be what the device is compared with."""
    if (named := getattr(jax.config, "jax_platforms", None)) and "cpu" not in named.split(","):
        jax.config.update("jax_platforms", f"{named},cpu")


def copies(copied: int = 1 << 28) -> Iterator[Row]:
    """Times a copy in place, which nothing that moves as many bytes can beat."""
    rate = copy_rate(copied, clock) / 1e9
    yield figure("rate of a copy in place, read and write", rate, "GB/s")


def _peak(place: str) -> Row:
    peak = peak_memory()
    return figure(f"peak memory so far, {place}", None if peak is None else peak / 1e9, "GB")


# ------------------------------------------------------------------------------------------- steps

HIDDEN = PAPER.hidden
BLOCK_STEPS = 64
"""Of a dispatch, as in training."""


def steps(
    batch_size: int,
    variants: bool,
    buckets: int = 2**20,
    hidden: tuple[int, ...] = HIDDEN,
    block_steps: int = BLOCK_STEPS,
    rows: int = 1 << 20,
    copied: int = 1 << 28,
    rounds: int = 7,
) -> Iterator[Row]:
    """Times a DP step beside an ordinary one, what both move and hold, and `variants` of it."""
    model = clicks(buckets, hidden)._replace(columns=synthetic.in_memory(rows, seed=0).columns)
    setting, count = Steps(model, batch_size, block_steps), model.num_params
    largest = max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
    place = f"{count / 1e6:.3g}M parameters, batch {batch_size}"
    row, dp = at(place), setting.private(ADAM)
    yield row("seconds to compile the DP step", dp.compiling.seconds, "s")
    work = {"DP": dp, "ordinary": setting.plain(ADAM)}
    series = in_turns(work, rounds, clock)
    milliseconds = 1e3 / block_steps
    yield row("ordinary step", series.median("ordinary", milliseconds), "ms")
    yield row("DP step", series.median("DP", milliseconds), "ms")
    ratio, bar = series.ratio("DP", "ordinary"), STEP_BARS.get(batch_size)
    yield row("DP / ordinary step", ratio, "x", at_most=bar)
    yield row("examples a second, DP", batch_size * block_steps / series.median("DP"), "ex/s")
    floor = 1e3 * BYTES_PER_PARAMETER * count / copy_rate(copied, clock)
    yield row("parameters and moments moved once, at the rate of a copy", floor, "ms")
    for name, program in work.items():
        moved = traffic(program.compiled.as_text(), largest)
        yield row(f"kernels of a block's program, {name}", moved.kernels)
        yield row(f"bytes over the largest table's, {name}", moved.bytes_per_entry, "B")
        yield row(f"temporary memory, {name}", program.temporary_bytes / 1e6, "MB")
    yield from _repeats(dp, place)
    yield from _profile(dp, block_steps, place)
    if variants:
        del work, program
        yield from _variants(setting, dp, rounds, place)
    yield _peak(place)


def _variants(setting: Steps, dp: Program, rounds: int, place: str) -> Iterator[Row]:
    """Times the DP step compiled otherwise: in loops of known length, and with repeatable sums."""
    algorithm, row = dpsgd(setting.model.loss_fn, ADAM), at(place)

    def counted(block: Callable) -> Callable:
        return lambda state, data, plan, *rest: block(
            state, data, plan._replace(num_steps=setting.block_steps), *rest
        )

    repeatable = {**(compiler_options() or {}), "xla_gpu_deterministic_ops": True}
    work = {
        "as it is": dp,
        "known": setting.of(algorithm, changed=counted),
        "same": setting.of(algorithm, options=repeatable),
    }
    series = in_turns(work, rounds, clock)
    ratio = series.ratio("known", "as it is")
    yield row("DP step in a block whose length the compiler knows / as it is", ratio, "x")
    ratio = series.ratio("same", "as it is")
    yield row("DP step by deterministic operations / as it is", ratio, "x")
    yield from _repeats(work["same"], f"{place}, deterministic operations")


def _repeats(dp: Program, place: str) -> Iterator[Row]:
    """Says how far two equal steps differ: on a GPU atomic additions come in any order."""
    data, plan, *rest = dp.inputs
    one = plan._replace(num_steps=jnp.ones_like(plan.num_steps))

    def after_a_step() -> list[jax.Array]:
        found = dp.compiled(copies_of(dp.state)(), data, one, *rest, *dp.known())
        return jax.tree.leaves(jax.block_until_ready(found[0].params))

    first, second = after_a_step(), after_a_step()
    row, pairs = at(place), list(zip(first, second, strict=True))
    differing = sum(int(jnp.sum(a != b)) for a, b in pairs)
    yield row("parameters that differ after two equal steps", differing)
    difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
    yield row("largest difference after two equal steps", difference)


def _profile(dp: Program, block_steps: int, place: str, most: int = 12) -> Iterator[Row]:
    """Says which kernels of a DP step take how long, by the device's own clock."""
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            dp()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for event in line.events if line.name.startswith("Stream") else ():
                        spent[event.name] = spent.get(event.name, 0.0) + event.duration_ns
    a_step = {name: duration / 1e6 / block_steps for name, duration in spent.items()}
    row, whole = at(place), sum(a_step.values()) or None
    yield row("kernels of a DP step, one after another", whole, "ms")
    for name, duration in sorted(a_step.items(), key=lambda item: -item[1])[:most]:
        yield row(f"kernel {name:.60}", duration, "ms")


def tables(
    buckets: int,
    hidden: tuple[int, ...] = HIDDEN,
    batch_size: int = 1024,
    block_steps: int = BLOCK_STEPS,
    rounds: int = 7,
) -> Iterator[Row]:
    """Times steps of the click model: dense by Adam and SGD, lazy, and without privacy."""
    model = clicks(buckets, hidden)
    yield from table_steps(model, batch_size, rounds, clock, block_steps=block_steps, alone=True)
    yield _peak(f"tables, {model.num_params / 1e6:.3g}M parameters")


def dlrm_tables(
    tables: int = 26,
    rows: int = 3_000_000,
    batch_size: int = 2048,
    block_steps: int = BLOCK_STEPS,
    rounds: int = 7,
) -> Iterator[Row]:
    """Times steps with tables of so many rows of 128 numbers: lazy, and without privacy."""
    how: dict[str, Any] = {"block_steps": block_steps, "alone": True, "dense": False}
    yield from table_steps(dlrm(rows, tables), batch_size, rounds, clock, **how)
    yield _peak(f"{tables} tables of {rows:,} rows")


# ---------------------------------------------------------------------------------- epochs and runs


def epoch(
    model: ModelConfig = PAPER,
    rows: int = 37_000_000,
    test_rows: int = 1 << 20,
    batch_size: int = 8192,
) -> Iterator[Row]:
    """Trains two epochs by `train_blocks` on rows whose best AUC is known, and scores the model."""
    begin = time.perf_counter()
    data = synthetic.in_memory(rows, seed=0)
    test = synthetic.in_memory(test_rows, seed=0, first_chunk=-(-rows // synthetic.CHUNK))
    place = f"{rows / 1e6:.3g}M rows, batch {batch_size}"
    row = at(place)
    yield figure(f"seconds to generate {place}", time.perf_counter() - begin, "s")

    sampler = samplers.BallsAndBins(rows, batch_size, epochs=2)
    mechanism = Mechanism(sampler, 1.0, 4.0)
    params, logit_fn, loss_fn = functional(model, DISPLAY_ADS, 0)
    algorithm = dpsgd(loss_fn, OPTIMIZER)
    columns = jax.block_until_ready(jax.device_put(data.columns))

    def blocks(seed: int):
        state = algorithm.init(jax.tree.map(jnp.array, params))
        sizes = hyperparameters(3e-3, sampler.num_steps)
        state = state._replace(opt_state=state.opt_state._replace(hyperparams=sizes))
        root = RootKey.from_insecure_seed(seed)
        return train_blocks(algorithm, mechanism, state, columns, root=root, data_on="device")

    begin = time.perf_counter()
    warm = blocks(0)
    jax.block_until_ready(next(warm).log)
    warm.close()
    yield row("first block, drawing and compiling included", time.perf_counter() - begin, "s")

    begin = time.perf_counter()
    marks: list[tuple[float, int]] = []  # when, and how many steps were done
    for block in blocks(1):
        if not marks:  # drawn, and on its way
            marks.append((time.perf_counter(), 0))
        if block.steps.stop >= sampler.steps_per_epoch * len(marks):
            jax.block_until_ready(block.log)
            marks.append((time.perf_counter(), block.steps.stop))
    yield row("drawing the first epoch", marks[0][0] - begin, "s")
    # The second was drawn while the first was under way: it takes what each further one does.
    first, second = (
        (after[0] - before[0]) / (after[1] - before[1]) * sampler.steps_per_epoch
        for before, after in itertools.pairwise(marks)
    )
    yield row("first epoch, once drawn", first, "s")
    yield row("an epoch", second, "s", at_most=EPOCH_BAR)

    blocks_of_rows = (
        {name: column[i : i + 2**16] for name, column in test.columns.items()}
        for i in range(0, test_rows, 2**16)
    )
    found = evaluate(logit_fn, block.state.params, blocks_of_rows, DISPLAY_ADS.target)["auc"]
    yield row("test AUC after two epochs, sigma 1", found)
    yield figure("best reachable AUC of these rows", test.bayes_auc)
    yield figure("test AUC short of the best by", test.bayes_auc - found)
    yield _peak(place)


def whole_run(
    model: ModelConfig = PAPER, rows: int = 1_000_000, batch_size: int = 8192, audit: bool = True
) -> Iterator[Row]:
    """Trains as `dpsgd train` does: a store, the audit, the ledger, checkpoints and the report."""
    spec = run_of("balls-and-bins", batch_size, 1, target_epsilon=3.0, audit=audit)
    with generated(rows, model) as (task, folder, made):
        seconds = Spent.on(lambda: Run.create(task, spec, folder / "run").train()).seconds
        run = FinishedRun.read(folder / "run")  # held against its ledger
    row = at(f"{run.record['num_params'] / 1e6:.3g}M parameters, {rows / 1e6:.3g}M rows")
    yield row("whole run", seconds, "s")
    yield row("of it training", run.record["training_seconds"], "s")
    yield row("its epsilon", run.record["epsilon_upper"], at_most=3.0)
    yield row("its test AUC", run.record["metrics"]["test_auc"])
    yield figure("best reachable AUC of its test rows", made.summary.test_bayes_auc)


def precisions(
    batch_size: int = 65_536, widths: tuple[int, int] = (598, 598), rounds: int = 7
) -> Iterator[Row]:
    """Times the contraction of a weight gradient in several precisions, and says how exact each is.

    It is formed in the highest precision, so that rounding never lengthens an example's share.
    """
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(k, (batch_size, n)) for k, n in zip(keys, widths, strict=True))
    exact = np.asarray(left, np.float64).T @ np.asarray(right, np.float64)
    offered: dict[str, Any] = {
        "highest": lax.Precision.HIGHEST,
        "device's own": lax.Precision.DEFAULT,
        "3 x TF32": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
        "6 x bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    }
    what = f"weight gradient [{batch_size}, {widths[0]}] x [{batch_size}, {widths[1]}]"
    work = {}
    for name, precision in offered.items():
        program = jax.jit(lambda a, b, p=precision: jnp.einsum("bi,bj->ij", a, b, precision=p))
        try:
            found = np.asarray(program(left, right), np.float64)
        except Exception as error:  # no device has all of them
            yield figure(f"{what}, {name}: {type(error).__name__}", None, "ms")
            continue
        off = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        yield figure(f"{what}, {name}, off by, relative", off)
        work[name] = lambda program=program: jax.block_until_ready(program(left, right))
    series = in_turns(work, rounds, clock)
    for name in work:
        yield figure(f"{what}, {name}", series.median(name, 1e3), "ms")


TINY, ONE_LAYER = ModelConfig(2, 2**4, ()), ModelConfig(2, 2**4, (4,))
SHORT = {"block_steps": 2, "rounds": 1}
SMALL_CLIPPING = {"config": ONE_LAYER, "batch_size": 16, "precisions": ("the highest",)}
SMALL_STEPS = {
    "batch_size": 32, "variants": True, "buckets": 2**4, "hidden": (), "block_steps": 3,
    "rows": 1 << 10, "copied": 1 << 16, "rounds": 2,
}  # fmt: skip
SMALL_EPOCH = {"model": TINY, "rows": 8_000, "test_rows": 2_000, "batch_size": 50}
SMALL_RUN = {"model": TINY, "rows": 2_000, "batch_size": 50, "audit": False}
AUDITED = {
    "sampler, overflow": (
        ("poisson", None), ("poisson", "accumulate"), ("balls-and-bins", None), ("shuffle", None),
        ("deterministic", None),
    )
}  # fmt: skip
BATCHES = {"batch_size, variants": ((1024, False), (8192, True), (65_536, False))}
RIGHT: dict[str, Any] = {"exact": True, "seconds": 15}
CASES = [
    *cases(equality.clipping, quick=SMALL_CLIPPING, exact=True, seconds=40),
    *cases(equality.noise, quick={"shape": (64, 33)}, **RIGHT),
    *cases(equality.audit, over=AUDITED, quick={}, **RIGHT),
    *cases(copies, quick={"copied": 1 << 16}, seconds=2),
    *cases(steps, over=BATCHES, quick=SMALL_STEPS, seconds=65),
    *cases(
        tables,
        over={"buckets": (2**20, 2**24)},
        quick={"buckets": 2**4, "hidden": (4,), "batch_size": 16, **SHORT},
    ),
    *cases(dlrm_tables, "dlrm", quick={"tables": 3, "rows": 64, "batch_size": 8, **SHORT}),
    *cases(epoch, quick=SMALL_EPOCH, seconds=90),
    *cases(
        equality.interrupted,
        quick={"model": TINY, "rows": 10_000, "batch_size": 50},
        exact=True,
        seconds=30,
    ),
    *cases(whole_run, "run", quick=SMALL_RUN, exact=True),
    *cases(precisions, quick={"batch_size": 64, "widths": (8, 8), "rounds": 2}, seconds=10),
]
