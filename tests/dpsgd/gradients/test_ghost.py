"""The ghost method gives what one gradient per example gives, for any loss."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.losses import Keyed, row_loss
from dpsgd.gradients.memory import explain
from tests.dpsgd.methods import METHODS, loss_by

pytestmark = pytest.mark.usefixtures("unoptimised")

B = 6


# NumPy draws: JAX would compile a program for every shape.


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(seed, high, *shape):
    return np.random.default_rng(seed).integers(high, size=shape, dtype=np.int32)


def filled(shapes):
    """Returns parameters of the given shapes, as large as initializers make them."""
    leaves, treedef = jax.tree.flatten(shapes)
    drawn = [normal(k, *x.shape) / max(x.shape[0], 1) ** 0.5 for k, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, drawn)


def stateless(module):
    """Returns (params, function of params and inputs) of the nnx module that `module()` makes."""
    graph, shapes = nnx.split(nnx.eval_shape(module), nnx.Param)
    return filled(shapes), lambda params, *args: nnx.merge(graph, params)(*args)


# Each case: (params, loss_fn, batch, {part of a leaf's name: expected route}).


def ctr_mlp():
    """The papers' click model in small: a look-up of 26 rows of one table, some of them equal."""
    params = {
        "table": normal(0, 50, 4),
        "layers": [
            {"w": normal(k, m, n) / m**0.5, "b": normal(k + 9, n)}
            for k, (m, n) in enumerate([(109, 16), (16, 16), (16, 1)])
        ],
    }

    def loss_fn(params, example):
        x = jnp.concatenate([params["table"][example["ids"]].ravel(), example["dense"]])
        for layer in params["layers"][:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        last = params["layers"][-1]
        logit = (x @ last["w"] + last["b"])[0]
        return jax.nn.softplus(logit) - example["y"] * logit

    batch = {
        "ids": integers(1, 50, B, 26),
        "dense": normal(2, B, 5),
        "y": integers(3, 2, B),
    }
    return params, loss_fn, batch, {"table": "rows", "'w'": "outer", "'b'": "entries"}


class Block(nnx.Module):
    def __init__(self, tied, vocabulary, rngs):
        self.embed = nnx.Embed(vocabulary, 8, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.head = None if tied else nnx.Linear(8, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.embed.attend(x) if self.head is None else self.head(x)


def transformer(tied, length, vocabulary):
    params, apply = stateless(lambda: Block(tied, vocabulary, nnx.Rngs(0)))

    def loss_fn(params, tokens):
        logits = jax.nn.log_softmax(apply(params, tokens[:-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[1:, None], axis=1))

    long = length * (8 + vocabulary) >= 8 * vocabulary
    routes = {"embedding": ("entries" if long else "gram") if tied else "rows", "scale": "entries"}
    routes |= {"query']['kernel": "gram" if length == 3 else "entries"}
    return params, loss_fn, integers(4, vocabulary, B, length + 1), routes


class Convnet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x))
        x = nn.relu(nn.Conv(16, (3, 2), padding="VALID", kernel_dilation=(1, 2))(x))
        x = nn.relu(nn.Conv(16, (1, 1), feature_group_count=4)(x))
        return nn.Dense(3)(x.ravel())


def convnet():
    module = Convnet()
    params = filled(jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((8, 8, 2))))

    def loss_fn(params, example):
        image, label = example
        return -jax.nn.log_softmax(module.apply(params, image))[label]

    routes = {"Conv_0']['kernel": "entries", "Conv_1']['kernel": "gram", "Dense_0']['k": "outer"}
    return params, loss_fn, (normal(1, B, 8, 8, 2), integers(2, 3, B)), routes


def bags(count, mode):
    """Bags of words in a table shared by two look-ups; with `mode`, ids beyond the table occur."""
    params = {"table": normal(0, 20, 3), "w": normal(1, 3, 3)}

    def loss_fn(params, example):
        first = jnp.take(params["table"], example["a"], axis=0, mode=mode).sum(0)
        second = jnp.take(params["table"], example["b"], axis=0, mode=mode).mean(0)
        return jnp.nan_to_num(jnp.sum(jnp.tanh(first @ params["w"]) * second))

    high = 30 if mode == "clip" else 20
    batch = {"a": integers(2, high, B, count), "b": integers(3, high, B, 5)}
    return params, loss_fn, batch, {"table": "rows"}


def columns_and_pairs():
    """Look-ups along the second axis, along two axes, of one row, and of a block."""
    params = {
        "columns": normal(0, 3, 10),
        "pairs": normal(1, 4, 5, 3),
        "row": normal(2, 9, 4),
        "block": normal(3, 8, 8),
        "transposed": normal(4, 3, 10),
        "indexed": normal(5, 9, 4),
        "collapsed": normal(6, 9, 1, 4),
    }
    # Axis 1, of length one, is collapsed and not looked up.
    collapsing = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0,)
    )

    def loss_fn(params, x):
        i, j = x[:6], x[6:]
        parts = [
            params["columns"][:, i],
            params["pairs"][i % 4, j % 5],
            params["row"][i[0]],
            lax.dynamic_slice(params["block"], (i[0], j[0]), (3, 2)),
            params["transposed"].T[i],
            lax.dynamic_index_in_dim(params["indexed"], j[0], keepdims=False),
            lax.gather(params["collapsed"], j[:, None], collapsing, (1, 1, 4)),
        ]
        return sum(jnp.sum(jnp.sin((k + 1) * p) ** 2) for k, p in enumerate(parts))

    names = ["columns", "pairs", "row", "transposed", "indexed", "collapsed"]
    routes = dict.fromkeys(names, "rows")
    return params, loss_fn, integers(6, 9, B, 12), routes | {"block": "slice"}


