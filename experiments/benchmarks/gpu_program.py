"""The compiled DP step for an H200, without one: how many kernels, and how many bytes they move.

    python -m venv gpu && gpu/bin/pip install ".[cuda]"
    PYTHONPATH=. gpu/bin/python -m experiments.benchmarks.gpu_program

JAX's CUDA plugin compiles ahead of time for a device that is described to it. Nothing is run and
nothing is timed; the matrix products are not tuned, so their kernels may be others than on a GPU.
The bytes are those of arrays as large as the largest parameter, once for each kernel that reads or
writes one; kernels that look up or scatter rows move but a few.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from dpsgd import Mechanism, dpsgd
from experiments.benchmarks.rows import Row, report
from experiments.benchmarks.step import SIZES, random_batch
from experiments.criteo.model import functional
from experiments.criteo.schema import DISPLAY_ADS
from experiments.criteo.sizes import ModelConfig
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
    """One kernel of a compiled program.

    Attributes:
      name: Of its instruction.
      written: Shapes of its results, as text.
      read: Shapes of its operands.
      body: The computation that it calls, as text; empty if none.
    """

    name: str
    written: list[str]
    read: list[str]
    body: str


def kernels(program: str) -> list[Kernel]:
    """Returns the kernels of the entry computation of a compiled `program`."""
    bodies = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", program, re.M | re.S)}
    entry = re.search(r"^ENTRY .*?^}", program, re.M | re.S)
    assert entry is not None
    shapes: dict[str, list[str]] = {}
    found = []
    line = r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, |$)(.*)$"
    for name, result, op, operands, rest in re.findall(line, entry[0], re.M):
        shapes[name] = re.findall(r"\w+\[[\d,]*\]", result)
        read = re.findall(r"%([\w.-]+)", operands)
        if op == "get-tuple-element":
            index = re.search(r"index=(\d+)", rest)
            assert index is not None
            shapes[name] = [shapes[read[0]][int(index[1])]]
        if op not in NO_KERNEL:
            called = re.search(r"calls=%([\w.-]+)", rest)
            body = bodies.get(called[1], "") if called else ""
            found.append(
                Kernel(name, shapes[name], [s for k in read for s in shapes.get(k, [])], body)
            )
    return found


def compiled_step(config: ModelConfig, batch_size: int) -> tuple[Any, Any]:
    """Returns (parameters as shapes, compiled DP step with dense Adam for one H200)."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    params, _, loss_fn = functional(config, DISPLAY_ADS, 0)
    mechanism = Mechanism(Deterministic(batch_size, batch_size), 1.0, 1.0)
    algorithm = dpsgd(loss_fn, optax.adam(1e-3), mechanism)

    def step(state, batch, weights, noise_key, scales):
        total, _ = algorithm.clipped_sum(state.params, batch, weights, scales)
        return algorithm.update(state, total, noise_key, scales)

    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=device),
        (
            jax.eval_shape(algorithm.init, params),
            random_batch(batch_size, config),
            jnp.ones(batch_size),
            jnp.zeros(4, jnp.uint32),
            mechanism.scales(),
        ),
    )
    program = jax.jit(step, donate_argnums=0).lower(*arguments)
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    return params, program.compile(options)


def _size(shape: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", shape.partition("[")[2]))


def measure(name: str, batch_size: int, keep: Path | None) -> list[Row]:
    """Returns the rows of one model and batch."""
    params, program = compiled_step(SIZES[name], batch_size)
    text = program.as_text()
    if keep is not None:
        keep.write_text(text)
    largest = max(leaf.size for leaf in jax.tree.leaves(params))
    found = kernels(text)
    total, updates = 0, 0
    for kernel in found:
        rows_only = re.search(r" (?:gather|scatter)\(", kernel.body) is not None
        whole = [s for s in (*kernel.written, *kernel.read) if _size(s) >= largest / 16]
        if not rows_only:
            total += sum(4 * _size(s) for s in whole)
            updates += sum(_size(s) == largest for s in kernel.read) > 0
    at = f"{name}, batch {batch_size}"
    return [
        Row.at_most(f"kernels of a step, {at}", len(found), "", 60),
        Row.at_most(f"kernels that read a whole table (noise and update), {at}", updates, "", 1),
        Row.at_most(f"bytes a parameter of the largest table, {at}", total / largest, "B", 36),
        Row(
            f"temporary memory, {at}",
            program.memory_analysis().temp_size_in_bytes / 1e6,
            "MB",
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Compiles the step and returns 1 if a bar does not hold, 2 without the plugin."""
    parser = argparse.ArgumentParser("bench gpu_program", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the compiled program here")
    parser.add_argument("--size", choices=SIZES, default="85M")
    parser.add_argument("--batch-size", type=int, default=1024)
    options = parser.parse_args(argv)
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(plugin) for plugin in plugins
    ):
        print("this needs jax's CUDA plugin, but no GPU: pip install '.[cuda]'", file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return report(measure(options.size, options.batch_size, options.keep), options.json)


if __name__ == "__main__":
    sys.exit(main())
