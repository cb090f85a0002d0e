"""Clipping: no example contributes more than the clip norm, whatever its gradient holds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd import Diagnostics
from dpsgd.gradients import norms
from dpsgd.gradients.clipping import clipped_grad
from tests.dpsgd.methods import METHODS, loss_by

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim


def dense_loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["kernel"] + params["bias"])
    return params["scale"] * jnp.sum((hidden - example["y"]) ** 2)


# The arrays of tests are NumPy's: JAX would compile a program for each operation on each shape.


def dense_problem():
    """Parameters and eight examples."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"kernel": normal(5, 3), "bias": normal(3), "scale": np.float32(1.5)}
    return params, {"x": normal(8, 5), "y": normal(8, 3)}


@functools.cache
def dense_gradients():
    """The losses and gradients [8, d] of the dense problem in float64, one by one."""
    each = jax.jit(jax.vmap(jax.value_and_grad(dense_loss), (None, 0)))
    losses, grads = each(*dense_problem())
    flat = [np.asarray(g, np.float64).reshape(8, -1) for g in jax.tree.leaves(grads)]
    return np.asarray(losses), np.concatenate(flat, axis=1)


@functools.cache
def compiled_dense(method):
    def run(params, batch, weights, clip_norm):
        loss_fn = loss_by(method, dense_loss)
        return clipped_grad(loss_fn, l2_clip_norm=clip_norm)(params, batch, weights)

    return jax.jit(run)


def run_dense(method, batch, weights, clip_norm):
    """The clipped sum and the diagnostics of a batch of the dense problem."""
    weights, clip_norm = np.asarray(weights, np.float32), np.float32(clip_norm)
    return compiled_dense(method)(dense_problem()[0], batch, weights, clip_norm)


def flatten(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def value(*parts):
    norm = norms.norm([norms.square_sums(x) for x in parts])
    return norm.scale * norm.length


@pytest.mark.short("17", "4096", "3000001")
@pytest.mark.parametrize(
    "count", [1, 17, 4096, 3_000_001, pytest.param(20_000_003, marks=pytest.mark.long)]
)
def test_norm_of_millions_of_coordinates_has_two_roundings(count):
    # Equal terms, on which a plain float32 sum stagnates at 2^24, and random ones.
    for x in (np.full(count, 0.75, np.float32), np.random.default_rng(0).random(count, np.float32)):
        got = jax.jit(value)(x[None])
        exact = np.linalg.norm(x.astype(np.float64))
        assert abs(float(got[0]) / exact - 1) <= 2 * 2.0**-24


@jax.jit
def clip_rows(x, clip_norm):
    factor = norms.clip_factor(
        norms.norm([norms.square_sums(x)]), clip_norm, jnp.ones(len(x), bool)
    )
    return norms.contribution(factor, x)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_clipped_norm_is_within_the_margin_below_c(seed, log_scale):
    x = np.random.default_rng(seed).standard_cauchy((8, 300)).astype(np.float32)
    x *= np.float32(10.0**log_scale)
    got = np.linalg.norm(np.asarray(clip_rows(jnp.asarray(x), 1.0), np.float64), axis=1)
    assert (got <= 1.0 - 3 * 2.0**-24).all()
    clipped = np.linalg.norm(x.astype(np.float64), axis=1) > 1
    assert (got[clipped] >= 1.0 - 31 * 2.0**-24).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 3.0, np.inf])
def test_sum_and_counts_equal_the_definition(method, clip_norm):
    params, batch = dense_problem()
    losses, gradients = dense_gradients()
    norm = np.linalg.norm(gradients, axis=1)
    clipped = gradients * np.minimum(1, clip_norm / norm)[:, None]
    total, diagnostics = run_dense(method, batch, np.ones(8), clip_norm)
    np.testing.assert_allclose(
        flatten(total), clipped.sum(0), rtol=3e-6, atol=3e-6 * np.abs(clipped).max()
    )
    assert jax.tree.structure(total) == jax.tree.structure(params)
    assert isinstance(diagnostics, Diagnostics)
    np.testing.assert_allclose(diagnostics.loss_sum, losses.sum(), rtol=1e-6)
    assert diagnostics.clipped_count == (norm > clip_norm).sum()
    assert diagnostics.batch_size == 8