def look_ups_in_views():
    """Look-ups of the same rows in a table and in views of it; the second takes half of the first.

    A sampled softmax over a tied table among them.
    """
    params = {
        "transposed": normal(0, 12, 5),
        "longer": normal(1, 12, 5),
        "pairs": normal(2, 4, 4, 3),
        "blocks": normal(3, 12, 4),
        "tied": normal(4, 30, 6),
    }

    def loss_fn(params, i):
        p, last = params, i[-1:]
        hidden = jnp.tanh(p["tied"][i].mean(0))
        parts = [
            p["transposed"][i] - 0.5 * p["transposed"].T[:, i].T,
            p["longer"][i] - 0.5 * p["longer"][None][0:1, i][0],
            p["pairs"][i % 4, i // 4] - 0.5 * p["pairs"].swapaxes(0, 1)[i // 4, i % 4],
            lax.dynamic_slice(p["blocks"], (last[0], 0), (1, 4))
            - 0.5 * lax.dynamic_slice(p["blocks"].T, (0, last[0]), (4, 1)).T,
            jax.nn.log_softmax(hidden @ p["tied"].T[:, i]),
        ]
        return sum(jnp.sum(jnp.sin(k + part)) for k, part in enumerate(parts))

    return params, loss_fn, integers(7, 12, B, 9), dict.fromkeys(params, "rows")


def parts_and_layouts():
    """What is alike in shape and is not the same entries: they are told apart."""
    params = {"entry": normal(0, 2), "kernel": normal(1, 3, 3, 3, 60), "square": normal(2, 20, 20)}

    def convolve(image, kernel, layout):
        layouts = ("NHWC", layout, "NHWC")
        return lax.conv_general_dilated(
            image[None], kernel, (1, 1), "VALID", dimension_numbers=layouts
        )

    def loss_fn(params, example):
        ids, image, x = example
        entry, kernel, square = params["entry"], params["kernel"], params["square"]
        turned = lax.reshape(square, (20, 20), dimensions=(1, 0))
        return (
            jnp.sum(entry[0:1][ids] - 0.5 * entry[1:2][ids])
            + jnp.sum(convolve(image, kernel, "HWIO") - 0.5 * convolve(image, kernel, "IHWO"))
            + jnp.dot(x[0], x[1] @ square - 0.5 * (x[1] @ turned))
        )

    batch = np.zeros((B, 3), np.int32), normal(3, B, 3, 3, 3), normal(4, B, 2, 20)
    return params, loss_fn, batch, dict.fromkeys(params, "entries")


def twice(length):
    """The same dense layer applied twice, once transposed, and a bias added twice."""
    params = {"w": normal(0, 12, 12) / 3, "b": normal(1, 12), "v": normal(2, 12, 12) / 3}

    def loss_fn(params, x):
        x = jnp.tanh(x @ params["w"] + params["b"])
        x = jnp.tanh(x @ params["w"] + params["b"])
        x = jnp.tanh(x @ params["v"])
        return jnp.sum(jnp.cos(x @ params["v"].T))

    route = "gram" if length < 3 else "entries"
    return params, loss_fn, normal(3, B, length, 12), {"w": route, "v": route, "b": "entries"}


def contractions():
    """Dense layers of several shapes: batch axes, several free axes, a swapped operand, views."""
    params = {
        "heads": normal(0, 3, 7, 5),
        "left": normal(1, 4, 9),
        "tensor": normal(2, 2, 7, 3, 2),
        "joined": normal(3, 7, 6),
        "sliced": normal(4, 12, 5),
        "overlapping": normal(5, 9, 5),
        "vector": normal(6, 7),
        "outer": normal(7, 4),
        "broadcast": normal(8, 7),
        "one": normal(9, 7, 1),
        "spread": normal(10, 7),
        "two": normal(11, 2, 7, 5),
    }

    def loss_fn(params, x):  # [3, 7]
        p = params
        parts = [
            jnp.einsum("hd,hdk->hk", x, p["heads"]),
            p["left"] @ jnp.tile(x, (3, 1)),
            jnp.einsum("hd,edfg->gehf", x, p["tensor"]),
            x @ p["joined"].reshape(7, 3, 2).transpose(1, 0, 2).reshape(3, 7, 2)[1],
            x[:, :5] @ p["sliced"][2:7] + x[:, 2:] @ p["sliced"][7:],
            x[:, :5] @ p["overlapping"][0:5] * (x[:, :5] @ p["overlapping"][4:9]),
            x @ p["vector"],
            jnp.outer(p["outer"], x[0]),
            x @ jnp.broadcast_to(p["broadcast"][:, None], (7, 4)),
            x @ p["one"],
            x[0] @ jnp.broadcast_to(p["spread"][:, None], (7, 4)),
            jnp.einsum("hd,hdk->hk", x[:2], p["two"]),
        ]
        return sum(jnp.sum(jnp.sin((k + 1) * q) ** 2) for k, q in enumerate(parts))

    return (
        params,
        loss_fn,
        normal(9, B, 3, 7),
        {"heads": "outer", "two": "outer", "spread": "entries"},
    )


def entrywise():
    """Sums, differences and products of entries, on either side, scalars among them."""
    params = {"a": normal(0, 3), "b": normal(1, 3), "c": normal(2, 4, 1), "s": np.float32(0.7)}

    def loss_fn(params, x):  # [4, 3]
        y = (params["a"] - x) * params["b"] + params["c"]
        y = (params["s"] * y - params["a"]) / params["s"]
        return jnp.sum(jnp.sin(y) - params["s"])

    return params, loss_fn, normal(3, B, 4, 3), {"a": "entries", "b": "entries", "s": "vmap"}


@jax.custom_jvp
def tripled_slope(x):
    return jnp.sin(x)


tripled_slope.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 3 * tangents[0]))


