"""Runs over several devices: what they exchange, hold and compute, of programs for fake devices.

Eight devices that are one processor compute what eight of their own would; how long that takes says
nothing, and nothing here is timed but draws, privacy costs and stores. Programs are compiled from
shapes, and read; runs are of a small model. `shards` is about the size of Criteo's terabyte,
without its rows; `beam` about stores and batches by many workers (see `scale_beam`). What needs
several processes that are killed or stopped is tested in `tests/dpsgd/runs`.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import samplers
from dpsgd import Mechanism, RootKey, dpsgd, train_blocks
from dpsgd.core.state import TrainState
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.noise.gaussian import add_gaussian_noise
from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.collectives import Collective, collectives
from experiments.benchmarks.programs import SIZES, num_params, random_batch
from experiments.benchmarks.scale_beam import BEAM
from experiments.benchmarks.timing import alone
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.model import functional, pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import BallsAndBins, BatchSource, EpochSampler, Poisson

PyTree = Any

DEVICES = 8
NUM_EXAMPLES = 37_000_000
BATCH_SIZE = 8192
STEPS = 20
RUN = ModelConfig(embedding_dim=8, max_buckets=2**12, hidden=(64,))
TABLES = 2**21
"""Bytes from which a parameter is sharded."""
DIAGNOSTICS_BYTES = 16
"""Four float32, that are summed over the devices with the gradients."""
TERABYTE = 4_373_472_329
"""Rows of Criteo's terabyte click logs, of 24 days."""
SHARDS, SHARDED_BATCH = 64, 65_536
SECONDS, GIGABYTES = 60.0, 2.0
"""Bars of a shard's epoch and of a privacy cost."""
PADDING = {
    (37_000_000, 1024, 1): {1: 32, 8: 98, 64: 338},
    (37_000_000, 8192, 5): {1: 11, 8: 32, 64: 100},
    (4_200_000_000, 65_536, 1): {8: 12, 64: 35},
}
"""Rows of padding for 100 of a batch that were predicted: by n, b and epochs, and by shards. (One
shard has 2^31 - 1 rows at most.)"""


