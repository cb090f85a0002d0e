"""Losses that compute in bfloat16: norm and sum of an example's gradient read the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.frozen import RunLoss
from tests.dpsgd.methods import METHODS, loss_by

RNG = np.random.default_rng(0)
PARAMS = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in {
        "table": (50, 8), "kernel": (16, 12), "bias": (12,), "scale": (12,), "out": (12, 2),
        "filter": (3, 1, 4), "mix": (4, 9),
    }.items()
}  # fmt: skip
ROWS = {
    "ids": RNG.integers(0, 50, (16, 2)).astype(np.int32),
    "y": RNG.normal(size=(16, 2)).astype(np.float32),
}


def net(params, example, cast=lambda x: x):
    """Look-ups, a layer and its bias, a leaf without a rule, a convolution, a sequence."""
    x = cast(params["table"])[example["ids"]].reshape(-1)
    hidden = jnp.tanh(x @ cast(params["kernel"]) + cast(params["bias"]))
    hidden = hidden * jnp.cumsum(cast(params["scale"]))
    windows = jax.lax.conv_general_dilated(
        hidden.reshape(1, 12, 1), cast(params["filter"]), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]  # fmt: skip
    mixed = jnp.sin(windows @ cast(params["mix"])).sum()
    logits = (hidden @ cast(params["out"]) + mixed).astype(jnp.float32)
    return jnp.sum(jnp.square(logits - example["y"]))


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(
    lambda x: (x, None), lambda _, g: ((g.astype(jnp.bfloat16) * 1.7).astype(jnp.float32),)
)
LOSSES = {
    "parameters": RunLoss.restrict(net, None, "bfloat16"),
    "activations": lambda params, example: net(params, example, lambda x: x.astype(jnp.bfloat16)),
    "derivatives": lambda params, example: net(jax.tree.map(halved, params), example),
}


INLINED = {"convert_element_type", "reshape", "transpose", "squeeze", "slice", "concatenate"}
"""What compilers compute anew for each reader."""


def read_anew(closed, arguments, draw):
    """Evaluates a program in which each reader sees a neighbour of what was rounded to 16 bits.

    Args:
      closed: Program.
      arguments: Its inputs, each with a flag: whether it was rounded and is computed for each
        reader anew.
      draw: NumPy's generator.
    """
    values = {v: (x, False) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

    def find(atom):
        return (atom.val, False) if isinstance(atom, Literal) else values[atom]

    def neighbour(x, rounded):
        return x * jnp.asarray(1 + draw.integers(2) * 2.0**-7, x.dtype) if rounded else x

    for equation in closed.jaxpr.eqns:
        operands, name = [find(atom) for atom in equation.invars], equation.primitive.name
        if name == "jit":
            found = read_anew(equation.params["jaxpr"], operands, draw)
        else:
            inlined = name in INLINED and any(rounded for _, rounded in operands)
            read = [x if inlined else neighbour(x, rounded) for x, rounded in operands]
            how = equation.primitive.get_bind_params(equation.params)
            made = equation.primitive.bind(*read, **how)
            made = made if equation.primitive.multiple_results else [made]
            found = [(x, inlined or x.dtype == jnp.bfloat16) for x in made]
        values |= dict(zip(equation.outvars, found, strict=True))
    return [find(atom) for atom in closed.jaxpr.outvars]


@pytest.mark.short("derivatives-ghost", "parameters-ghost")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_norm_and_sum_agree_however_each_reader_is_rounded(loss, method):
    sums = clipped_grad(loss_by(method, LOSSES[loss]), l2_clip_norm=0.5)
    weights = jnp.zeros(16).at[3].set(1.0)
    program = jax.make_jaxpr(lambda *of: sums(*of)[0])(PARAMS, ROWS, weights)
    leaves, draw = jax.tree.leaves((PARAMS, ROWS, weights)), np.random.default_rng(0)
    evaluate = jax.jit(
        lambda *xs: [y for y, _ in read_anew(program, [(x, False) for x in xs], draw)]
    )
    total = np.concatenate([np.ravel(x).astype(np.float64) for x in evaluate(*leaves)])
    np.testing.assert_allclose(np.linalg.norm(total), 0.5, rtol=1e-5)


def with_other_roundings(closed, arguments, draw):
    """Evaluates a program whose equations may read sums with different roundings.

    Each value has two versions, and an equation mixes those of its operands; a branch has one.

    Args:
      closed: Program.
      arguments: Two versions of each input.
      draw: NumPy's generator.
    """
    values = {v: (x, x) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

    def find(atom):
        return (atom.val,) * 2 if isinstance(atom, Literal) else values[atom]

    def evaluate(equation, operands):
        name = equation.primitive
        made = name.bind(*operands, **name.get_bind_params(equation.params))
        if name.name == "reduce_sum":
            with jax.enable_x64(True):
                terms = name.bind(jnp.abs(operands[0]), **equation.params)
                errors = 2.0**-20 * draw.normal(size=made.shape) * terms
                made = made + errors.astype(made.dtype)
        return made if name.multiple_results else [made]

    for equation in closed.jaxpr.eqns:
        operands, name = [find(atom) for atom in equation.invars], equation.primitive.name
        differing = sum(x is not y for x, y in operands)
        if name == "jit":
            made = with_other_roundings(equation.params["jaxpr"], operands, draw)
        elif name == "cond" or not (differing or name == "reduce_sum"):
            made = [(x, x) for x in evaluate(equation, [x for x, _ in operands])]
        else:
            apart = np.broadcast_to([[0], [1]], (2, len(operands)))
            chosen = draw.integers(2, size=apart.shape) if differing > 1 else apart
            read = [[pair[k] for pair, k in zip(operands, ks, strict=True)] for ks in chosen]
            made = list(zip(*(evaluate(equation, x) for x in read), strict=True))
        values |= dict(zip(equation.outvars, made, strict=True))
    return [find(atom) for atom in closed.jaxpr.outvars]


def clipped_sums(loss_fn, params, batch, l2_clip_norm, seed):
    """Returns two versions of each leaf of a clipped sum, with other roundings."""
    arguments = params, batch, np.ones(8, np.float32)
    sums = clipped_grad(loss_fn, l2_clip_norm=l2_clip_norm)
    program = jax.make_jaxpr(lambda *of: sums(*of)[0])(*arguments)
    leaves, draw = jax.tree.leaves(arguments), np.random.default_rng(seed)
    return jax.jit(lambda *xs: with_other_roundings(program, [(x, x) for x in xs], draw))(*leaves)


@pytest.mark.parametrize(("l2_clip_norm", "seed"), [(0.5, 0), (1.5, 6)])
def test_norm_and_sum_agree_however_each_reader_adds(l2_clip_norm, seed):
    """Cases: terms that cancel; norms near powers of two, which scale both sides of a product."""

    def loss_fn(params, example):
        x, z = example
        spread = jnp.broadcast_to(params["row"][:1], (8, 8)) + x
        return jnp.sum(spread * z) + (x @ params["kernel"])[0]

    params = {name: np.zeros((8, 8), np.float32) for name in ("kernel", "row")}
    z = 1e7 * np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    z[:, 1::2] = -z[:, ::2]
    kernels, _ = clipped_sums(loss_fn, params, (np.eye(8, dtype=np.float32), z), l2_clip_norm, seed)
    # Row k of the gradient is the contribution of example k.
    contributions = np.linalg.norm(kernels, axis=2)
    np.testing.assert_allclose(contributions, min(1, l2_clip_norm), rtol=1e-5)


def test_sides_of_a_convolution_agree_however_each_reader_adds():
    """A power of two near the norm of the activations, here 1 or 1/2, scales both sides."""

    def loss_fn(params, x):
        shape = jax.lax.conv_dimension_numbers((1, 17, 1), (16, 1, 64), ("NWC", "WIO", "NWC"))
        images = x[None, :, None]
        out = jax.lax.conv_general_dilated(images, params, (1,), "VALID", dimension_numbers=shape)
        return jnp.sum(out)

    x = np.zeros((8, 17), np.float32)
    x[:, 0] = 1
    (versions,) = clipped_sums(loss_fn, np.zeros((16, 1, 64), np.float32), x, 0.5, 10)
    for total in versions:
        np.testing.assert_allclose(np.linalg.norm(total), 8 * 0.5, rtol=1e-5)


@pytest.mark.short("derivatives-ghost", "activations-vmap")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("optimised")  # of the rest of the module: it stands last
def test_example_is_clipped_to_c_however_near_its_norm(loss, method):
    """Norms are 2^-1, ..., 2^-23 of C below and above it; the sum under a large C has them."""

    @jax.jit
    def total(weights, clip):
        sums = clipped_grad(loss_by(method, LOSSES[loss]), l2_clip_norm=clip)
        leaves = jax.tree.leaves(sums(PARAMS, ROWS, weights)[0])
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    for one in np.eye(16, dtype=np.float32)[:4]:
        whole = np.asarray(total(one, np.float32(2.0**40)), np.float64)
        norm = np.linalg.norm(whole)
        for part in (s * 2.0**-k for k in range(1, 24, 2) for s in (-1, 1)):
            clip = np.float32(norm / (1 + part))
            found = np.asarray(total(one, clip), np.float64)
            assert np.linalg.norm(found) <= clip
            np.testing.assert_allclose(found, whole * min(1, clip / norm), rtol=0, atol=3e-6 * clip)