@jax.custom_vjp
def own_dense(x, w):
    return x @ w


own_dense.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, 5 * jnp.outer(saved[0], g))
)


def wrappers():
    """Layers in jit, in remat, in both, and functions with derivative rules of their own."""
    params = {k: normal(i, 6, 6) / 3 for i, k in enumerate(["jit", "remat", "both", "own", "jvp"])}
    params["table"] = normal(7, 11, 6)

    @jax.jit
    def dense(x, w):
        return tripled_slope(x @ w)

    remat = jax.checkpoint(dense, policy=jax.checkpoint_policies.nothing_saveable)

    def loss_fn(params, ids):
        x = jnp.take(params["table"], ids, axis=0).sum(0)
        x = dense(dense(x, params["jit"]), params["both"])
        x = remat(remat(x, params["remat"]), params["both"])
        x = own_dense(x, params["own"])
        return jnp.sum(jnp.tanh(x) @ tripled_slope(params["jvp"]))

    routes = {"jit": "outer", "remat": "outer", "both": "gram", "own": "vmap", "jvp": "vmap"}
    return params, jax.jit(loss_fn), integers(8, 11, B, 4), routes | {"table": "rows"}


def random_numbers():
    """Dropout of rows, positions and weights, noise of a learned size, in remat and in a loop."""
    params = {
        "table": normal(0, 9, 6),
        "positions": normal(1, 6, 5) / 2,
        "weights": normal(2, 5, 4) / 2,
        "size": normal(3, 4),
        "remat": normal(4, 4, 4) / 2,
        "loop": normal(5, 4, 4) / 2,
    }

    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)

    @jax.checkpoint
    def block(w, x, key):
        return x + jnp.tanh(dropped(key, x @ w))

    def loss_fn(params, ids, key):
        keys = jax.random.split(key, 6)
        x = dropped(keys[0], jnp.take(params["table"], ids, axis=0))
        x = dropped(keys[1], jnp.tanh(x @ params["positions"])).sum(0)
        x = x @ dropped(keys[2], params["weights"])
        x = block(params["remat"], x + params["size"] * jax.random.normal(keys[3], (4,)), keys[4])
        steps = jax.random.split(keys[5], 3)
        x = lax.scan(lambda x, k: (x + jnp.tanh(dropped(k, x) @ params["loop"]), None), x, steps)[0]
        return jnp.sum(x)

    routes = {"table": "rows", "positions": "entries", "weights": "vmap", "size": "entries"}
    routes |= {"remat": "outer", "loop": "vmap"}
    rows = Keyed(integers(6, 9, B, 3), jax.random.split(jax.random.key(7), B))
    return params, row_loss(loss_fn), rows, routes


