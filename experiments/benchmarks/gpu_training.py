"""What training costs on a GPU: steps, their kernels, epochs, and a whole run.

Everything is timed by the clock, from the dispatch to `block_until_ready`. A step is one of a block
of steps in one program, as in training; programs take turns, and each figure is a median.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import samplers
from dpsgd import Algorithm, Diagnostics, Mechanism, RootKey, Run, RunSpec, dpsgd, train_blocks
from dpsgd.engine.programs import compiler_options
from dpsgd.engine.step import Watch, block_function
from dpsgd.runs.optimizer import ADAM, hyperparameters
from dpsgd.runs.result import FinishedRun
from experiments.benchmarks.gpu_program import traffic
from experiments.benchmarks.gpu_record import peak_memory
from experiments.benchmarks.rows import Row
from experiments.benchmarks.step import BYTES_PER_PARAMETER
from experiments.benchmarks.timing import copy_rate, in_turns
from experiments.tasks.clicks.evaluate import evaluate
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers import Deterministic, IndexBlock
from samplers.settings import SETTINGS

PyTree = Any

STEP_BARS = {1024: 1.1, 8192: 1.1, 65_536: 1.15}
"""DP step / ordinary one on an H200, 85M parameters, by batch."""
EPOCH_BAR = 6.0
"""Seconds of an epoch of 37M rows at batch 8,192, on an H200."""


class Size(NamedTuple):
    """How large everything is.

    Attributes:
      model: Sizes of the model.
      block_steps: Steps of a dispatch, as in training.
      rounds: For each median.
      resident_rows: On the device, while steps are timed.
      copied: Floats of the array whose copy is timed.
    """

    model: ModelConfig
    block_steps: int
    rounds: int
    resident_rows: int
    copied: int


def copies(size: Size) -> Iterator[Row]:
    """Times a copy in place, which nothing that moves as many bytes can beat."""
    yield Row(
        "rate of a copy in place, read and write",
        copy_rate(size.copied, time.perf_counter) / 1e9,
        "GB/s",
    )


class _Steps:
    """A compiled block of steps that owns its state; called, it takes all of them."""

    def __init__(self, program: Any, state: PyTree, rest: tuple, options: Any = None) -> None:
        begin = time.perf_counter()
        # Each has its own state, as the programs give theirs away.
        self.state = jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), state)
        self.compiled = program.lower(self.state, *rest).compile(options)
        self.compile_seconds = time.perf_counter() - begin
        self._rest = rest

    def __call__(self) -> None:
        self.state, *_ = jax.block_until_ready(self.compiled(self.state, *self._rest))

    def step_from(self, state: PyTree) -> PyTree:
        """Returns what one step makes of a copy of `state`."""
        data, plan, *rest = self._rest
        copy = jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), state)
        one = plan._replace(num_steps=jnp.ones_like(plan.num_steps))
        return jax.block_until_ready(self.compiled(copy, data, one, *rest)[0])


class _Setting(NamedTuple):
    """What the programs of one batch size are made of and called with."""

    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    optimizer: optax.GradientTransformation
    algorithm: Algorithm
    mechanism: Mechanism
    state: PyTree
    rest: tuple
    """Rows, plan, noise key, scales, and what is shown: nothing."""

    def program(self, algorithm: Algorithm) -> Any:
        """Returns the block of an algorithm, not compiled yet."""
        block = block_function(algorithm, self.mechanism.sampler)
        return jax.jit(block, donate_argnums=0, compiler_options=compiler_options())

    @property
    def leaves(self) -> list[jax.Array]:
        """The parameters."""
        return jax.tree.leaves(self.state.params)

    @classmethod
    def of(cls, size: Size, batch_size: int) -> _Setting:
        """Returns that of batches of random rows, which lie on the device."""
        params, _, loss_fn = functional(size.model, DISPLAY_ADS, 0)
        mechanism = Mechanism(Deterministic(batch_size, batch_size), 1.0, 1.0)
        optimizer = optax.adam(1e-3)
        algorithm = dpsgd(loss_fn, optimizer)
        data = synthetic.in_memory(size.resident_rows, seed=0).columns
        shape = size.block_steps, batch_size
        plan = IndexBlock(
            np.random.default_rng(0).integers(0, size.resident_rows, shape, np.int32),
            np.ones(shape, np.float32),
            np.arange(size.block_steps + 1, dtype=np.int32),
            np.int32(size.block_steps),
        )
        noise_key = mechanism.noise_key(RootKey.from_insecure_seed(0), 0)
        state = algorithm.init(params)
        watch = Watch.nothing(params)
        rest = jax.device_put((data, plan, noise_key, mechanism.scales(), watch))
        return cls(loss_fn, optimizer, algorithm, mechanism, state, rest)


def ordinary(setting: _Setting) -> Algorithm:
    """Returns training without privacy as an algorithm: the mean gradient, without noise."""

    def summed(params, batch, weights, scales):
        def total(params):
            losses = jax.vmap(setting.loss_fn, (None, 0))(params, batch)
            return jnp.sum(jnp.where(weights > 0, losses, 0.0))

        loss, gradient = jax.value_and_grad(total)(params)
        return gradient, Diagnostics(loss, *(jnp.float32(0) for _ in Diagnostics._fields[1:]))

    return setting.algorithm._replace(clipped_sum=summed)


def steps(size: Size, batch_size: int, *, variants: bool = False) -> Iterator[Row]:
    """Times a DP step beside an ordinary one, and says what both move and hold.

    Args:
      size: How large everything else is.
      batch_size: Examples of a step.
      variants: Also compile the DP step in other ways.
    """
    setting = _Setting.of(size, batch_size)
    num_params = sum(leaf.size for leaf in setting.leaves)
    largest = max(leaf.size for leaf in setting.leaves)
    at = f"{num_params / 1e6:.3g}M parameters, batch {batch_size}"
    dp = _Steps(setting.program(setting.algorithm), setting.state, setting.rest)
    yield Row(f"seconds to compile the DP step, {at}", dp.compile_seconds, "s")
    without = ordinary(setting)
    silent = dataclasses.replace(setting.mechanism, noise_multiplier=0.0).scales()
    data, plan, noise_key, _, watch = setting.rest
    bare = setting._replace(rest=(data, plan, noise_key, jax.device_put(silent), watch))
    plain = _Steps(bare.program(without), bare.state, bare.rest)
    work = {"DP": dp, "ordinary": plain}
    series = in_turns(work, size.rounds, time.perf_counter)
    step = {name: series.median(name) / size.block_steps for name in work}
    yield Row(f"ordinary step, {at}", 1e3 * step["ordinary"], "ms")
    yield Row(f"DP step, {at}", 1e3 * step["DP"], "ms")
    name, ratio = f"DP / ordinary step, {at}", series.ratio("DP", "ordinary")
    bar = STEP_BARS.get(batch_size)
    yield Row.at_most(name, ratio, "x", bar) if bar else Row(name, ratio, "x")
    yield Row(f"examples a second, DP, {at}", batch_size / step["DP"], "ex/s")
    floor = BYTES_PER_PARAMETER * num_params / copy_rate(size.copied, time.perf_counter)
    yield Row(f"parameters and moments moved once, at the rate of a copy, {at}", 1e3 * floor, "ms")
    for name, program in work.items():
        moved = traffic(program.compiled.as_text(), largest)
        memory = program.compiled.memory_analysis()
        yield Row(f"kernels of a block's program, {name}, {at}", moved.kernels, "")
        yield Row(f"bytes over the largest table's, {name}, {at}", moved.bytes_per_entry, "B")
        yield Row(f"temporary memory, {name}, {at}", memory.temp_size_in_bytes / 1e6, "MB")
    yield from _repeats(dp, at)

    yield from _profile(dp, size, at)
    if variants:
        del work, plain
        yield from _variants(setting, dp, size, at)
    peak = peak_memory()
    yield Row(f"peak memory so far, {at}", None if peak is None else peak / 1e9, "GB")


def _variants(setting: _Setting, dp: _Steps, size: Size, at: str) -> Iterator[Row]:
    """Times the DP step compiled otherwise: in loops of known length, and with repeatable sums."""
    block = block_function(setting.algorithm, setting.mechanism.sampler)
    program = setting.program(setting.algorithm)

    def counted(state, data, plan, *rest):
        return block(state, data, plan._replace(num_steps=size.block_steps), *rest)

    known = jax.jit(counted, donate_argnums=0, compiler_options=compiler_options())
    same = {"xla_gpu_deterministic_ops": True}
    work = {
        "as it is": dp,
        "known": _Steps(known, setting.state, setting.rest),
        "same": _Steps(program, setting.state, setting.rest, same),
    }
    series = in_turns(work, size.rounds, time.perf_counter)
    ratio = series.ratio("known", "as it is")
    yield Row(f"DP step in a block whose length the compiler knows / as it is, {at}", ratio, "x")
    ratio = series.ratio("same", "as it is")
    yield Row(f"DP step by deterministic operations / as it is, {at}", ratio, "x")
    yield from _repeats(work["same"], f"{at}, deterministic operations")


def _repeats(dp: _Steps, at: str) -> Iterator[Row]:
    """Says how far two equal steps are apart: on a GPU atomic additions come in any order."""
    start = dp.state
    first, second = (jax.tree.leaves(dp.step_from(start).params) for _ in range(2))
    differing = sum(int(jnp.sum(a != b)) for a, b in zip(first, second, strict=True))
    yield Row(f"parameters that differ after two equal steps, {at}", differing, "")
    apart = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(first, second, strict=True))
    yield Row(f"largest difference after two equal steps, {at}", apart, "")


def precisions(batch_size: int, widths: tuple[int, int], rounds: int) -> Iterator[Row]:
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
    at = f"[{batch_size}, {widths[0]}] x [{batch_size}, {widths[1]}]"
    work = {}
    for name, precision in offered.items():
        program = jax.jit(lambda a, b, p=precision: jnp.einsum("bi,bj->ij", a, b, precision=p))
        try:
            found = np.asarray(program(left, right), np.float64)
        except Exception as error:  # no device has all of them
            yield Row(f"weight gradient {at}, {name}: {type(error).__name__}", None, "ms")
            continue
        off = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        yield Row(f"weight gradient {at}, {name}, off by, relative", off, "")
        work[name] = lambda program=program: jax.block_until_ready(program(left, right))
    series = in_turns(work, rounds, time.perf_counter)
    for name in work:
        yield Row(f"weight gradient {at}, {name}", 1e3 * series.median(name), "ms")


def epoch(model: ModelConfig, rows: int, test_rows: int, batch_size: int) -> Iterator[Row]:
    """Trains two epochs by `train_blocks` on rows whose best AUC is known, and scores the model."""
    begin = time.perf_counter()
    data = synthetic.in_memory(rows, seed=0)
    test = synthetic.in_memory(test_rows, seed=0, first_chunk=-(-rows // synthetic.CHUNK))
    at = f"{rows / 1e6:.3g}M rows, batch {batch_size}"
    yield Row(f"seconds to generate {at}", time.perf_counter() - begin, "s")

    sampler = samplers.BallsAndBins(rows, batch_size, epochs=2)
    mechanism = Mechanism(sampler, 1.0, 4.0)
    params, logit_fn, loss_fn = functional(model, DISPLAY_ADS, 0)
    algorithm = dpsgd(loss_fn, ADAM)
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
    yield Row(
        f"first block, drawing and compiling included, {at}", time.perf_counter() - begin, "s"
    )

    begin = time.perf_counter()
    marks: list[tuple[float, int]] = []  # when, and how many steps were done
    for block in blocks(1):
        if not marks:  # drawn, and on its way
            marks.append((time.perf_counter(), 0))
        if block.steps.stop >= sampler.steps_per_epoch * len(marks):
            jax.block_until_ready(block.log)
            marks.append((time.perf_counter(), block.steps.stop))
    yield Row(f"drawing the first epoch, {at}", marks[0][0] - begin, "s")
    # The second was drawn while the first was under way: it takes what each further one does.
    first, second = (
        (after[0] - before[0]) / (after[1] - before[1]) * sampler.steps_per_epoch
        for before, after in itertools.pairwise(marks)
    )
    yield Row(f"first epoch, once drawn, {at}", first, "s")
    name, seconds = f"an epoch, {at}", second
    full = rows >= 36_000_000
    yield Row.at_most(name, seconds, "s", EPOCH_BAR) if full else Row(name, seconds, "s")

    blocks_of_rows = (
        {name: column[i : i + 2**16] for name, column in test.columns.items()}
        for i in range(0, test_rows, 2**16)
    )
    found = evaluate(logit_fn, block.state.params, blocks_of_rows).auc
    yield Row(f"test AUC after two epochs, sigma 1, {at}", found, "")
    yield Row("best reachable AUC of these rows", test.bayes_auc, "")
    yield Row("test AUC short of the best by", test.bayes_auc - found, "")
    peak = peak_memory()
    yield Row(f"peak memory so far, {at}", None if peak is None else peak / 1e9, "GB")


def whole_run(
    model: ModelConfig, rows: int, batch_size: int, *, audit: bool = True
) -> Iterator[Row]:
    """Trains as `dpsgd train` does: a store, the audit, the ledger, checkpoints and the report."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        made = synthetic.write_store(store, rows, seed=0)
        config = RunSpec.of(
            SETTINGS["balls-and-bins"](batch_size=batch_size, epochs=1),
            target_epsilon=3.0,
            audit=audit,
        )
        out = Path(folder) / "run"
        begin = time.perf_counter()
        Run.create(config, Clicks(store, **asdict(model)), out).train()
        seconds = time.perf_counter() - begin
        run = FinishedRun.read(out)  # held against its ledger
        at = f"{run.record['num_params'] / 1e6:.3g}M parameters, {rows / 1e6:.3g}M rows"
        yield Row(f"whole run, {at}", seconds, "s")
        yield Row(f"of it training, {at}", run.record["training_seconds"], "s")
        yield Row.at_most(f"its epsilon, {at}", run.record["epsilon_upper"], "", 3.0)
        yield Row(f"its test AUC, {at}", run.record["metrics"]["test_auc"], "")
        yield Row("best reachable AUC of its test rows", made.summary.test_bayes_auc, "")


def _profile(dp: _Steps, size: Size, at: str, most: int = 12) -> Iterator[Row]:
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
    a_step = {name: duration / 1e6 / size.block_steps for name, duration in spent.items()}
    yield Row(f"kernels of a DP step, one after another, {at}", sum(a_step.values()) or None, "ms")
    for name, duration in sorted(a_step.items(), key=lambda item: -item[1])[:most]:
        yield Row(f"kernel {name:.60}, {at}", duration, "ms")
