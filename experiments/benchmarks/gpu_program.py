"""Kernels, graphs and bytes of a block of DP steps, compiled for an H100 without having one.

    python -m venv gpu && gpu/bin/pip install ".[cuda]"
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHON=gpu/bin/python scripts/bench gpu_program

JAX's CUDA plugin compiles ahead of time for a description of the device. Nothing is run or timed;
matrix products are not tuned, so their kernels may differ from those on a GPU. Bytes count arrays
about as large as the largest parameter, once per kernel that reads or writes one; kernels that
gather or scatter rows move few bytes and are left out.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dpsgd import Mechanism, dpsgd
from dpsgd.engine.feed import Layout
from dpsgd.engine.step import block_function
from experiments.benchmarks.case import Figure, LeftOut, figure_at, require
from experiments.benchmarks.programs import ADAM, RESIDENT_ROWS, Model, clicks, lazy
from samplers import Deterministic

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 device_memory_size: 85000000000
  runtime_version: "13.0.0" driver_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100"
"""
"""Described device. Without a driver version XLA keeps loops out of CUDA graphs."""
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


def kernels(program: str, *, in_loop: bool = False) -> list[Kernel]:
    """Returns the kernels of a compiled program, loops expanded.

    Args:
      program: Text of the compiled program.
      in_loop: Whether only kernels of one round of the program's outer loop are returned.
    """
    bodies = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", program, re.M | re.S)}
    entry = re.search(r"^ENTRY .*?^}", program, re.M | re.S)
    assert entry is not None
    if in_loop:
        [name] = re.findall(r" while\(.*body=%([\w.-]+)", entry[0])
        return _kernels_of(bodies[name], bodies, times=1)
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


class HostWork(NamedTuple):
    """Work of the host in each step of a block.

    `launches` counts graphs, and kernels outside graphs; `reads` counts the conditions of loops
    outside graphs, which the host reads, and copies to the host.
    """

    launches: int
    reads: int


def host_work(thunks: str) -> HostWork:
    """Returns the host's work in the block's loop; none if a graph has the whole loop.

    Args:
      thunks: XLA's dump of the sequence of thunks that the host executes.
    """
    launches, reads = 0, 0
    parents: list[tuple[int, str]] = []
    for line in thunks.splitlines():
        thunk = re.match(r"( *)\d+: k(\w+)", line)
        if thunk is None:
            continue
        depth, kind = len(thunk[1]), thunk[2]
        parents = [parent for parent in parents if parent[0] < depth]
        around = [name for _, name in parents]
        parents.append((depth, kind))
        if "CommandBuffer" in around:
            continue
        in_loop = "While" in around
        reads += kind in ("While", "Conditional") or (in_loop and "DeviceToHost" in kind)
        launches += in_loop and kind not in ("While", "Conditional", "Sequential")
    return HostWork(launches, reads)


def block_for_h100(model: Model, batch_size: int, tables: str) -> tuple[Any, str]:
    """Compiles the block of steps that `train_blocks` runs, for one H100.

    Args:
      model: Model of the run.
      batch_size: Number of examples of a batch.
      tables: "dense" for Adam on all parameters, or "lazy" for tables by lazy SGD.

    Returns:
      Executable, and dump of its thunks.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=H100
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    sampler, rows = Deterministic(RESIDENT_ROWS, batch_size), model.columns
    mechanism = Mechanism(sampler, 1.0, 1.0)
    lazily = lazy() if tables == "lazy" else None
    algorithm = dpsgd(model.loss_fn, ADAM, tables=lazily, microbatch_size=batch_size)
    state = jax.eval_shape(lambda: algorithm.init(model.params(), mechanism, rows))
    layout = Layout.choose(sampler, rows, data_on="device")
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=device),
        layout.arguments(algorithm, mechanism, state, rows),
    )
    lowered = jax.jit(block_function(algorithm, sampler), donate_argnums=0).lower(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "xla_gpu_autotune_level": 0,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
        }
        compiled = lowered.compile(options)
        dumps = list(Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt"))
        if not dumps:
            raise LeftOut("needs a compilation without JAX_COMPILATION_CACHE_DIR")
        return compiled, dumps[0].read_text()


def _size(shape: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", shape.partition("[")[2]))


def block(
    table_rows: int,
    hidden: Sequence[int],
    tables: str,
    most_kernels: int,
    batch_size: int = 1024,
) -> Iterator[Figure]:
    """Counts kernels, work of the host, and bytes of a click model's compiled block.

    Args:
      table_rows: Rows of the largest tables.
      hidden: Widths of the layers.
      tables: "dense" or "lazy".
      most_kernels: Bar of the kernels of a step.
      batch_size: Examples of a batch.
    """
    require("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    model = clicks(table_rows, hidden)
    compiled, thunks = block_for_h100(model, batch_size, tables)
    text = compiled.as_text()
    largest = max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.params)))
    num_kernels = sum(kernel.times for kernel in kernels(text, in_loop=True))
    moved, host = traffic(text, largest), host_work(thunks)
    row = figure_at(f"{model.num_params / 1e6:.2g}M, {tables} tables, batch {batch_size}")
    yield row("kernels of a step", num_kernels, bar=f"<= {most_kernels}")
    yield row("graphs that the host starts in a step", host.launches, bar="<= 1")
    yield row("values that the host reads in a step", host.reads, bar="<= 0")
    yield row("kernels that read a whole table (noise and update)", moved.updates, bar="<= 1")
    if largest >= 2**20:  # else activations are as large
        yield row("bytes a parameter of the largest table", moved.bytes_per_entry, "B", "<= 36")
    temporary = compiled.memory_analysis().temp_size_in_bytes / 1e6
    yield row("temporary memory", temporary, "MB")