def control_flow():
    """Branches and loops keep their parameters to themselves; the others are still tapped."""
    params = {"branch": normal(0, 4, 4), "loop": normal(1, 4, 4) / 2, "dense": normal(2, 4, 4)}

    def loss_fn(params, x):
        x = jnp.tanh(x @ params["dense"])
        x = lax.cond(x[0] > 0, lambda x: x @ params["branch"], lambda x: 2 * x, x)
        x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["loop"]), x)
        return jnp.sum(x)

    return params, loss_fn, normal(3, B, 4), {"branch": "vmap", "loop": "vmap", "dense": "outer"}


def degenerate():
    """Unused, empty, directly returned and nonlinearly used parameters."""
    params = {
        "unused": normal(0, 3),
        "empty": np.zeros((0, 3), np.float32),
        "loss": np.float32(2.0),
        "square": normal(1, 3),
        "stopped": normal(2, 3, 3),
        "product": normal(3, 3, 2),
        "other": normal(4, 2, 3),
    }

    def loss_fn(params, x):
        y = x @ lax.stop_gradient(params["stopped"])
        z = jnp.sum(params["square"] ** 2 * y) + jnp.sum(params["empty"])
        return params["loss"] + z + jnp.sum(x @ (params["product"] @ params["other"]))

    routes = {"unused": "frozen", "stopped": "frozen", "empty": "vmap", "loss": "entries"}
    routes |= {"product": "vmap"}
    return params, loss_fn, normal(5, B, 3), routes