@pytest.mark.parametrize("method", METHODS)
def test_weight_counts_an_example_if_and_only_if_it_is_positive(method):
    _, batch = dense_problem()
    weird = run_dense(method, batch, [7.0, np.nan, -1.0, 1e-30, 0.0, -0.0, -np.inf, np.inf], 0.5)
    plain = run_dense(method, batch, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], 0.5)
    jax.tree.map(np.testing.assert_array_equal, weird, plain)


@pytest.mark.parametrize("method", METHODS)
def test_nonfinite_example_contributes_exactly_zero(method):
    _, batch = dense_problem()
    expected, _ = run_dense(method, batch, [1, 0, 1, 1, 1, 1, 1, 1], 0.5)
    for poison in (np.nan, np.inf):
        poisoned = batch | {"y": batch["y"].copy()}
        poisoned["y"][1] = poison
        total, diagnostics = run_dense(method, poisoned, np.ones(8), 0.5)
        jax.tree.map(np.testing.assert_array_equal, total, expected)
        assert (diagnostics.nonfinite_count, diagnostics.batch_size) == (1, 8)
        assert np.isfinite(diagnostics.loss_sum)


@pytest.mark.parametrize(
    ("params", "batch", "weights", "message"),
    [
        ({"w": jnp.zeros(3, int)}, np.ones((2, 3)), np.ones(2), r"params\['w'\] is int32"),
        ({}, np.ones((2, 3)), np.ones(2), "no arrays"),
        (
            {"w": jnp.zeros(3)},
            np.ones((3, 3)),
            np.ones(2),
            "shape \\[3, 3\\], but the leading axis",
        ),
        ({"w": jnp.zeros(3)}, np.ones((2, 3)), np.ones((2, 1)), "weights must have shape"),
        ({"w": jnp.zeros(3)}, np.ones((0, 3)), np.ones(0), "B >= 1"),
        ({"w": jnp.zeros((3, 2))}, np.ones((2, 3)), np.ones(2), "real floating-point scalar"),
    ],
)
def test_wrong_arguments_are_refused_with_one_clear_line(params, batch, weights, message):
    for clip_norm in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="l2_clip_norm must be positive"):
            clipped_grad(dense_loss, l2_clip_norm=clip_norm)
    with pytest.raises(ValueError, match="microbatch_size must be an integer >= 1"):
        clipped_grad(dense_loss, l2_clip_norm=1.0, microbatch_size=0)

    def loss_fn(params, example):
        return example @ params["w"]

    with pytest.raises(ValueError, match=message) as error:
        clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, weights)
    assert "\n" not in str(error.value)


def partly_constant(params, x):
    return jnp.dot(params, jnp.concatenate([x, jnp.ones(35)]))


def contracted_to_a_constant(params, x):
    return jnp.sum(x @ params)


def contracted_with_a_constant(params, x):
    return jnp.dot(jnp.ones(9) @ params, x) + jnp.dot(jnp.ones(5), params.T @ jnp.ones(9))


def contracted_and_looked_up(params, x):
    row = jax.lax.dynamic_slice(params, ((x[0] > 0).astype(int), 0), (1, 9))
    return jnp.sum(row) + 1e-3 * jnp.dot(jnp.resize(x, 9) @ params, jnp.resize(x, 9))


CONSTANTS = {
    partly_constant: (40,),
    contracted_to_a_constant: (5, 4),
    contracted_with_a_constant: (9, 5),
    contracted_and_looked_up: (9, 9),
}


