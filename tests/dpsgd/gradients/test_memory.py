"""A microbatch takes no more memory than it may, and how large it is depends on shapes alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd import clipped_grad, explain
from dpsgd.gradients import memory

FAST_COMPILE = {"xla_backend_optimization_level": 0}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def look_ups_and_layers():
    params = {"table": normal(0, 500, 8), "w": normal(1, 80, 200) / 9, "b": jnp.zeros(200)}

    def loss_fn(params, ids):
        x = jnp.tanh(params["table"][ids].ravel() @ params["w"] + params["b"])
        return jnp.sum(jnp.sin(x))

    return params, loss_fn, np.random.default_rng(2).integers(500, size=(40, 10), dtype=np.int32)


@functools.cache
def without_a_rule():
    """A parameter whose gradients must all be formed."""
    params = {"scale": normal(0, 10_000)}

    def loss_fn(params, x):
        return jnp.sum(jnp.sin(jnp.cumsum(params["scale"])[:100] * x))

    return params, loss_fn, normal(1, 40, 100)


CASES = [look_ups_and_layers, without_a_rule]


def estimate(case):
    params, loss_fn, batch = case()
    return memory.bytes_per_example(loss_fn, params, batch[0])


BOUND = 2**24


def batch_beyond_the_bound(case):
    return 4 * BOUND // estimate(case)


@functools.cache
def temporary_bytes(case, batch_size, microbatch_size=None):
    """Temporary memory of the compiled program, which is not run."""
    params, loss_fn, batch = case()
    batch = jax.ShapeDtypeStruct((batch_size, *batch.shape[1:]), batch.dtype)
    weights = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
    run = clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=microbatch_size)
    program = jax.jit(run, compiler_options=FAST_COMPILE).lower(params, batch, weights).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.short("without_a_rule*")
@pytest.mark.parametrize("case", CASES)
def test_a_large_batch_keeps_within_the_bound_without_being_told(case, monkeypatch):
    monkeypatch.setattr(memory, "MICROBATCH_BYTES", BOUND)
    size = batch_beyond_the_bound(case)
    batch_bytes = size * 4 * case()[2][0].size  # the batch itself, cut into microbatches
    cut = temporary_bytes(case, size)
    assert cut < 1.5 * BOUND + 2 * batch_bytes
    assert temporary_bytes(case, size, size) > 1.5 * cut


def test_a_cpu_holds_a_large_batch_one_microbatch_at_a_time():
    size = 4 * memory.CACHED_EXAMPLES
    whole = temporary_bytes(look_ups_and_layers, size, size)
    assert temporary_bytes(look_ups_and_layers, size) < whole / 2


def test_an_example_beyond_the_bound_is_taken_alone():
    assert memory.microbatch_size(64, memory.MICROBATCH_BYTES + 1) == 1
    assert memory.microbatch_size(40, memory.MICROBATCH_BYTES // 9) == 8  # five, of 9 at most


def test_explain_states_leaf_memory_and_microbatch_size():
    params, loss_fn, batch = without_a_rule()
    leaf, last = explain(loss_fn, params, batch[0]).splitlines()
    assert leaf == "['scale']  [10000]  vmap  78.12 KiB  used by cumsum, which has no rule"
    example_bytes = estimate(without_a_rule)
    most = memory.microbatch_size(2**31, example_bytes)
    assert 0.99 < most * example_bytes / memory.MICROBATCH_BYTES <= 1
    assert last.endswith(f"up to {most} examples together")
