"""Kernels and bytes of a DP step, compiled for an H200 without having one.

    python -m venv gpu && gpu/bin/pip install ".[cuda]"
    PYTHON=gpu/bin/python scripts/bench gpu_program

JAX's CUDA plugin compiles ahead of time for a description of the device. Nothing is run or timed;
matrix products are not tuned, so their kernels may differ from those on a GPU. Bytes count arrays
about as large as the largest parameter, once per kernel that reads or writes one; kernels that
gather or scatter rows move few bytes and are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dpsgd import Mechanism, dpsgd
from dpsgd.noise.keys import RootKey
from experiments.benchmarks.case import Figure, figure_at, require
from experiments.benchmarks.models import Model, clicks
from experiments.benchmarks.programs import ADAM
from samplers import Deterministic

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
NO_KERNEL = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple"}


class Kernel(NamedTuple):
    """Shapes of a kernel's results and operands, and the text of its computation.

    `times` is the number of rounds of the loops around it; a loop of unknown length counts once.
    """

    name: str
    written: list[str]
    read: list[str]
    body: str
    times: int = 1


def kernels(program: str) -> list[Kernel]:
    """Returns the kernels of a compiled program, loops expanded."""
    bodies = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", program, re.M | re.S)}
    entry = re.search(r"^ENTRY .*?^}", program, re.M | re.S)
    assert entry is not None
    return _kernels_of(entry[0], bodies, times=1)


def _kernels_of(computation: str, bodies: Mapping[str, str], times: int) -> list[Kernel]:
    shapes: dict[str, list[str]] = {}
    kernels_found = []
    line = r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, |$)(.*)$"
    for name, result, op, operands, attributes in re.findall(line, computation, re.M):
        shapes[name] = re.findall(r"\w+\[[\d,]*\]", result)
        read = re.findall(r"%([\w.-]+)", operands)
        if op == "get-tuple-element":
            index = re.search(r"index=(\d+)", attributes)
            assert index is not None
            shapes[name] = [shapes[read[0]][int(index[1])]]
        inner = None
        if op in ("while", "call"):
            inner = re.search(r"(?:body|to_apply)=%([\w.-]+)", attributes)
        if inner and inner[1] in bodies:
            rounds = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
            inner_times = times * int(rounds[1]) if rounds else times
            kernels_found += _kernels_of(bodies[inner[1]], bodies, inner_times)
        elif op not in NO_KERNEL:
            called = re.search(r"calls=%([\w.-]+)", attributes)
            body = bodies.get(called[1], "") if called else ""
            operand_shapes = [s for k in read for s in shapes.get(k, [])]
            kernels_found.append(Kernel(name, shapes[name], operand_shapes, body, times))
    return kernels_found


class Traffic(NamedTuple):
    """Numbers of kernels, and bytes per entry of the largest table.

    `updates` counts kernels that read the whole table; bytes count arrays about as large as the
    table, read or written, divided by its entries.
    """

    kernels: int
    updates: int
    bytes_per_entry: float


def traffic(program: str, largest: int) -> Traffic:
    """Returns the memory traffic of a compiled program.

    Args:
      program: Text of the compiled program.
      largest: Number of entries of the largest table.
    """
    compiled_kernels = kernels(program)
    total, updates = 0, 0
    for kernel in compiled_kernels:
        large_arrays = [s for s in (*kernel.written, *kernel.read) if _size(s) >= largest / 16]
        if not re.search(r" (?:gather|scatter)\(", kernel.body):
            total += kernel.times * sum(4 * _size(s) for s in large_arrays)
            updates += kernel.times * (sum(_size(s) == largest for s in kernel.read) > 0)
    return Traffic(sum(kernel.times for kernel in compiled_kernels), updates, total / largest)


def step_for_h200(model: Model, batch_size: int) -> Any:
    """Compiles a DP step with dense Adam for one H200.

    As in the training loop, scales and key are arguments: with a constant stddev XLA would unroll
    the noise's loop of one round, and make the noise once for each moment.

    Args:
      model: Model whose step is compiled.
      batch_size: Number of examples of a batch.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    mechanism = Mechanism(Deterministic(batch_size, batch_size), 1.0, 1.0)
    algorithm, batch = dpsgd(model.loss_fn, ADAM), model.batch(batch_size)

    def step(state: Any, batch: Any, weights: Any, noise_key: Any, scales: Any) -> Any:
        """Returns the state after one DP step."""
        total, _ = algorithm.clipped_sum(state.params, batch, weights, scales)
        return (algorithm.update(state, total, noise_key, scales)[0],)

    noise_key = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))
    state = algorithm.init(model.params(), mechanism, batch)
    inputs = state, batch, jnp.ones(batch_size), noise_key, mechanism.scales()
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=device), inputs
    )
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    return jax.jit(step, donate_argnums=0).lower(*arguments).compile(options)


def _size(shape: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", shape.partition("[")[2]))


def program(
    table_rows: int, hidden: Sequence[int], batch_size: int = 1024, keep: str = ""
) -> Iterator[Figure]:
    """Counts kernels and bytes of a click model's compiled step.

    Args:
      table_rows: Rows of the largest tables.
      hidden: Widths of the layers.
      batch_size: Examples of a batch.
      keep: File for the program's text; empty for none.
    """
    require("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    model = clicks(table_rows, hidden)
    compiled = step_for_h200(model, batch_size)
    text = compiled.as_text()
    if keep:
        Path(keep).write_text(text)
    largest = max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
    moved = traffic(text, largest)
    row = figure_at(f"{model.num_params / 1e6:.3g}M parameters, batch {batch_size}")
    yield row("kernels of a step", moved.kernels, bar="<= 60")
    yield row("kernels that read a whole table (noise and update)", moved.updates, bar="<= 1")
    yield row("bytes a parameter of the largest table", moved.bytes_per_entry, "B", "<= 36")
    temporary = compiled.memory_analysis().temp_size_in_bytes / 1e6
    yield row("temporary memory", temporary, "MB")