@pytest.mark.short("1e+30-partly_constant-ghost", "1e-25-contracted_and_looked_up-*")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss_fn", CONSTANTS)
@pytest.mark.parametrize("constant", [1e-25, 1e30])
def test_constant_gradients_are_clipped_at_every_magnitude(constant, loss_fn, method):
    constant = np.float32(constant)
    run = jax.jit(
        clipped_grad(
            loss_by(method, lambda params, x: loss_fn(params, x) * constant),
            l2_clip_norm=float(constant) / 10,
        )
    )
    params, x = np.zeros(CONSTANTS[loss_fn], np.float32), np.full((1, 5), 0.7, np.float32)
    contribution = np.asarray(run(params, x, np.ones(1))[0], np.float64) / constant
    assert 0.09999 < np.linalg.norm(contribution) <= 0.1


@functools.cache
def with_tiny_leaf(method):
    """One program whatever the exponent, which the compiler does not know."""

    @jax.jit
    def run(params, x, scale, clip_norm):
        def loss_fn(params, example):
            x, scale = example
            dead = jnp.sum(jax.nn.relu(x @ params["dead"] - 100.0))
            tiny = jnp.sum(jnp.sin(params["tiny"]) * jnp.pad(x, (0, 40)) * scale)
            return jnp.dot(params["w"], x) + dead + tiny

        run = clipped_grad(loss_by(method, loss_fn), l2_clip_norm=clip_norm)
        return run(params, (x, jnp.full(len(x), scale)), jnp.ones(len(x)))

    return run


@pytest.mark.short("ghost-*")
@pytest.mark.parametrize("exponent", [-126, -101, -64, 0])
@pytest.mark.parametrize("method", METHODS)
def test_tiny_or_zero_leaf_takes_nothing_from_the_others(method, exponent):
    params = {
        "dead": np.zeros((5, 7), np.float32),
        "tiny": np.zeros(45, np.float32),
        "w": np.zeros(5, np.float32),
    }
    x = 1 + np.arange(15, dtype=np.float32).reshape(3, 5)
    for clip_norm in (1e3, 0.1):
        total, diagnostics = with_tiny_leaf(method)(
            params, x, np.float32(2.0**exponent), np.float32(clip_norm)
        )
        assert diagnostics.nonfinite_count == 0
        # In float64: the gradients are x in `w`, and 2^exponent x in `tiny`.
        norm = np.linalg.norm(x, axis=1) * np.hypot(1, 2.0**exponent)
        expected = (np.minimum(1, clip_norm / norm)[:, None] * x).sum(0)
        np.testing.assert_allclose(total["w"], expected, rtol=3e-6)
        # What is 2^-126 times an example's largest coordinate may flush to zero.
        expected *= 2.0**exponent
        np.testing.assert_allclose(total["tiny"][:5], expected, rtol=3e-6, atol=2.0**-120)


@pytest.mark.short("ghost")
@pytest.mark.parametrize("method", METHODS)
def test_the_norm_counts_small_leaves_and_large_ones_together(method):
    # Leaves above 2^12 coordinates lie by themselves, the others side by side.
    params = {"a": jnp.zeros(3), "b": jnp.zeros(5000), "c": jnp.zeros(2), "d": jnp.zeros(4500)}

    def loss_fn(p, x):
        return sum(x * w * jnp.sum(jnp.sin(p[k])) for k, w in zip("abcd", W, strict=True))

    W = 30.0, 0.1, 40.0, 0.2
    gradient = jax.jit(clipped_grad(loss_by(method, loss_fn), l2_clip_norm=0.5))
    total, _ = gradient(params, np.array([3.0], np.float32), np.ones(1))
    norm = np.sqrt(sum(w * w * params[name].size for name, w in zip("abcd", W, strict=True)))
    for name, weight in zip("abcd", W, strict=True):
        np.testing.assert_allclose(total[name], 0.5 * weight / norm, rtol=1e-5)
