"""Random losses that use one parameter several times, each time through views of its own.

Where the ghost method adds up what several uses do to a parameter, it must know which entries each
of them sees. One in the short suite, 1,000 in the long one; those that have been wrong are
cases of `test_ghost`.
"""

from __future__ import annotations

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpsgd import clipped_grad, explain
from tests.dpsgd.methods import loss_by

pytestmark = pytest.mark.usefixtures("unoptimised")

B = 2
CLIP = 0.5


def view(x, draw):
    """Returns `x`, or part of it, in another layout."""
    kind = draw.choice([*["transpose", "expand", "squeeze"] * 3, "reshape", "turn", "slice"])
    axes = list(range(x.ndim))
    if kind == "transpose":
        return x.transpose(draw.sample(axes, x.ndim))
    if kind == "reshape":
        sizes = [n for n in x.shape if n != 1]
        cut = draw.randint(0, len(sizes))
        return x.reshape(draw.choice([sizes[::-1], [math.prod(sizes[:cut]), *sizes[cut:]]]))
    if kind == "turn":
        return lax.reshape(x, x.shape, dimensions=tuple(draw.sample(axes, x.ndim)))
    if kind == "expand":
        return jnp.expand_dims(x, draw.randint(0, x.ndim))
    if kind == "squeeze":
        return x.squeeze()
    if kind == "slice" and x.ndim:
        axis = draw.choice(axes)
        begin = draw.randint(0, x.shape[axis] - 1)
        end = draw.randint(begin + 1, x.shape[axis])
        return lax.slice_in_dim(x, begin, end, draw.choice([1, 1, 2]), axis)
    return x


# Uses are combined if all are contractions, or look-ups, or both: most losses have one kind.
KINDS = [["dot"], ["take"], ["take", "pick", "block"], ["dot", "take"], ["convolve"]]
KINDS += [["dot", "take", "times", "convolve"]]


def use(x, example, kinds, draw):
    """Returns what a random operation, linear in `x`, makes of it."""
    kind = draw.choice(kinds)
    if not x.ndim or kind == "times":
        return x * jnp.resize(example["x"], x.shape)
    axis = draw.randrange(x.ndim)
    if kind == "dot":
        mine = draw.sample(range(x.ndim), draw.randint(1, x.ndim))
        batch = mine[: draw.choice([0, 0, 1])]
        shape = (*(x.shape[k] for k in mine), *draw.choice([(), (), (2,)]))
        other = jnp.resize(example["x"], shape)
        theirs = list(range(len(mine)))
        sides = [(mine[len(batch) :], theirs[len(batch) :]), (batch, theirs[: len(batch)])]
        if draw.random() < 0.5:
            return lax.dot_general(x, other, sides)
        return lax.dot_general(other, x, [pair[::-1] for pair in sides])
    if kind == "take":
        return jnp.take(x, example["i"] % x.shape[axis], axis=axis)
    if kind == "pick" and x.ndim > 1:
        i, j = (example["i"] % x.shape[k] for k in (0, 1))
        return x[i, j]
    if kind == "block":
        starts = [example["i"][0] if k == axis else 0 for k in range(x.ndim)]
        return lax.dynamic_slice(x, starts, [1 if k == axis else n for k, n in enumerate(x.shape)])
    if kind == "convolve" and x.ndim == 3:
        spec = draw.choice(list(itertools.permutations("WIO")))
        size = dict(zip(spec, x.shape, strict=True))
        image = jnp.resize(example["x"], (1, size["W"] + 1, size["I"]))
        layouts = ("NWC", "".join(spec), "NWC")
        return lax.conv_general_dilated(image, x, (1,), "VALID", dimension_numbers=layouts)
    return x + jnp.resize(example["x"], x.shape)


def random_loss(seed):
    """Returns (params, loss_fn): up to three uses, some of them of one view, jitted or not."""
    start, kinds = random.Random(seed), KINDS[seed % len(KINDS)]
    count = start.choice([1, 2, 2, 3])
    rank = 3 if kinds == ["convolve"] else start.choice([1, 2, 2, 3, 3, 4])
    shape = [start.choice([1, 6, 6, 6, 8]) for _ in range(rank)]

    def loss_fn(params, example):
        draw, total, views = random.Random(seed), 0.0, [params["w"]]
        for k in range(count):
            x = draw.choice(views)
            for _ in range(draw.choice([0, 0, 1, 2, 3])):
                x = view(x, draw)
                views.append(x)
            apply = draw.choice([lambda f: f, jax.jit, jax.checkpoint])
            y = apply(lambda x, example, draw=draw: use(x, example, kinds, draw))(x, example)
            # The uses after the first take back half of what they have in common with it.
            total += (-0.5) ** min(k, 1) * jnp.sum(y * jnp.resize(example["g"], y.shape))
        return total

    return {"w": jnp.zeros(shape)}, loss_fn


def batch_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.uniform(1, 2, (B, 7)).astype(np.float32),
        "g": rng.uniform(1, 2, (B, 5)).astype(np.float32),
        "i": rng.integers(0, 60, (B, 4)).astype(np.int32),
    }


def combined():
    """Yields random losses that form no gradient per example, the others being right by definition.

    As (what `explain` says, params, loss_fn, batch).
    """
    for seed in itertools.count():
        params, loss_fn = random_loss(seed)
        batch = batch_of(seed)
        how = explain(loss_fn, params, jax.tree.map(lambda x: x[0], batch))
        _, _, route, *_ = how.split("  ")
        if route not in ("entries", "vmap", "unused"):
            yield f"seed {seed}: {how}", params, loss_fn, batch


def check(how, params, loss_fn, batch):
    def contributions(method):
        run = jax.jit(clipped_grad(loss_by(method, loss_fn), l2_clip_norm=CLIP))
        return [np.asarray(run(params, batch, alone)[0]["w"], np.float64) for alone in np.eye(B)]

    for ghost, vmap in zip(contributions("ghost"), contributions("vmap"), strict=True):
        assert np.linalg.norm(ghost) <= CLIP, how
        np.testing.assert_allclose(ghost, vmap, rtol=0, atol=2e-5 * CLIP, err_msg=how)


@pytest.mark.short("1")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [1, 1000])
def test_random_losses_are_clipped_as_by_definition(count):
    for case in itertools.islice(combined(), count):
        check(*case)