CASES = {
    "ctr_mlp": ctr_mlp,
    "transformer_tied_short": functools.partial(transformer, True, 4, 40),
    "transformer_untied_long": functools.partial(transformer, False, 12, 10),
    "convnet": convnet,
    "bags_clip": functools.partial(bags, 9, "clip"),
    "bags_fill": functools.partial(bags, 9, "fill"),
    "bags_large": functools.partial(bags, 90, None),
    "columns_and_pairs": columns_and_pairs,
    "look_ups_in_views": look_ups_in_views,
    "parts_and_layouts": parts_and_layouts,
    "twice_without_sequence": functools.partial(twice, 1),
    "twice_with_sequence": functools.partial(twice, 9),
    "contractions": contractions,
    "entrywise": entrywise,
    "wrappers": wrappers,
    "random_numbers": random_numbers,
    "control_flow": control_flow,
    "degenerate": degenerate,
}


# What each has of its own is in another case, or in another test, too.
LONG = {
    "transformer_untied_long", "bags_fill", "bags_large", "twice_without_sequence",
    "random_numbers", "convnet", "look_ups_in_views", "parts_and_layouts", "wrappers",
    "transformer_tied_short",
}  # fmt: skip


def flat(tree, size):
    """Returns float64[size, d] of arrays with a leading axis, or of sums."""
    leaves = [np.asarray(x, np.float64).reshape(size, -1) for x in jax.tree.leaves(tree)]
    return np.concatenate([x for x in leaves if x.size], axis=1)


def without_others(batch, i):
    """Returns the batch with NaN and indices out of bounds in all rows but row `i`."""

    def poison(x):
        x = np.array(x)
        x[np.arange(B) != i] = np.nan if np.issubdtype(x.dtype, np.floating) else 2**31 - 1
        return x

    return jax.tree.map(lambda x: poison(x) if isinstance(x, np.ndarray) else x, batch)


@pytest.mark.short("[!c]*", "contractions", "control_flow*", "columns*")
@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=pytest.mark.long if c in LONG else ()) for c in CASES]
)
def test_contributions_equal_those_of_one_gradient_per_example(name):
    params, loss_fn, batch, routes = CASES[name]()
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), (None, 0)))(params, batch)
    losses, gradients = np.asarray(losses), flat(gradients, B)
    norm = np.linalg.norm(gradients, axis=1)
    assert (norm > 0).all()
    clip = np.float32(np.median(norm))
    expected = np.minimum(1, clip / norm)[:, None] * gradients

    run = jax.jit(clipped_grad(loss_fn, l2_clip_norm=clip))

    def masked(total):
        leaves = zip(jax.tree.leaves(params), jax.tree.leaves(total), strict=True)
        return flat([x for p, x in leaves if np.size(p)], 1)[0]

    for i in range(B):
        total, diagnostics = run(params, without_others(batch, i), np.eye(B, dtype=np.float32)[i])
        found = masked(total)
        assert np.linalg.norm(found) <= clip
        np.testing.assert_allclose(found, expected[i], rtol=0, atol=2e-6 * clip)
        np.testing.assert_allclose(diagnostics.loss_sum, losses[i], rtol=1e-6)
    weights = np.float32([1, 0, 1, 1, 0, 1])
    found = masked(run(params, batch, weights)[0])
    np.testing.assert_allclose(found, weights @ expected, rtol=0, atol=1e-5 * clip)

    *lines, _ = explain(loss_fn, params, jax.tree.map(lambda x: x[0], batch)).splitlines()
    assert len(lines) == len(jax.tree.leaves(params))
    for part, route in routes.items():
        chosen = {line.split("]  ")[-1].split()[0] for line in lines if part in line.split("  ")[0]}
        assert chosen == {route}, lines


