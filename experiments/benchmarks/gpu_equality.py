"""What must be the same on a GPU as in the definition: clipping, noise, audits, bits.

Each function yields rows whose bars are what the guarantee or the arithmetic promises, and what it
holds the device to is computed by NumPy on the host, in float64 or in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd import RootKey, clipped_grad, cost, resume, run
from dpsgd.audit import reference
from dpsgd.engine.loop import repeats_exactly
from dpsgd.noise.gaussian import add_gaussian_noise, grid, standard_normal
from dpsgd.noise.philox import words_at
from dpsgd.runs.ledger import read
from dpsgd.runs.resolve import resolved
from experiments.benchmarks.case import Row, figure
from experiments.benchmarks.programs import problem
from experiments.benchmarks.train import generated, run_of
from experiments.cli.audit import coupled
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.task import DescribedClicks
from samplers import Population

PyTree = Any

MIDDLE = ModelConfig(embedding_dim=14, max_buckets=2**11, hidden=(256, 256))
SMALL = ModelConfig(embedding_dim=8, max_buckets=2**8, hidden=(64,))

PRECISIONS = {"the device's own": None, "the highest": "highest"}
"""Of the products of forward and backward passes. A GPU's own rounds to 10 bits (TF32)."""


def clipping(
    config: ModelConfig = MIDDLE,
    batch_size: int = 256,
    precisions: Collection[str] = tuple(PRECISIONS),
) -> Iterator[Row]:
    """Holds the clipped sum to one gradient per example, and each example's share of it to C."""
    params, loss_fn, batch = problem(config, batch_size)
    ones = jnp.ones(batch_size)

    def clipped(method: str) -> Callable[..., PyTree]:
        def program(params: PyTree, weights: jax.Array, clip: float) -> PyTree:
            gradient = clipped_grad(loss_fn, l2_clip_norm=clip, method=method)
            return gradient(params, batch, weights)[0]

        return jax.jit(program)

    def norms(params: PyTree, batch: PyTree) -> jax.Array:
        gradients = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        squares = [jnp.square(g).reshape(batch_size, -1).sum(1) for g in jax.tree.leaves(gradients)]
        return jnp.sqrt(sum(squares))

    # Half of the examples are clipped.
    seen = np.asarray(jax.jit(norms)(params, batch))
    half = float(np.median(seen))
    for name in precisions:
        precision = PRECISIONS[name]
        with jax.default_matmul_precision(precision) if precision else nullcontext():
            ghost = clipped("ghost")
            ours = ghost(params, ones, half)
            definition = clipped("vmap")(params, ones, half)
            # One example among rows of weight zero: the same contraction as in training.
            shares = [
                _norm(ghost(params, ones * (jnp.arange(batch_size) == i), half)) / half
                for i in np.argsort(seen)[-16:]
            ]
        off = _norm(_minus(ours, definition)) / _norm(definition)
        # Of TF32's 10 bits both sums are made, of activations that were rounded apart.
        bar = 1e-5 if precision else 1e-2
        where = f"in {name} precision"
        yield figure(f"clipped sum / one gradient per example, off by, {where}", off, at_most=bar)
        yield figure(f"largest share of one example / C, {where}", max(shares), at_most=1.0)


