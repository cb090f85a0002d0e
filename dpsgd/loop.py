"""The training loop: blocks of steps as one compiled program, batches drawn in the background."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.algorithm import Algorithm, Scales, TrainState
from dpsgd.clipping import Diagnostics
from dpsgd.keys import RootKey
from dpsgd.modules import refuse_batch_statistics
from samplers import BatchSampler, BatchSource

PyTree = Any


class BlockPlan(NamedTuple):
    """Who takes part in a block of consecutive steps: fixed shapes, whatever the batch sizes.

    Step j of the block is the passes `starts[j] : starts[j + 1]`. Most samplers need one pass a
    step; a batch larger than one pass is summed over several before its single noisy update.
    """

    indices: Any  # int32[passes, max_batch_size]
    weights: Any  # float32[passes, max_batch_size]
    starts: Any  # int32[block_steps + 1]
    num_steps: Any  # int32 scalar: steps of the block that are real


class Block(NamedTuple):
    """What one block of steps left behind.

    `state` is donated to the next block: copy what must outlive the iteration before advancing it.
    """

    state: TrainState
    first_step: int
    diagnostics: Diagnostics
    """Per step, NumPy float32[steps]. NOT covered by the guarantee."""


def plan_blocks(
    source: BatchSource, *, first_step: int, block_steps: int
) -> Iterator[tuple[int, BlockPlan]]:
    """Yields (first step, plan) of every block from `first_step` to the sampler's last step."""
    sampler = source.sampler
    step = first_step
    while step < sampler.num_steps:
        wanted = min(block_steps, sampler.num_steps - step)
        passes: list = []
        starts = [0]
        for t in range(step, step + wanted):
            batch = source.passes(t)
            if passes and len(passes) + len(batch) > block_steps:
                break  # an accumulated batch does not fit: it opens the next block
            passes += batch
            starts.append(len(passes))
        done = len(starts) - 1
        # Shapes stay those of a full block, so that the whole run is one compiled program. Only a
        # single batch of more passes than a block has steps needs more room (and a recompilation).
        room = max(block_steps, len(passes))
        indices = np.zeros((room, sampler.max_batch_size), np.int32)
        weights = np.zeros((room, sampler.max_batch_size), np.float32)
        for row, batch in enumerate(passes):
            indices[row], weights[row] = batch.indices, batch.weights
        starts += [len(passes)] * (block_steps - done)
        yield step, BlockPlan(indices, weights, np.asarray(starts, np.int32), np.int32(done))
        step += done


def _compile_block(algorithm: Algorithm):
    """Returns the jitted (state, data, plan, noise_key, scales) -> (state, diagnostics).

    It is kept with the algorithm, by all that it is made of.
    """
    sampler = algorithm.mechanism.sampler
    parts = algorithm.clipped_sum, algorithm.update, sampler.accumulates, sampler.clipped_shape
    if parts not in algorithm.programs:
        run_block = functools.partial(_run_block, *parts)
        algorithm.programs[parts] = jax.jit(run_block, donate_argnums=0)
    return algorithm.programs[parts]


def _run_block(
    clipped_sum: Callable,
    update: Callable,
    accumulates: bool,
    clipped_shape: tuple[int, ...],
    state: TrainState,
    data: PyTree,
    plan: BlockPlan,
    noise_key: Any,
    scales: Scales,
) -> tuple[TrainState, Diagnostics]:
    def batch_sum(params, row):
        indices = plan.indices[row].reshape(-1, *clipped_shape)
        weights = plan.weights[row].reshape(indices.shape[0], -1).max(axis=1)
        batch = jax.tree.map(lambda column: column[indices], data)
        return clipped_sum(params, batch, weights, scales)

    def step_sum(params, j):
        if not accumulates:
            return batch_sum(params, j)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(batch_sum, params, jnp.int32(0)),
        )

        def add(row, total):
            return jax.tree.map(jnp.add, total, batch_sum(params, row))

        return jax.lax.fori_loop(plan.starts[j], plan.starts[j + 1], add, zeros)

    def one_step(j, carry):
        state, log = carry
        total, diagnostics = step_sum(state.params, j)
        state = update(state, total, noise_key, scales)
        return state, jax.tree.map(lambda column, x: column.at[j].set(x), log, diagnostics)

    block_steps = plan.starts.shape[0] - 1
    log = Diagnostics(*(jnp.zeros(block_steps, jnp.float32) for _ in Diagnostics._fields))
    # A dynamic trip count: a last, shorter block runs in the same program, without idle steps.
    return jax.lax.fori_loop(0, plan.num_steps, one_step, (state, log))