def all_arrays(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from all_arrays(getattr(inner, "jaxpr", inner))


def test_tapped_parameter_forms_no_gradient_per_example():
    params, loss_fn, batch, _ = ctr_mlp()
    params = params | {"table": normal(0, 5000, 4)}
    run = clipped_grad(loss_fn, l2_clip_norm=1.0)
    shapes = [a.shape for a in all_arrays(jax.make_jaxpr(run)(params, batch, np.ones(B)).jaxpr)]
    assert len(shapes) > 100
    for leaf in [params["table"], params["layers"][0]["w"]]:
        assert not any(s[:1] == (B,) and np.prod(s) >= B * leaf.size for s in shapes)


def largest_contribution(loss_fn, params, batch, clip_norm):
    run = jax.jit(clipped_grad(loss_fn, l2_clip_norm=clip_norm))
    size = len(jax.tree.leaves(batch)[0])
    totals = [flat(run(params, batch, np.eye(size)[k])[0], 1) for k in range(size)]
    assert np.isfinite(totals).all()
    return max(map(np.linalg.norm, totals))


def difference_loss(params, x):
    """Two positions with opposite cotangents: what they contribute cancels if they are equal."""
    y = x @ params["w"]
    return 1e3 * jnp.dot(y[0] - y[1], jnp.sin(jnp.arange(64.0)))


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-7, 0.0])
def test_large_gradient_that_cancels_over_a_sequence_is_clipped(gap):
    params = {"w": normal(0, 64, 64)}
    x = np.array(normal(1, 8, 1, 64)).repeat(2, axis=1)
    x[:, 1] *= 1 + gap
    assert " gram " in explain(difference_loss, params, x[0])
    assert largest_contribution(difference_loss, params, x, 1.0) <= 1.0


def test_repeated_positions_that_nearly_cancel_stay_within_c():
    """Products of float32 would round alike for all pairs of these positions."""

    def loss_fn(w, example):
        return jnp.sum((example["x"] @ w) * example["g"])

    rng, pairs, size, width = np.random.default_rng(0), 56, 4, 256
    x = 1 + rng.random((size, 1, width))
    x = np.concatenate([x, x * (1 + 2.0**-11 * rng.standard_normal(x.shape))], axis=1)
    g = (1 + rng.random((size, 1, width))) * np.array([[1], [-1]])
    batch = {
        name: np.tile(a, (1, pairs, 1)).astype(np.float32) for name, a in {"x": x, "g": g}.items()
    }
    w = jnp.zeros((width, width))
    assert " gram " in explain(loss_fn, w, jax.tree.map(lambda a: a[0], batch))
    assert largest_contribution(loss_fn, w, batch, 1.0) <= 1.0


def test_roundings_of_sums_over_positions_stay_within_the_margin():
    """Additions that all round down: the norm must outweigh what remains where positions cancel."""

    def loss_fn(w, example):
        return jnp.sum((example["x"] @ w) * example["g"])

    half, width, u, x = 60, 256, 2.0**-24, np.full(2, 1.0165276)
    for _ in range(6):  # what the sum adds depends on the norm
        margin = 16 * u * (2 * half / 16) ** 2
        norm = width * np.sqrt(half**2 * (x[0] - x[1]) ** 2 + margin * half * (x @ x))
        mantissa = norm / 2.0 ** np.floor(np.log2(norm))
        target = float(np.float32(1 - 17 * u) / np.float32(mantissa))
        ulp = 2.0 ** (np.floor(np.log2(half * x[0] * target)) - 23)
        whole = np.floor(x[0] * target / ulp)
        x = ((whole + np.array([0.45, 0.55])) * ulp / target).astype(np.float32).astype(float)
    signs = np.array([1, -1])
    batch = {
        name: np.repeat(a, half)[None, :, None].repeat(width, 2).astype(np.float32)
        for name, a in {"x": x, "g": signs}.items()
    }
    contribution = largest_contribution(loss_fn, jnp.zeros((width, width)), batch, 1.0)
    # An error e across the gradient makes it sqrt(1 + e^2) as long: at most 1e-6 are left for it.
    assert abs(contribution - width * half * abs(x @ signs) / norm) <= 1.4e-3