def prepare() -> None:
    """Makes one processor eight devices, before JAX looks for any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


class Step:
    """The compiled program of a step of clicks."""

    def __init__(self, config: ModelConfig, batch_size: int, placement: Placement) -> None:
        self.params = shaped(config, DISPLAY_ADS)[0]
        algorithm = dpsgd(pure_functions(config, DISPLAY_ADS).loss, optax.adam(1e-3))
        mechanism = Mechanism(Poisson(NUM_EXAMPLES, batch_size), 1.0, 1.0)
        self.state = jax.eval_shape(algorithm.init, self.params)
        rows = shapes_of_rows(random_batch(1, config), NUM_EXAMPLES)
        layout = Layout.choose(mechanism.sampler, rows, placement=placement)
        program = layout.program(algorithm, mechanism, self.state, rows)
        self.exchanged = collectives(program)
        self.flops = float((program.cost_analysis() or {})["flops"])
        self.shardings = placement.state(self.state)

    def state_bytes(self) -> int:
        """Returns the bytes of the state that lie on one device."""
        parts = zip(jax.tree.leaves(self.state), jax.tree.leaves(self.shardings), strict=True)
        return sum(4 * math.prod(where.shard_shape(leaf.shape)) for leaf, where in parts)


def programs(model: str = "85M", batch_size: int = BATCH_SIZE) -> Iterator[Row]:
    """Reads programs for eight devices."""
    devices = tuple(jax.devices()[:DEVICES])
    num = sum(math.prod(x.shape) for x in jax.tree.leaves(shaped(SIZES[model], DISPLAY_ADS)[0]))
    size = f"{num / 1e6:.3g}M parameters, batch {batch_size:,}"
    row, step = at(size), functools.partial(Step, SIZES[model])
    whole = step(batch_size, Placement(devices))
    each = [one for one in whole.exchanged if one.depth]
    yield row("exchanges of a step, replicated", len(each), at_most=1)
    beyond = sum(one.size for one in each) - 4 * num - DIAGNOSTICS_BYTES
    yield row("its bytes beyond 4 a parameter and the diagnostics", beyond, "B", at_most=0)
    yield row("exchanges inside of a step's loops", _inner(each), at_most=0)
    # What more examples add to the arithmetic of a device, over what they add on one alone.
    halved = [step(batch_size // 2, Placement(some)).flops for some in (devices, devices[:1])]
    alone = step(batch_size, Placement(devices[:1])).flops
    share = (whole.flops - halved[0]) / (alone - halved[1])
    yield row(f"a device's part of the batch x {DEVICES}", DEVICES * share, at_most=1.02)
    split = step(batch_size, Placement(devices, TABLES))
    table = 4 * max(math.prod(leaf.shape) for leaf in jax.tree.leaves(split.params))
    dense = 3 * (4 * num - table)  # with two moments
    largest = max(one.size for one in split.exchanged)
    row = at(f"table sharded, {size}")
    yield row("largest exchange / the table", largest / table, "x", at_most=0.25)
    yield row("bytes exchanged in a step / replicated", _bytes(split) / _bytes(whole), "x")
    yield row("exchanges inside of a step's loops", _inner(split.exchanged), at_most=0)
    share = split.state_bytes() / (3 * table / DEVICES + dense + 64)
    name = f"state on a device / (1/{DEVICES} of the table's and all other)"
    yield row(name, share, "x", at_most=1.0)


def _inner(exchanged: list[Collective]) -> int:
    return sum(one.depth > 1 for one in exchanged)


def _bytes(step: Step) -> int:
    return sum(one.size for one in step.exchanged if one.depth)


def noise(rows_of_table: int = 100_000) -> Iterator[Row]:
    """Says whether noise is the same on every layout, and whether it needs an exchange."""
    shapes = {"table": (rows_of_table, 14), "bias": (598,)}
    root = RootKey.from_insecure_seed(0)
    key = jnp.asarray(root.noise_key(0))

    def add(sums: PyTree, step: Any) -> PyTree:
        return add_gaussian_noise(sums, key, step, 1.3)

    sums = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    alone = jax.device_get(jax.jit(add)(sums, 3))
    exchanged, unequal = 0, 0
    for count in (1, 2, 4, DEVICES):
        for rows_from in (None, 1):
            placement = Placement(tuple(jax.devices()[:count]), rows_from)
            where = placement.params(sums)
            program = (
                jax.jit(add, in_shardings=(where, placement.replicated), out_shardings=where)
                .lower(sums, jnp.int32(3))
                .compile()
            )
            exchanged += len(collectives(program))
            found = jax.device_get(program(placement.put_whole(sums, where), jnp.int32(3)))
            unequal += sum(int((found[name] != alone[name]).sum()) for name in shapes)
    name = "exchanges of noise, on 8 layouts of 1 to 8 devices"
    yield figure(name, exchanged, at_most=0)
    yield figure("its numbers that differ from those of one device", unequal, at_most=0)


def trained(config: ModelConfig, placement: Placement | None) -> PyTree:
    """Returns the parameters after `STEPS` steps."""
    num_examples = 4000
    params, _, loss_fn = functional(config, DISPLAY_ADS, 0)
    algorithm = dpsgd(loss_fn, optax.adam(1e-3))
    mechanism = Mechanism(Poisson(num_examples, 2 * num_examples // STEPS, 2), 1.0, 1.0)
    assert mechanism.sampler.num_steps == STEPS
    blocks = train_blocks(
        algorithm,
        mechanism,
        algorithm.init(params, mechanism),
        random_batch(num_examples, config),
        root=RootKey.from_insecure_seed(0),
        placement=placement,
    )
    *_, last = blocks
    assert isinstance(last.state, TrainState)
    return jax.device_get(last.state.params)


def runs() -> Iterator[Row]:
    """Says how far apart runs on other devices are, and whether they repeat."""
    alone = trained(RUN, None)
    furthest, unequal = 0.0, 0
    for count in (1, 2, 4, DEVICES):
        for rows_from in (None, TABLES):
            placement = Placement(tuple(jax.devices()[:count]), rows_from)
            found, again = (trained(RUN, placement) for _ in range(2))
            furthest = max(furthest, _distance(found, alone))
            unequal += sum(
                int((a != b).sum())
                for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True)
            )
    count = num_params(alone)
    layouts = "replicated and sharded, 1 to 8 devices"
    row = at(f"{STEPS} steps of {count / 1e6:.2g}M parameters, {layouts}")
    yield row("distance from one device's", furthest, "x", at_most=1e-6)
    yield row("numbers that a repetition changes", unequal, at_most=0)


def _distance(found: PyTree, wanted: PyTree) -> float:
    """Returns |found - wanted| / |wanted|, of the leaf where it is largest."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in leaves)


def matrices(num_examples: int = 100_000) -> Iterator[Row]:
    """Counts entries of the participation matrix that depend on the number of shards."""
    unequal = 0
    for kind in (Poisson, BallsAndBins):
        plans = [
            kind(num_examples, 64, num_shards=shards).plan(seed=1, epoch=0)
            for shards in (1, 2, 4, 7)
        ]
        for step in range(kind(num_examples, 64).steps_per_epoch):
            alone, *others = (plan.members(step) for plan in plans)
            unequal += sum(np.setxor1d(alone, other).size for other in others)
            unequal += sum(abs(len(alone) - len(other)) for other in others)
    name = f"entries of the matrix that shards change, 2, 4, 7 shards, n {num_examples:,}"
    yield figure(name, unequal, at_most=0)


