"""CPU time of a DP step beside an ordinary one and the machine's floor.

The model is the click model of the papers, at three sizes; data are random. All programs of a size
and batch take turns. No program reaches the floor: the time to move what a dense-Adam step must, at
the rate of a copy, and that of its matrix products at the rate of one.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpsgd import clipped_grad
from dpsgd.core.algorithm import privatize
from dpsgd.core.state import TrainState
from dpsgd.engine.programs import compiler_options
from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.programs import (
    BYTES_PER_PARAMETER,
    SIZES,
    Program,
    copies_of,
    copy_rate,
    num_params,
    one_step,
    problem,
    total_loss,
    whole_batch,
)
from experiments.benchmarks.timing import in_turns
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig

BATCHES = 256, 1024, 8192
STEP_BARS = {("85M", 1024): 2.5, ("85M", 8192): 1.3}
"""Full DP step / non-private one, by size and batch; these sizes have the other bars, too."""
MEASURED, QUICKLY = (1024, 2**26), (256, 2**22)
"""Sides of the matrices that are multiplied, and floats that are copied."""


def step(
    size: str,
    batch_size: int,
    measured: tuple[int, int] = MEASURED,
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    config, optimizer = SIZES[size], optax.adam(1e-3)
    params, loss_fn, batch = problem(config, batch_size)
    plain_grad = jax.grad(total_loss(loss_fn))
    dp_step, (state, *inputs) = one_step(loss_fn, optimizer, whole_batch(batch_size), params, batch)
    weights, *of_noise = inputs[1:]

    def ghost_grad(params, batch):
        return clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, weights)[0]

    def adam(state, gradient):
        updates, moments = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)

    def plain_step(state, batch):
        gradient = jax.tree.map(lambda leaf: leaf / batch_size, plain_grad(state.params, batch))
        return (adam(state, gradient),)

    options = compiler_options()  # those of the training loop, for all programs
    grads = {
        label: jax.jit(f, compiler_options=options).lower(params, batch).compile()
        for label, f in (("plain", plain_grad), ("ours", ghost_grad))
    }
    gradients = in_turns(
        {k: functools.partial(_run, f, params, batch) for k, f in grads.items()}, rounds
    )
    read: dict[str, Any] = {k: f.memory_analysis() for k, f in grads.items()}
    memory = {k: found.temp_size_in_bytes for k, found in read.items()}

    # Each program owns its state, which it gives away and gets back.
    count = num_params(params)
    del params
    zeros = jax.tree.map(jnp.zeros_like, state.params)

    def noise_alone(total, key, scales):
        return (privatize(total, (), key, 0, scales)[0],)

    programs = {
        "plain": Program(plain_step, copies_of(state), batch),
        "ours": Program(dp_step, copies_of(state), *inputs),
        "noise": Program(noise_alone, copies_of(state.params), *of_noise),
        "update": Program(lambda s: ((adam(*s), s[1]),), copies_of((state, zeros))),
    }
    del state, zeros
    steps = in_turns(programs, rounds)
    del programs
    gc.collect()

    row, bar = at(f"{size}, batch {batch_size}"), STEP_BARS.get((size, batch_size))
    exact = f"{count / 1e6:.3g}M parameters, batch {batch_size}"
    ours, noise, update = (steps.median(part) for part in ("ours", "noise", "update"))
    plain, clipped = (gradients.median(part) for part in ("plain", "ours"))
    yield figure(f"non-private step, {exact}", steps.median("plain"), "s")
    yield row("DP step", ours, "s")
    yield row("floor of a step", floor_of_step(count, config, batch_size, rates(*measured)), "s")
    yield row("DP / non-private step", steps.ratio("ours", "plain"), "x", at_most=bar)
    ratio = gradients.ratio("ours", "plain")
    yield row("clipped / non-private gradient", ratio, "x", at_most=bar and 1.15)
    ratio = memory["ours"] / memory["plain"]
    yield row("temporary memory, clipped / non-private", ratio, "x", at_most=bar and 1.3)
    yield row("temporary memory, clipped gradient", memory["ours"] / 1e6, "MB")
    yield row("forward, backward, norms and sum", clipped, "s")
    yield row("noise alone", noise, "s")
    yield row("Adam alone", update, "s")
    parts = {  # of their sum, each run by itself
        "forward and backward": plain,
        "norms and clipping": clipped - plain,
        "noise": noise,
        "update": update,
    }
    for part, seconds in parts.items():
        yield row(f"share of a step: {part}", 100 * seconds / sum(parts.values()), "%")


@functools.cache
def rates(side: int, copied: int) -> tuple[float, float]:
    """Returns bytes a second of copies and flops a second of matrix products, in CPU time."""
    product, matrix = jax.jit(lambda a: a @ a), jnp.ones((side, side))
    series = in_turns({"product": lambda: _run(product, matrix)}, 5)
    return copy_rate(copied), 2 * side**3 / series.median("product")


def floor(measured: tuple[int, int] = MEASURED) -> Iterator[Row]:
    copies, products = rates(*measured)
    yield figure("rate of a copy in place, read and write", copies / 1e9, "GB/s")
    yield figure("rate of a float32 matrix product", products / 1e9, "GFLOP/s")


def floor_of_step(
    count: int, config: ModelConfig, batch_size: int, rates: tuple[float, float]
) -> float:
    """Returns seconds that no dense-Adam step can beat: its bytes, then its products."""
    copies, products = rates
    features = len(DISPLAY_ADS.categories) * config.embedding_dim + 2 * len(DISPLAY_ADS.integers)
    widths = [features, *config.hidden, 1]
    # Forward, the gradient of the weights and that of the inputs: 2 flops an entry each.
    flops = 6 * sum(m * n for m, n in itertools.pairwise(widths)) * batch_size
    return BYTES_PER_PARAMETER * count / copies + flops / products


def _run(program: Callable, *arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))


CASES = [
    *cases(floor, quick={"measured": QUICKLY}, seconds=10),
    *cases(
        step,
        over={"size": SIZES, "batch_size": BATCHES},
        quick={"rounds": 1, "measured": QUICKLY},
    ),
]
