"""Random models of common layers: each example contributes its clipped gradient."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpsgd import clipped_grad

B, T, D = 3, 4, 6


bounded = jax.custom_vjp(lambda x: x)
bounded.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def attention(p, h, e):
    q, k, v = (jnp.einsum("td,dnk->tnk", h, p(D, 2, 3)) for _ in range(3))
    scores = jnp.where(e["mask"], jnp.einsum("tnk,snk->nts", q, k), -jnp.inf)
    return jnp.einsum("nts,snk,nkd->td", jnp.nan_to_num(jax.nn.softmax(scores)), v, p(2, 3, D))


def convolved(h, w, layout="WIO", **options):
    options |= {"dimension_numbers": ("NWC", layout, "NWC")}
    return lax.conv_general_dilated(h[None], w, (1,), "SAME", **options)[0]


def normed(h):
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


# Functions of parameters p(*shape), activations h [T, D] and the example e.
BLOCKS = [
    attention,
    lambda p, h, e: h @ p(D, D) + p(D),
    lambda p, h, e: p(T, T) @ h - p(T, 1),
    lambda p, h, e: (normed(h.reshape(T, 2, 3)) * p(2, 3)).reshape(T, D) * p(D) - p(1, D),
    lambda p, h, e: h @ ((w := p(D, D)) / jnp.linalg.norm(w, axis=0) * p(D)),
    lambda p, h, e: lax.scan(lambda c, w: (jnp.sin(c @ w), None), h, p(3, D, D))[0],
    lambda p, h, e: jnp.sin(h @ (w := p(3, D, D))[0]) @ w[1] @ w[2],
    lambda p, h, e: lax.cond(h[0, 0] > 0, jnp.sin, jnp.log, h) * p(D),
    lambda p, h, e: convolved(h, w := p(3, D, D)) + convolved(h, w, "WOI", rhs_dilation=(2,)),
    lambda p, h, e: convolved(h, p(2, 3, D), feature_group_count=2),
    lambda p, h, e: convolved(h, jnp.sin(p(2, 2, D)), feature_group_count=3),
    lambda p, h, e: convolved(p(T, D), h[:, :, None] * h[0]),
    lambda p, h, e: jnp.einsum("td,sde,se->td", h, p(T, D, D), h) * jnp.diag(p(D, D)),
    lambda p, h, e: jnp.tanh(((t := p(8, D))[e["ids"]] + h) @ t.T) @ p(8, D),
    lambda p, h, e: h * ((t := p(8, D))[e["ids"]] - t[e["ids"][::-1] * 2 - 3]),
    lambda p, h, e: h[:1] @ (t := p(D, D)) + t[e["ids"] % D],
    lambda p, h, e: h + p(T, 8)[jnp.arange(T), e["ids"]][:, None] * p(8, D)[e["ids"], 1, None],
    lambda p, h, e: h + (w := p(2 * T, D))[:T] - w[T:] * w[2 : 2 + T],
    lambda p, h, e: h - jnp.broadcast_to(p(T, D)[:1], (T, D)) * p(T, 2, D)[:, 1],
    lambda p, h, e: h[:1] @ (w := p(D, D)) - h[1:2] @ w.T,
    lambda p, h, e: h * lax.dynamic_slice(p(9, 8), (e["n"], e["n"]), (T, D)) + p(8, D)[e["n"]],
    lambda p, h, e: jax.ops.segment_sum(h, e["ids"], T) + p(8, D).at[e["ids"]].add(h)[e["ids"]],
    lambda p, h, e: jnp.einsum("tk,tkd->td", (x := lax.top_k(h @ p(D, 8), 2))[0], p(8, D)[x[1]]),
    lambda p, h, e: jnp.sort(h @ p(D, D)) * jnp.sort(p(D)) + jnp.cumsum(p(D)),
    lambda p, h, e: jnp.fft.irfft(jnp.fft.rfft(h) * p(4), n=D),
    lambda p, h, e: jnp.abs((h + 1j) @ (p(D, D) + 1j * p(D, D))),
    lambda p, h, e: (h.astype("bfloat16") @ p(D, D).astype("bfloat16")).astype(h.dtype),
    lambda p, h, e: lax.stop_gradient(h @ p(D, D)) * (h @ p(D, D)) + h @ p(D, 2) @ p(2, D),
    lambda p, h, e: jax.checkpoint(lambda h, w: jnp.sin(jnp.sin(h @ w) @ w))(h, p(D, D)),
    lambda p, h, e: bounded(h @ p(D, D)) + bounded(p(D)),
    lambda p, h, e: h * p() - p(1, 1) / (2 + jnp.abs(p(T, 1))),
    lambda p, h, e: jnp.linalg.solve(p(D, D) + 4 * jnp.eye(D), h.T).T,
    lambda p, h, e: jax.vmap(lambda x, w: jnp.tanh(x @ w))(h, p(T, D, D)),
]


def random_model(seed):
    """Returns the shapes of parameters, filled in when the loss is evaluated, and the loss."""
    shapes = {}

    def loss_fn(params, e):
        draw, h, made = random.Random(seed), e["x"], []

        def p(*shape):
            """Returns a parameter of this shape, a new one or one that has been used."""
            name = str(shape)
            if name not in made or draw.random() < 0.5:
                made.append(name := name + "'" * sum(n.startswith(name) for n in made))
            shapes.setdefault(name, shape)
            return params[name] if params else jnp.zeros(shape)

        for block in [BLOCKS[seed % len(BLOCKS)], *draw.choices(BLOCKS, k=draw.randint(0, 2))]:
            h = draw.choice([1e-6, 1.0, 1.0, 1e6]) * block(p, h, e) + draw.choice([0, 1]) * h
        y = draw.choice([h * e["z"], (h - e["z"]) ** 2, jax.nn.logsumexp(h), jnp.abs(h)])
        return draw.choice([1e-30, 1e-9, 1.0, 1.0, 1e9, 1e30]) * jnp.sum(y)

    return shapes, loss_fn


def flat(tree, rows=1):
    leaves = [np.asarray(x, np.float64).reshape(rows, -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


def clipped(g, clip):
    return g * np.minimum(1, clip / max(np.linalg.norm(g), 1e-300))


@pytest.mark.long
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("seed", range(2 * len(BLOCKS)))
def test_models_of_all_blocks_are_clipped_as_by_definition(seed):
    rng, (shapes, loss_fn) = np.random.default_rng(seed), random_model(seed)
    e = {"x": rng.normal(size=(B, T, D)), "z": rng.normal(size=(B, T, D))}
    if seed % 3 == 1:  # pairs of positions, whose gradients cancel
        e["x"][:, 1::2], e["z"][:, 1::2] = e["x"][:, ::2], (2.0**-12 - 1) * e["z"][:, ::2]
    if seed % 3 == 2:
        e["z"] *= 10.0 ** rng.integers(-15, 15, (B, T, 1))
    e = jax.tree.map(np.float32, e) | {"mask": rng.random((B, T)) < 0.6}
    e |= {"ids": rng.integers(0, 8, (B, T)), "n": rng.integers(0, 6, B)}
    jax.eval_shape(loss_fn, {}, jax.tree.map(lambda x: x[0], e))
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    @jax.jit
    def run(e, weights, clip):
        run = clipped_grad(loss_fn, l2_clip_norm=clip, microbatch_size=B if seed % 4 else 1)
        return run(params, e, weights)[0]

    each = jax.vmap(jax.grad(loss_fn), (None, 0))
    narrow = flat(jax.jit(each)(params, e), B)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("f8") if x.dtype == "f4" else x, (params, e))
        exact = flat(jax.jit(each)(*wide), B)
    for i, one in enumerate(np.eye(B)):
        poisoned = {k: np.where(one[:, None, None] > 0, e[k], np.float32(np.nan)) for k in "xz"}
        norm = np.linalg.norm(exact[i]) if 1e-18 < np.linalg.norm(exact[i]) < 1e18 else 1.0
        for clip in np.float32([*norm * np.array([1e-3, 0.5, 1 - 1e-6, 1 + 1e-6]), 1e-20, 1e20]):
            alone = flat(run(e, one, clip))
            assert np.linalg.norm(alone) <= clip
            np.testing.assert_array_equal(flat(run(e | poisoned, one, clip)), alone)
            if np.abs(narrow[i]).max() < 1e36 and np.isfinite(exact[i]).all():
                ours, theirs = clipped(exact[i], clip), clipped(narrow[i], clip)
                error = 1e-2 * np.linalg.norm(ours) + 30 * np.linalg.norm(ours - theirs)
                assert np.linalg.norm(alone[0] - ours) <= error + 2.0**-100
    total = sum(flat(run(e, one, clip)) for one in np.eye(B))  # at the last clip norm
    np.testing.assert_allclose(flat(run(e, np.ones(B), clip)), total, rtol=0, atol=1e-5 * clip)