@pytest.mark.parametrize("convolved", [False, True])
def test_cancelling_uses_at_far_scales_stay_within_c(convolved):
    """A cotangent near 2^127 would be cut off in the sum, and the other use's part would stay."""

    def apply(w, x):
        if convolved:
            return lax.conv_general_dilated(
                x.reshape(1, 16, 1),
                w[None],
                (1,),
                "VALID",
                (1,),
                dimension_numbers=("NCH", "HIO", "NCH"),
            )
        return x @ w

    def loss_fn(w, example):
        return jnp.sum(example["scale"] * apply(w, example["tiny"])) - jnp.sum(
            apply(w, example["x"])
        )

    scale = 2.0 ** np.array([126, 110], np.float32)
    batch = {"scale": scale, "tiny": np.ones((2, 16), np.float32) * (2 / scale)[:, None]}
    batch["x"] = np.full((2, 16), 2, np.float32)
    w = jnp.zeros((16, 16))
    assert " gram " in explain(loss_fn, w, jax.tree.map(lambda a: a[0], batch))
    assert largest_contribution(loss_fn, w, batch, 1e-3) <= 1e-3


def test_tiny_cotangents_of_huge_convolved_inputs_stay_within_c():
    """A cotangent below 2^-126 would be cut off, and another position's part would stay."""

    def loss_fn(w, example):
        numbers = "NHC", "HIO", "NHC"
        x = example["x"][None]
        y = lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=numbers)
        return jnp.sum(y[0] * example["g"])

    size, product = np.array([2.0**126, 2.0**100, 1]), np.array([2.0**30, 2.0**20, 2.0])
    x, g = (np.stack([x, y], axis=1) for x, y in ((size, size**0), (product / size, -product)))
    x[2, 1] = 2  # an ordinary example: what two positions give, does not cancel
    batch = {
        name: np.repeat(a[:, :, None], 16, 2).astype(np.float32)
        for name, a in {"x": x, "g": g}.items()
    }
    w = jnp.zeros((1, 16, 16))
    assert " gram " in explain(loss_fn, w, jax.tree.map(lambda a: a[0], batch))
    for clip_norm in (1.0, 1e-3):
        largest = largest_contribution(loss_fn, w, batch, clip_norm)
        assert clip_norm * (1 - 1e-5) < largest <= clip_norm


def test_unread_inputs_of_a_convolution_change_nothing():
    def loss_fn(w, x):
        y = lax.conv_general_dilated(
            x[None], w, (2,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.sum(y)

    x = np.ones((3, 4, 16), np.float32)
    x[:, 1] = np.array([np.nan, np.inf, 3e38])[:, None]
    w = jnp.zeros((1, 16, 16))
    assert " gram " in explain(loss_fn, w, x[0])
    totals = [clipped_grad(loss_fn, l2_clip_norm=1.0)(w, a[None], np.ones(1))[0] for a in x]
    for total in totals:
        np.testing.assert_allclose(total, np.full((1, 16, 16), 1 / 16), rtol=1e-5)


def test_cancelling_huge_cotangents_of_one_row_are_not_nan():
    def loss_fn(params, g):
        rows = params["table"][jnp.array([1, 1, 2])]
        return jnp.sum(rows * g[:, None])

    g = np.array([[2e38, -2e38, 1e-9], [3e38, 3e38, 0.0], [1.0, 2.0, 3.0]], np.float32)
    assert largest_contribution(loss_fn, {"table": np.zeros((5, 4), np.float32)}, g, 0.5) <= 0.5


def test_repeated_rows_that_cancel_in_a_view_stay_within_c():
    def loss_fn(params, example):
        ids, g = example
        return jnp.sum(params["table"].T[0, ids] * g)

    g = np.random.default_rng(0).uniform(1e10, 2e10, (4, 32)).astype(np.float32)
    g = np.concatenate([g, -g[:, ::-1]], axis=1)
    g[:, 0] = np.nextafter(g[:, 0], np.float32(np.inf))
    params, ids = {"table": np.zeros((4, 1), np.float32)}, np.zeros((4, 64), np.int32)
    assert largest_contribution(loss_fn, params, (ids, g), 1.0) <= 1.0


# Each mode with one dtype; the other three pairs are long.
MODES = [
    pytest.param(mode, dtype, marks=() if dtype is quick else pytest.mark.long)
    for mode, quick in [("clip", np.uint32), ("fill", np.int32), ("promise_in_bounds", np.uint32)]
    for dtype in (np.int32, np.uint32)
]


@pytest.mark.short("fill-int32")
@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_ids_of_all_sizes_find_the_rows_that_the_loss_finds(mode, dtype):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    turned = lax.GatherDimensionNumbers(
        offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,)
    )

    def loss_fn(params, ids):
        rows = lax.gather(params["a"], ids[:, None], numbers, (1, 3), mode=mode)
        columns = lax.gather(params["b"].T, ids[:, None], turned, (3, 1), mode=mode)
        return jnp.nansum(jnp.sin(rows)) + jnp.nansum(jnp.sin(columns))

    ids = [[0, 5], [5, 5]]
    if mode != "promise_in_bounds":
        ids += [[5, 2**31 - 1], [2**31 + 7, 5], [2**32 - 1, 0]]
    ids = np.array(ids, np.uint32).astype(dtype)
    params, ones = {"a": normal(0, 6, 3), "b": normal(1, 6, 3)}, np.ones(len(ids))
    ours, theirs = (
        jax.jit(clipped_grad(loss_by(method, loss_fn), l2_clip_norm=0.1))(params, ids, ones)[0]
        for method in METHODS
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-7), ours, theirs)


