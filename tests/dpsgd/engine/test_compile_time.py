"""What is compiled for a step grows with its parameters no faster than it must."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from dpsgd.gradients.clipping import clipped_grad
from dpsgd.noise.gaussian import add_gaussian_noise
from dpsgd.packing import SMALL, join, packs, split

B = 4


def layers(count):
    """A chain of dense layers, each kernel of a norm of its own."""
    params = [np.ones((70, 70), np.float32) for _ in range(count)]

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return params, loss_fn, np.ones((B, 70), np.float32)


def instructions(count):
    params, loss_fn, batch = layers(count)
    run = jax.jit(
        clipped_grad(loss_fn, l2_clip_norm=1.0),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return run.lower(params, batch, np.ones(B)).compile().as_text().count(" = ")


@pytest.mark.long
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is CPUs' compiler that repeats")
def test_no_kernel_computes_the_norms_of_all_leaves_anew():
    assert instructions(10) < 2.5 * instructions(5)


def small_leaves(count):
    """Scales and shifts of several lengths, over a sequence."""
    params = {f"{name}{k}": np.ones(5 + k, np.float32) for k in range(count) for name in "ab"}

    def loss_fn(params, x):
        return sum(
            jnp.sum(jnp.sin(x[:, : 5 + k] * params[f"a{k}"] + params[f"b{k}"]))
            for k in range(count)
        )

    return params, loss_fn, np.ones((B, 3, 20), np.float32)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in core.jaxprs_in_params(eqn.params):
            yield from equations(getattr(body, "jaxpr", body))


@pytest.mark.parametrize("method", ["ghost", "vmap"])
def test_gradients_of_small_leaves_have_one_norm_together(method):
    params, loss_fn, batch = small_leaves(6)
    run = clipped_grad(loss_fn, l2_clip_norm=1.0, method=method)
    jaxpr = jax.make_jaxpr(run)(params, batch, np.ones(B)).jaxpr
    assert sum(eqn.params.get("name") == "norm" for eqn in equations(jaxpr)) == 1


@pytest.mark.long
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators fuse noise leaf by leaf")
def test_noise_of_small_leaves_is_one_block_cipher():
    sums = [np.zeros((3, k), np.float32) for k in range(1, 9)]
    arguments = sums, jnp.zeros(4, jnp.uint32), jnp.int32(0), jnp.float32(1)
    text = jax.jit(add_gaussian_noise).lower(*arguments).as_text()
    assert len(re.findall(r"stablehlo.multiply .*ui64>", text)) == 20  # two in each of ten rounds


@pytest.mark.long
def test_arrays_that_lie_side_by_side_come_apart_as_they_were():
    shapes = [(2, 3), (), (0, 4), (SMALL,), (5,)]
    arrays = [jnp.asarray(np.random.default_rng(k).normal(size=s)) for k, s in enumerate(shapes)]
    for got, array in zip(split(join(arrays), shapes), arrays, strict=True):
        assert got.shape == array.shape
        np.testing.assert_array_equal(got, array)
    assert packs({0: SMALL, 1: SMALL + 1, 2: 0}) == [[0, 2], [1]]