def processes(counts: tuple[int, ...] = (2, 4)) -> Iterator[Row]:
    """Says whether processes of this machine train to the bits of as many devices of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic.write_raw(folder / "raw.txt", 3_000, seed=1)
        display.prepare([folder / "raw.txt"], folder / "store")
        for count in counts:
            one, several = (folder / f"{kind}-{count}" for kind in ("devices", "processes"))
            _train(folder / "store", one, count, 1)
            _train(folder / "store", several, count, count)
            with np.load(one / "params.npz") as a, np.load(several / "params.npz") as b:
                unequal = sum(int((a[leaf] != b[leaf]).sum()) for leaf in a.files)
            name = f"parameters that differ, {count} processes and one with {count} devices"
            yield figure(f"{name}, {count} shards", unequal, at_most=0)


_COMMAND = "import sys; from experiments import cli; sys.exit(cli.main())"


def _train(store: Path, out: Path, shards: int, processes: int) -> None:
    """Trains by the command, in so many processes, each with its part of the devices."""
    words = [sys.executable, "-c", _COMMAND, "train", store, "sampler:poisson"]
    words += ["--batch-size", 200, "--epochs", 2, "--num-shards", shards, "--noise-multiplier", 1]
    words += ["--embedding-dim", 2, "--max-buckets", 64, "--hidden", 4, "--calibration", "none"]
    words += ["--insecure-seed", 1, "--no-audit", "--out", out]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["JAX_NUM_CPU_DEVICES"] = str(shards // processes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(processes):
        given = ["--coordinator", meet, "--num-processes", processes, "--process-id", index]
        command = [str(word) for word in (*words, *(given if processes > 1 else []))]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    printed = [process.communicate()[0].decode() for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(printed))


def sharded(sampler: str, what: str) -> Iterator[Row]:
    """Measures a process that draws one shard's epoch, or that finds the cost of all shards."""
    made = getattr(samplers, sampler)(TERABYTE, SHARDED_BATCH, num_shards=SHARDS)
    place = f"{sampler}, n {TERABYTE / 1e6:.4g}M, batch {SHARDED_BATCH}"
    if what == "draw":
        yield from took(f"draw of one shard's epoch of {SHARDS}, {place}", draw, made)
    else:
        yield from took(f"privacy cost of {SHARDS} shards, {place}", cost, made)


def took(name: str, measure: Callable[[EpochSampler], None], sampler: EpochSampler) -> list[Row]:
    """Returns CPU time and largest memory of a process that measures one thing."""
    found = alone(measure, sampler)
    return [
        figure(f"CPU time, {name}", found.cpu_seconds, "s", at_most=SECONDS),
        figure(f"memory, {name}", found.gigabytes, "GB", at_most=GIGABYTES),
    ]


def draw(sampler: EpochSampler) -> None:
    shard = sampler.num_shards // 3
    BatchSource(sampler, seed=1, shards=range(shard, shard + 1)).passes(0)


def cost(sampler: EpochSampler) -> None:
    from accounting import epsilon

    epsilon(sampler.privacy(0.6), 1 / sampler.num_examples)


def padding() -> Iterator[Row]:
    """Holds the padding of batches by shards to what was predicted."""
    for (n, b, epochs), predicted in PADDING.items():
        for shards, percent in predicted.items():
            sampler = BallsAndBins(n, b, epochs, num_shards=shards, target_delta=1 / n)
            padding = 100 * (sampler.padded_batch_size / b - 1)
            name = f"padding, {shards} shards, n {n / 1e6:g}M, batch {b}, epochs {epochs}"
            yield figure(name, padding, "%", at_most=percent + 0.5)


EXACT: dict[str, Any] = {"exact": True}
DRAWN, COSTED = ("Deterministic", "Shuffle", "Poisson", "BallsAndBins"), ("Poisson", "BallsAndBins")
CASES = [
    *cases(programs, quick={"model": "8M", "batch_size": 1024}, **EXACT),
    *cases(noise, quick={"rows_of_table": 1_000}, **EXACT),
    *cases(runs, quick={}, **EXACT),
    *cases(processes, quick={"counts": (2,)}, **EXACT),
    *cases(matrices, "shards, matrices", quick={"num_examples": 1_000}, **EXACT),
    *cases(sharded, "shards", over={"what": ("draw",), "sampler": DRAWN}),
    *cases(sharded, "shards", over={"what": ("cost",), "sampler": COSTED}),
    *cases(padding, "shards, padding", quick={}, **EXACT),
    *BEAM,
]