def train_blocks(
    algorithm: Algorithm,
    state: TrainState,
    data: PyTree,
    *,
    root: RootKey,
    generation: int = 0,
    block_steps: int = 64,
    declare: Callable[[range], None] = lambda steps: None,
) -> Iterator[Block]:
    """Runs `algorithm` from `state` to its sampler's last step, yielding after every block.

    The data lie on the device and only indices and weights travel; while one block computes, a
    background thread draws the batches of the next.

    Args:
      algorithm: From `dpsgd`; its mechanism names the sampler, sigma and C.
      state: From `algorithm.init`, or a later one to continue from. Donated.
      data: Pytree of arrays with one leading row per example, [num_examples, ...].
      root: Secret from which the sampling and the noise streams derive.
      generation: Which continuation of the run this is; another one means other randomness.
      block_steps: Steps per dispatch.
      declare: Called with the steps of each block before any of its noise exists; the block runs
        only when it has returned.

    Raises:
      ValueError: if the data have not exactly the sampler's number of examples, or the parameters
        hold batch statistics.
    """
    mechanism = algorithm.mechanism
    check_num_examples(mechanism.sampler, data)
    refuse_batch_statistics(state.params)
    source = BatchSource(mechanism.sampler, root.sampling_seed(generation))
    run_block = _compile_block(algorithm)
    data = jax.device_put(data)
    noise_key = jnp.asarray(root.noise_key(generation))
    scales = mechanism.scales()
    # One program for a state that was just made and for one that was read back: no weak types.
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
    plans = plan_blocks(source, first_step=int(state.step), block_steps=block_steps)
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as background:
        drawn = background.submit(next, plans, None)
        while (planned := drawn.result()) is not None:
            drawn = background.submit(next, plans, None)
            first_step, plan = planned
            declare(range(first_step, first_step + int(plan.num_steps)))
            state, log = run_block(state, data, plan, noise_key, scales)
            diagnostics = jax.tree.map(np.asarray, log)
            done = slice(int(plan.num_steps))
            yield Block(state, first_step, Diagnostics(*(column[done] for column in diagnostics)))


def check_num_examples(sampler: BatchSampler, data: PyTree) -> None:
    """Raises ValueError unless each array of `data` has one row per example of the sampler."""
    for path, column in jax.tree_util.tree_leaves_with_path(data):
        if column.shape[0] != sampler.num_examples:
            raise ValueError(
                f"data{jax.tree_util.keystr(path)} has {column.shape[0]} rows, but the sampler "
                f"was built for num_examples={sampler.num_examples}: its guarantee is for those"
            )


def train(
    algorithm: Algorithm,
    params: PyTree,
    data: PyTree,
    *,
    root: RootKey | None = None,
    block_steps: int = 64,
) -> PyTree:
    """Trains from `params` through every step of the mechanism's sampler; returns the parameters.

    Args:
      algorithm: From `dpsgd`.
      params: Initial parameters; they must not depend on the private data.
      data: Pytree of arrays with one leading row per example.
      root: Secret of the run; by default fresh from the operating system's entropy.
      block_steps: Steps per dispatch.
    """
    # The first block donates its input: hand it a copy, so that the caller's parameters survive.
    state = algorithm.init(jax.tree.map(jnp.array, params))
    root = RootKey.from_entropy() if root is None else root
    for block in train_blocks(algorithm, state, data, root=root, block_steps=block_steps):
        state = block.state
    return state.params
