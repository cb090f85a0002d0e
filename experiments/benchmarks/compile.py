"""CPU time to compile a step, beside that of jax_privacy: trace, lowering and XLA's compiler.

The models are a transformer of one tied block, all of whose leaves are small, and the click model
of the papers with a million parameters. A gradient is the clipped sum of a batch, by jax_privacy
2.0.0 with one gradient per example, all at once; a step adds Gaussian noise (jax_privacy's own) and
Adam; the first step of training is what `train_blocks` takes to yield it. Each figure is the median
over processes that compile one program and nothing before it, without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dpsgd import RootKey, clipped_grad, dpsgd, train_blocks
from dpsgd.engine.modules import split_module
from experiments.benchmarks.case import Row, cases, figure
from experiments.benchmarks.programs import (
    SIZES,
    Problem,
    PyTree,
    one_step,
    problem,
    total_loss,
    whole_batch,
)
from experiments.benchmarks.timing import Series, alone

BATCH = 64
BAR = 2.0


class Transformer(nnx.Module):
    """One block of 2 heads and width 8 over 40 tokens, its output tied to its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(40, 8, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [length, 40] of the token after each of `tokens`."""
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(self.norm2(x)))))


def transformer() -> Problem:
    params, apply = split_module(Transformer(nnx.Rngs(0)))

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(apply(params, tokens[:-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[1:, None], axis=1))

    tokens = np.random.default_rng(0).integers(40, size=(BATCH, 13), dtype=np.int32)
    return Problem(params, loss_fn, tokens)


MODELS: dict[str, Callable[[], Problem]] = {
    "click": lambda: problem(SIZES["1M"], BATCH),
    "transformer": transformer,
}


def ordinary_gradient(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    jax.jit(jax.grad(total_loss(loss_fn))).lower(params, batch).compile()


def gradient(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    run = clipped_grad(loss_fn, l2_clip_norm=1.0)
    jax.jit(run).lower(params, batch, jnp.ones(BATCH)).compile()


def _theirs(loss_fn: Callable) -> Callable[[PyTree, PyTree], PyTree]:
    from jax_privacy import clipping

    return clipping.clipped_grad(loss_fn, l2_clip_norm=1.0, keep_batch_dim=False)


def their_gradient(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    jax.jit(_theirs(loss_fn)).lower(params, batch).compile()


def their_step(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    from jax_privacy import noise_addition

    run, adam = _theirs(loss_fn), optax.adam(1e-3)
    noise = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))

    def step(params: PyTree, moments: PyTree, state: PyTree, batch: PyTree) -> Any:
        noised, state = noise.update(run(params, batch), state)
        mean = jax.tree.map(lambda x: x / BATCH, noised)
        updates, moments = adam.update(mean, moments, params)
        return optax.apply_updates(params, updates), moments, state

    jax.jit(step).lower(params, adam.init(params), noise.init(params), batch).compile()


def step(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    run, inputs = one_step(loss_fn, optax.adam(1e-3), whole_batch(BATCH), params, batch)
    jax.jit(run).lower(*inputs).compile()


def first_step(params: PyTree, loss_fn: Callable, batch: PyTree) -> None:
    algorithm = dpsgd(loss_fn, optax.adam(1e-3))
    state = algorithm.init(jax.tree.map(jnp.array, params))
    root = RootKey.from_insecure_seed(0)
    for block in train_blocks(algorithm, whole_batch(BATCH), state, batch, root=root):
        jax.block_until_ready(block.state)


PROGRAMS = {
    "ordinary gradient": ordinary_gradient,
    "clipped gradient": gradient,
    "jax_privacy's clipped gradient": their_gradient,
    "step": step,
    "jax_privacy's step": their_step,
    "first step of training": first_step,
}
PAIRS = {
    "clipped gradient": "jax_privacy's clipped gradient",
    "step": "jax_privacy's step",
    "first step of training": "jax_privacy's step",
}


def one(model: str, program: str) -> float:
    """Returns the CPU seconds of a program that this process, which is fresh, compiles."""
    jax.config.update("jax_enable_compilation_cache", False)
    params, loss_fn, batch = MODELS[model]()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(1)))  # the compiler itself starts
    begin = time.process_time()
    PROGRAMS[program](params, loss_fn, batch)
    return time.process_time() - begin


def compiled(
    model: str, programs: tuple[str, ...] = tuple(PROGRAMS), *, rounds: int = 5
) -> Iterator[Row]:
    series = Series({program: [] for program in programs})
    for _ in range(rounds):
        for program, found in series.items():
            found.append(alone(one, model, program).value)
    for program in programs:
        yield figure(f"to compile, {model}: {program}", series.median(program), "s")
    for ours, theirs in PAIRS.items():
        if theirs in programs:
            name = f"to compile, {model}: {ours} / {theirs}"
            yield figure(name, series.ratio(ours, theirs), "x", at_most=BAR)


QUICK = {"programs": ("ordinary gradient", "clipped gradient"), "rounds": 1}
CASES = cases(compiled, over={"model": MODELS}, quick=QUICK, seconds=300)
