"""Runs over several devices: what they exchange, hold and compute, of programs for fake devices.

    scripts/bench scale --json scale.json        (some minutes and 6 GB)
    scripts/bench scale --quick                  (a minute: a small model, few rows)

Eight devices that are one processor compute what eight of their own would; how long that takes says
nothing, and nothing here is timed but the drawing of shards. Programs are compiled from shapes, and
read; runs are of a small model. What needs several processes that are killed or stopped is tested
in `tests/dpsgd/runs`, and mutants in `tests/mutants`.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import Mechanism, RootKey, TrainState, dpsgd, train_blocks
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.engine.planning import Collective, collectives
from dpsgd.noise.gaussian import add_gaussian_noise
from experiments.benchmarks.rows import Row, options_of, report
from experiments.benchmarks.scale_beam import beam_rows
from experiments.benchmarks.scale_shards import padding_rows, shard_rows
from experiments.benchmarks.step import SIZES, random_batch
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.model import functional, pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import BallsAndBins, Poisson

PyTree = Any

DEVICES = 8
NUM_EXAMPLES = 37_000_000
BATCH_SIZE = 8192
STEPS = 20
RUN = ModelConfig(embedding_dim=8, max_buckets=2**12, hidden=(64,))
TABLES = 2**21
"""Bytes from which a parameter is dealt out."""
DIAGNOSTICS_BYTES = 16
"""Four float32, that are summed over the devices with the gradients."""


class Step:
    """The compiled program of a step of clicks."""

    def __init__(self, config: ModelConfig, batch_size: int, placement: Placement) -> None:
        self.params = shaped(config, DISPLAY_ADS)[0]
        algorithm = dpsgd(pure_functions(config, DISPLAY_ADS).loss, optax.adam(1e-3))
        mechanism = Mechanism(Poisson(NUM_EXAMPLES, batch_size), 1.0, 1.0)
        self.state = jax.eval_shape(algorithm.init, self.params)
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((NUM_EXAMPLES, *x.shape[1:]), x.dtype),
            random_batch(1, config),
        )
        layout = Layout.of(mechanism.sampler, rows, placement=placement)
        program = layout.program(algorithm, mechanism, self.state, rows)
        self.exchanged = collectives(program)
        self.flops = float((program.cost_analysis() or {})["flops"])
        self.shardings = placement.state(self.state)

    def state_bytes(self) -> int:
        """Returns the bytes of the state that lie on one device."""
        parts = zip(jax.tree.leaves(self.state), jax.tree.leaves(self.shardings), strict=True)
        return sum(4 * math.prod(where.shard_shape(leaf.shape)) for leaf, where in parts)


def programs(config: ModelConfig, batch_size: int) -> list[Row]:
    """Returns what is read in programs for eight devices."""
    devices = tuple(jax.devices()[:DEVICES])
    num = sum(math.prod(x.shape) for x in jax.tree.leaves(shaped(config, DISPLAY_ADS)[0]))
    at = f"{num / 1e6:.3g}M parameters, batch {batch_size:,}"
    step = functools.partial(Step, config)
    whole = step(batch_size, Placement(devices))
    each = [one for one in whole.exchanged if one.depth]
    rows = [
        Row.at_most(f"exchanges of a step, replicated, {at}", len(each), "", 1),
        Row.at_most(
            f"its bytes beyond 4 a parameter and the diagnostics, {at}",
            sum(one.size for one in each) - 4 * num - DIAGNOSTICS_BYTES,
            "B",
            0,
        ),
        Row.at_most(f"exchanges inside of a step's loops, {at}", _inner(each), "", 0),
    ]
    # What more examples add to the arithmetic of a device, over what they add on one alone.
    halved = [step(batch_size // 2, Placement(some)).flops for some in (devices, devices[:1])]
    alone = step(batch_size, Placement(devices[:1])).flops
    share = (whole.flops - halved[0]) / (alone - halved[1])
    rows.append(
        Row.at_most(f"a device's part of the batch x {DEVICES}, {at}", DEVICES * share, "", 1.02)
    )
    dealt = step(batch_size, Placement(devices, TABLES))
    leaves = jax.tree.leaves(dealt.params)
    table = 4 * max(math.prod(leaf.shape) for leaf in leaves)
    dense = 3 * (4 * num - table)  # with two moments
    largest = max(one.size for one in dealt.exchanged)
    at = f"table dealt out, {at}"
    return [
        *rows,
        Row.at_most(f"largest exchange / the table, {at}", largest / table, "x", 0.25),
        Row(f"bytes exchanged in a step / replicated, {at}", _bytes(dealt) / _bytes(whole), "x"),
        Row.at_most(f"exchanges inside of a step's loops, {at}", _inner(dealt.exchanged), "", 0),
        Row.at_most(
            f"state on a device / (1/{DEVICES} of the table's and all other), {at}",
            dealt.state_bytes() / (3 * table / DEVICES + dense + 64),
            "x",
            1.0,
        ),
    ]


def _inner(exchanged: list[Collective]) -> int:
    return sum(one.depth > 1 for one in exchanged)


def _bytes(step: Step) -> int:
    return sum(one.size for one in step.exchanged if one.depth)


def noise(rows_of_table: int) -> list[Row]:
    """Returns whether noise is the same on every layout, and whether it needs an exchange."""
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
            found = jax.device_get(program(placement.put(sums, where), jnp.int32(3)))
            unequal += sum(int((found[name] != alone[name]).sum()) for name in shapes)
    return [
        Row.at_most("exchanges of noise, on 8 layouts of 1 to 8 devices", exchanged, "", 0),
        Row.at_most("its numbers that differ from those of one device", unequal, "", 0),
    ]


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


def runs(config: ModelConfig) -> list[Row]:
    """Returns how far apart runs on other devices are, and whether they repeat."""
    alone = trained(config, None)
    furthest, unequal = 0.0, 0
    for count in (1, 2, 4, DEVICES):
        for rows_from in (None, TABLES):
            placement = Placement(tuple(jax.devices()[:count]), rows_from)
            found, again = (trained(config, placement) for _ in range(2))
            furthest = max(furthest, _distance(found, alone))
            unequal += sum(
                int((a != b).sum())
                for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True)
            )
    num = sum(leaf.size for leaf in jax.tree.leaves(alone))
    at = f"{STEPS} steps of {num / 1e6:.2g}M parameters, replicated and dealt out, 1 to 8 devices"
    return [
        Row.at_most(f"distance from one device's, {at}", furthest, "x", 1e-6),
        Row.at_most(f"numbers that a repetition changes, {at}", unequal, "", 0),
    ]


def _distance(found: PyTree, wanted: PyTree) -> float:
    """Returns |found - wanted| / |wanted|, of the leaf where it is largest."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in leaves)


def matrices(num_examples: int) -> Row:
    """Returns how many entries of the participation matrix depend on the number of shards."""
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
    return Row.at_most(name, unequal, "", 0)


def processes(counts: tuple[int, ...]) -> list[Row]:
    """Returns whether processes of this machine train to the bits of as many devices of one."""
    rows = []
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
            rows.append(Row.at_most(f"{name}, {count} shards", unequal, "", 0))
    return rows


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


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "programs": lambda quick: programs(
        SIZES["8M" if quick else "85M"], 1024 if quick else BATCH_SIZE
    ),
    "noise": lambda quick: noise(1_000 if quick else 100_000),
    "runs": lambda quick: runs(RUN),
    "processes": lambda quick: processes((2,) if quick else (2, 4)),
    "shards": lambda quick: [
        matrices(1_000 if quick else 100_000),
        *(padding_rows() if quick else shard_rows()),
    ],
    "beam": lambda quick: beam_rows(2_000, kills=1) if quick else beam_rows(),
}
"""What is measured, in small or not."""


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("scale", __doc__, quick="a small model, few rows, two processes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = []
    for part in options.parts:
        rows += PARTS[part](options.quick)
        print(f"measured {part}", file=sys.stderr)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