def test_half_precision_layers_are_summed_in_float32():
    params = {"w": normal(0, 40, 30).astype(jnp.bfloat16), "t": jnp.ones((9, 40), jnp.bfloat16)}

    def loss_fn(params, ids):
        return jnp.sum(jnp.sin(params["t"][ids] @ params["w"]).astype(jnp.float32))

    ids = integers(1, 9, 64)
    grads = jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(params, ids)
    grads = flat(grads, 64)
    norm = np.linalg.norm(grads, axis=1)
    clip = np.median(norm)
    total, _ = jax.jit(clipped_grad(loss_fn, l2_clip_norm=clip))(params, ids, np.ones(64))
    expected = np.minimum(1, clip / norm) @ grads
    assert total["w"].dtype == jnp.float32
    # One gradient per example is rounded to bfloat16, 8 bits; the ghost's is not.
    np.testing.assert_allclose(flat(total, 1)[0], expected, atol=2**-8 * np.abs(expected).max())


@pytest.mark.usefixtures("optimised")  # of the rest of the module: it stands last
def test_norm_and_sum_read_one_value_of_terms_that_cancel():
    """A compiler may fuse a b into its sum with -a b for one reader alone: 0, or the rounding."""

    def loss_fn(params, example):
        a, b, one, opposite, x = example
        cotangent = jax.lax.stop_gradient(a * b + one * opposite)
        beside = 1e-18 * jnp.sum((x @ params["v"]) * jax.lax.stop_gradient(a * b))
        return jnp.sum((x @ params["w"]) * cotangent) + beside

    rng = np.random.default_rng(0)
    a, b = (1 + 1e6 * rng.random((2, 4, 1, 16))).astype(np.float32)
    x = (0.5 + rng.random((4, 1, 16))).astype(np.float32)
    batch = a, b, np.ones_like(a), -(a * b), x
    params = {"w": jnp.zeros((16, 16)), "v": jnp.zeros((16, 16))}
    assert largest_contribution(loss_fn, params, batch, 1.0) <= 1.0


@pytest.mark.usefixtures("optimised")
def test_norm_and_sum_read_one_value_of_computed_rows():
    """A row's index, too: rows of other roundings would be added up in the norm and the sum."""

    def loss_fn(params, example):
        ids = jnp.floor(example["x"] * example["y"]).astype(jnp.int32)
        return jnp.sum(params["table"][ids] * example["g"])

    batch = {name: np.ones((2, 4), np.float32) for name in "xy"}
    batch["g"] = np.ones((2, 4, 8), np.float32)
    params = {"table": jnp.zeros((500, 8))}
    assert " rows " in explain(loss_fn, params, jax.tree.map(lambda a: a[0], batch))
    run = jax.jit(clipped_grad(loss_fn, l2_clip_norm=1.0)).lower(params, batch, np.ones(2))
    # Once for the loss's value, and once for the norm and the sum.
    assert run.compile().as_text().count(" floor(") <= 2
