"""Clipping under floats of all kinds: 10,000 cases in the long suite, 80 in the short one."""

from __future__ import annotations

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpsgd.gradients.clipping import clipped_grad
from tests.dpsgd.methods import METHODS, loss_by

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

B, D, M, N = 3, 5, 2, 9
FLOATS = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}


def linear(params, example):
    """The gradient is the example itself, in the parameters' type, in leaves of every rank."""
    example = example.astype(params["vector"].dtype)
    return (
        jnp.dot(params["vector"], example[:D])
        + jnp.sum(params["matrix"] * example[D : D + 2 * M].reshape(2, M))
        + params["scalar"] * example[-1]
    )


def dense(params, example):
    """The gradients of kernel and bias are x y^T and y."""
    x, y = example[:D], example[D : D + M]
    return jnp.dot(x @ params["kernel"] + params["bias"], y)


def sequence(params, example):
    """The gradient of the matrix is x_1 y_1^T + x_2 y_2^T, from its Gram product."""
    x, y = example.reshape(2, 2, N)
    return jnp.sum((x @ params["matrix"]) * y)


LOSSES = {
    "linear": (linear, {"vector": (D,), "matrix": (2, M), "scalar": ()}, D + 2 * M + 1),
    "dense": (dense, {"kernel": (D, M), "bias": (M,)}, D + M),
    "sequence": (sequence, {"matrix": (N, N)}, 4 * N),
}


def exact_gradient(loss, dtype, example):
    """The gradient in float64, as {leaf: array}; rounded to half precision where that is taken."""
    if loss == "linear":
        with np.errstate(over="ignore"):
            wide = np.asarray(jnp.asarray(example).astype(FLOATS[dtype]), np.float64)
        matrix = wide[D : D + 2 * M].reshape(2, M)
        return {"vector": wide[:D], "matrix": matrix, "scalar": wide[-1]}
    if loss == "sequence":
        x, y = example.astype(np.float64).reshape(2, 2, N)
        with np.errstate(invalid="ignore"):
            return {"matrix": x.T @ y}
    x, y = example[:D].astype(np.float64), example[D:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return {"kernel": np.outer(x, y), "bias": y}


def flat(tree):
    return np.concatenate([np.ravel(tree[name]).astype(np.float64) for name in sorted(tree)])


@functools.cache
def compiled(loss, dtype, method):
    loss_fn, shapes, _ = LOSSES[loss]
    params = {name: jnp.zeros(shape, FLOATS[dtype]) for name, shape in shapes.items()}

    def run(batch, weights, clip_norm):
        gradient = clipped_grad(loss_by(method, loss_fn), l2_clip_norm=clip_norm)
        return gradient(params, batch, weights)

    return jax.jit(run)


EDGES = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-41, 1e-38, 6e-8, 1.0, -1.0, 65504.0, 65520.0, 1e19, 1e30, 3e38, -3e38,
     np.inf, -np.inf, np.nan]
)  # fmt: skip
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
FINITE = st.floats(-100, 100, width=32)


@st.composite
def cases(draw):
    loss, dtype = draw(
        st.sampled_from([("linear", d) for d in FLOATS] + [("linear", "float32")])
        | st.sampled_from([("dense", "float32"), ("sequence", "float32")])
    )
    elements = draw(st.sampled_from([FINITE, EDGES | FINITE, EDGES | ANY, ANY]))
    batch = draw(hnp.arrays(np.float32, (B, LOSSES[loss][2]), elements=elements, fill=st.nothing()))
    weights = draw(hnp.arrays(np.float32, B, elements=st.sampled_from([0.0, 1.0, 1.0])))
    method = draw(st.sampled_from(METHODS))
    clip = np.float32(draw(st.floats(1, 2, width=32)) * 2.0 ** draw(st.integers(-100, 120)))
    return loss, dtype, method, batch, weights, clip