def noise(shape: tuple[int, int] = (4096, 301)) -> Iterator[Row]:
    """Holds the noise's integers to their definition exactly, and its floats within rounding."""
    key, step, leaf, stddev = RootKey.from_insecure_seed(0).noise_key(0), 7, 3, 1.3
    index = np.arange(math.prod(shape), dtype=np.uint64)
    counter = [index, np.zeros_like(index)]  # that is below 2^32
    counter += [np.full_like(index, n) for n in (leaf ^ int(key[2]), step ^ int(key[3]))]
    wanted = reference.philox(counter, *map(int, key[:2]))
    words = jax.jit(lambda key, step: words_at(key, step, leaf, shape))(key, np.uint32(step))
    differing = sum(np.sum(np.ravel(a) != b) for a, b in zip(words, wanted, strict=True))
    yield figure("words of the noise that differ from NumPy's", int(differing), at_most=0)

    z = reference.normals(key, step, leaf, index)
    normal = jax.jit(lambda key, step: standard_normal(key, step, leaf, shape))
    ours = np.asarray(normal(key, np.uint32(step)), np.float64).ravel()
    off = float(np.max(np.abs(ours - z) / np.abs(z)))
    yield figure("normal deviates, off from those in float64, relative", off, at_most=1e-6)

    sums = np.random.default_rng(0).normal(size=(leaf + 1, *shape)).astype(np.float32)
    program = jax.jit(
        lambda sums, key, step, stddev: add_gaussian_noise(list(sums), key, step, stddev)[leaf]
    )
    inputs = sums, key, np.uint32(step), np.float32(stddev)
    noised = np.asarray(program(*inputs), np.float64).ravel()
    spacing = float(np.asarray(grid(stddev)))
    cells = noised / spacing
    off_grid = int(np.sum(cells != np.rint(cells)))
    yield figure("noised sums that lie off the public grid", off_grid, at_most=0)
    threshold = reference.uniforms(key, step, leaf, index)
    total = sums[leaf].ravel().astype(np.float64) + float(inputs[3]) * z
    exact = np.ceil(total / spacing - threshold)
    # 1e-6 of the largest deviate that was drawn, in cells, and one for the rounding.
    most = 1 + 1e-6 * float(np.abs(z).max()) * stddev / spacing
    off = float(np.abs(cells - exact).max())
    yield figure("noised sums, off from the definition", off, "cells", at_most=most)
    cpu = None
    with suppress(RuntimeError):  # JAX_PLATFORMS names GPUs alone
        cpu = jax.devices("cpu")[0]
    if cpu is not None:
        with jax.default_device(cpu):
            theirs = np.asarray(program(*jax.device_put(inputs, cpu)), np.float64).ravel()
        yield figure("noised sums that differ from the CPU's", float(np.mean(noised != theirs)))


def audit(sampler: str, overflow: str | None = None) -> Iterator[Row]:
    """Makes the audit that precedes a run: what it refuses cannot be trained on this device."""
    spec = run_of(sampler, batch_size=64, l2_clip_norm=1.0, noise_multiplier=1.0)
    if overflow:
        several = replace(spec.sampler, max_batch_size=64, overflow=overflow)
        spec = replace(spec, sampler=several)
    clicks = DescribedClicks(PRESETS["small"], DISPLAY_ADS, 0)
    for check in coupled(clicks, resolved(spec, Population(1000))).checks:
        yield figure(f"audit: {check.name} ({check.detail})", check.passed, at_least=1)


def interrupted(
    model: ModelConfig = MIDDLE, rows: int = 200_000, batch_size: int = 1024
) -> Iterator[Row]:
    """Stops a run half-way, resumes it, and reads what it cost by its ledger."""

    class Enough(Exception):
        """The run is stopped here."""

    def until_a_step_is_done(line: str) -> None:
        if line.startswith("step "):
            raise Enough

    with generated(rows, model) as (task, folder, _):
        out = folder / "run"
        chosen = {"noise_multiplier": 1.0, "audit": False, "checkpoint_seconds": 0.0}
        spec = run_of("balls-and-bins", batch_size=batch_size, epochs=2, **chosen)
        planned = epsilon = None
        try:
            run(task, spec, out, progress=until_a_step_is_done)
        except Enough:
            terms = read(out / "ledger.jsonl").attempts[0].terms
            planned = cost([terms.segment()], terms.delta).epsilon
            epsilon = resume(out)["epsilon_upper"]
    if planned is None or epsilon is None:
        raise RuntimeError("the run was over before it could be stopped: more rows are needed")
    yield figure("steps are taken to repeat bit for bit on this device", repeats_exactly())
    name = "epsilon of a run that was stopped and resumed / as planned"
    yield figure(name, epsilon / planned.upper, "x", at_least=1 - 1e-9)


def _minus(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b)


def _norm(tree: PyTree) -> float:
    leaves = (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree))
    return math.sqrt(sum(float(np.sum(leaf**2)) for leaf in leaves))