def check(case):
    loss, dtype, method, batch, weights, clip = case
    run, together = compiled(loss, dtype, method), np.zeros(1)
    for i in range(B):
        alone, diagnostics = run(batch, weights * (np.arange(B) == i), clip)
        got = flat(alone)
        together = together + got
        exact = flat(exact_gradient(loss, dtype, batch[i]))
        largest = np.abs(exact).max()
        scale = largest  # of the terms that are added
        if loss == "sequence":
            x, y = np.linalg.norm(batch[i].astype(np.float64).reshape(2, 2, N), axis=2)
            scale = np.hypot(*(x * y)) if np.isfinite(largest) else np.inf
        if not weights[i] or not np.isfinite(scale):
            assert not got.any()
            assert diagnostics.nonfinite_count == (1 if weights[i] else 0)
            continue
        assert np.linalg.norm(got) <= clip
        # Beyond 2^125 an outer product may overflow, and the example is left out; "ghost", which
        # forms no gradient, may clip one that float32 could not hold.
        if loss != "linear" and scale >= 2.0**125 and not got.any():
            continue
        if largest < scale / 100:  # terms cancel, and the margin for it shows
            continue
        scaled = exact / largest if largest > 0 else exact
        norm = np.linalg.norm(scaled)
        expected = scaled * min(largest, float(clip) / norm if norm > 0 else np.inf)
        # Numbers below 2^-126 times the largest one, and subnormal ones, may flush to zero, also
        # one factor of a product.
        factor = max(1.0, np.abs(batch[i]).max()) if loss != "linear" else 1.0
        tolerance = 2e-6 * np.abs(expected).max() + 2.0**-125 * factor
        if loss == "sequence":
            tolerance += 1e-4 * np.abs(expected).max() * scale / largest
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    total, _ = run(batch, weights, clip)
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {np.dtype("f4")}
    np.testing.assert_allclose(flat(total), together, rtol=0, atol=B * 2.0**-22 * clip)


@pytest.mark.short("*-dense-*", "*-float16-*", "vmap-linear-float32-1.0")
@pytest.mark.parametrize(
    ("loss", "dtype", "size"),
    [
        ("linear", "float32", 1.0),
        ("dense", "float32", 1.0),
        ("linear", "bfloat16", 1.0),
        ("linear", "float16", 1e-7),  # whose norm underflows in 16 bits
        ("linear", "float16", 1e4),  # or overflows
    ],
)
@pytest.mark.parametrize("method", ["ghost", "vmap"])
def test_gradient_with_a_norm_next_to_c_stays_within_c(method, loss, dtype, size):
    """Norms are 2^-1, ..., 2^-23 of C below and above it."""
    batch = np.random.default_rng(0).normal(size=(B, LOSSES[loss][2]))
    batch, ones = (batch * size).astype(np.float32), np.ones(B, np.float32)
    norm = np.linalg.norm(flat(exact_gradient(loss, dtype, batch[0])))
    for part in (s * 2.0**-k for k in range(1, 24, 2) for s in (-1, 1)):
        check((loss, dtype, method, batch, ones, np.float32(norm / (1 + part))))


@pytest.mark.parametrize("method", ["ghost", "vmap"])
@pytest.mark.parametrize("huge", [(3e38, 0), (1e-3, 3e38), (3e38, 3e38)])
def test_entries_next_to_the_largest_float_are_clipped(huge, method):
    for loss in LOSSES:
        size = LOSSES[loss][2]
        batch = np.full((B, size), 0.25, np.float32)
        batch[:, [0, size - 1]] = huge
        check((loss, "float32", method, batch, np.ones(B, np.float32), np.float32(1.0)))


@settings(max_examples=80)
@given(cases())
def test_every_contribution_is_its_clipped_gradient_or_nothing(case):
    check(case)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(cases())
def test_10000_contributions_are_clipped_gradients_or_zero(case):
    check(case)
