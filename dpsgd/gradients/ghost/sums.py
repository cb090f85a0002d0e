"""Clipped sums of one parameter's gradients: its uses transposed, over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from dpsgd.gradients import norms
from dpsgd.gradients.ghost.parts import Parts
from dpsgd.gradients.ghost.uses import contraction_of, dot_axes, named_axes, row_axes
from dpsgd.gradients.taps import Use


def add_use(
    total: Array,
    use: Use,
    parts: Parts,
    others: Sequence[Array],
    cotangent: Array,
    factor: norms.ClipFactor,
) -> Array:
    """Adds one use's clipped gradient sum to `total`.

    Args:
      total: Sum so far, float32 in the parameter's shape.
      use: Use of the parameter.
      parts: Sides of contractions and rows of look-ups.
      others: Operands beside the parameter, [B, ...].
      cotangent: Cotangent of the output, [B, ...].
      factor: Clip factors of the examples.
    """
    if use.path in parts.look_ups:
        look_up = parts.look_ups[use.path]
        if use.view.identity:
            return _add_rows(total, use, look_up, factor)
        operand = _add_rows(jnp.zeros(use.operand.shape), use, look_up, factor)
        return total + _transpose_view(use, total, operand)
    if use.op == "dot_general":
        return total + _transpose_view(use, total, _sum_products(use, parts, factor))
    # The remaining operations are convolutions and slices.
    if use.op == "conv_general_dilated":
        args, scaled = _scaled_sides(parts.products[use.path][0], others[0], cotangent, factor)
    else:
        args, scaled = list(others), norms.contribution(factor, cotangent)
    # Huge cotangents of tiny activations may overflow here: then the example gives this parameter
    # nothing, which makes its contribution smaller.
    finite = jnp.all(jnp.isfinite(scaled), axis=tuple(range(1, scaled.ndim)), keepdims=True)
    scaled = jnp.where(finite, scaled, 0.0)

    def whole_batch(parameter: Array) -> Array:
        """Returns the use's outputs for all examples, [B, ...]."""
        return jax.vmap(lambda x: use.linear(parameter, x), axis_size=len(scaled))(args)

    parameter = jax.ShapeDtypeStruct(total.shape, jnp.float32)
    return total + jax.linear_transpose(whole_batch, parameter)(scaled)[0]


def _scaled_sides(
    patches: Array, activation: Array, cotangent: Array, factor: norms.ClipFactor
) -> tuple[list[Array], Array]:
    """Returns a convolution's activations, scaled to below 4, and clipped cotangents.

    A cotangent below 2^-126 is cut off, and beside a huge activation that could be a product of
    many C. So each example's activations are divided by a power of two A next to their norm, and
    its cotangents multiplied by A / M: in two steps, as the ratio may leave the float32 range.
    """
    squares = norms.square_sums(patches, lead=3)
    with norms.float64():
        # Once: of sums in another order, both sides could have powers a factor of 2 apart.
        scale = norms.once(norms.magnitudes, jnp.sum(squares, axis=(1, 2)))
        ratio = lax.convert_element_type(scale, jnp.float64) * factor.inverse_scale
        step = norms.magnitudes(ratio)  # next to its root
        steps = step, (ratio / step).astype(jnp.float32)
    scaled = cotangent.astype(jnp.float32)
    for x in steps:
        scaled *= x.reshape(-1, *(1,) * (cotangent.ndim - 1))
    inverse = (1.0 / scale).reshape(-1, *(1,) * (activation.ndim - 1))
    normalised = norms.select(factor, activation * inverse)
    # Entries that no output reads may be anything, as under a stride; the norm does not see them.
    return [jnp.where(jnp.abs(normalised) < 4.0, normalised, 0.0)], norms.shortened(factor, scaled)


def _add_rows(
    total: Array, use: Use, look_up: tuple[Array, Array, Array], factor: norms.ClipFactor
) -> Array:
    """Scatters rows into `total`, which has the layout of the operand."""
    index, _, h = look_up
    axes = row_axes(use)
    assert axes is not None
    shape = use.operand.shape
    columns = [k for k in range(len(shape)) if k not in axes]
    rows = norms.contribution(factor, h)
    names = named_axes(use, columns)[0]
    rows = rows.reshape(-1, *(shape[k] for k in names))
    rows = rows.transpose([0, *(1 + names.index(k) for k in columns)])
    numbers = lax.ScatterDimensionNumbers(
        tuple(range(1, 1 + len(columns))), tuple(sorted(axes)), axes
    )
    # The indices are inside: `_look_ups` saw to it.
    return lax.scatter_add(
        total,
        index.reshape(-1, len(axes)),
        rows,
        numbers,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _sum_products(use: Use, parts: Parts, factor: norms.ClipFactor) -> Array:
    """Contracts the scaled sides over batch and sequence; the result has the operand's layout."""
    c = contraction_of(use)
    assert c is not None
    left, right = parts.products[use.path]
    subscripts = "bksi,bkso->kio"
    if c.batch_size == 1:
        left, right, subscripts = left[:, 0], right[:, 0], "bsi,bso->io"
        if c.length == 1:
            left, right, subscripts = left[:, 0], right[:, 0], "bi,bo->io"
    total = _contract(subscripts, left, right, factor)
    inner, batch, free, _ = dot_axes(use)
    order = [*batch, *inner, *named_axes(use, free)[0]]
    total = total.reshape([use.operand.shape[k] for k in order])
    return total.transpose([order.index(k) for k in range(len(order))])


def _contract(subscripts: str, left: Array, right: Array, factor: norms.ClipFactor) -> Array:
    """Contracts two sides whose products are each example's gradient, and clips it.

    Each vector of the right side, cotangents, is divided by a power of two next to its norm, which
    multiplies its partner: the left side alone bounds the products. The right side is scaled
    without reading the left one: a layer and its bias share it.
    """
    # In two dimensions: compilers see that these are the cotangents themselves, and the squares
    # those of the norms, and keep no second copy.
    flat = right.reshape(math.prod(right.shape[:-1]), right.shape[-1])
    squares = norms.square_sums(flat)
    with norms.float64():
        scale = norms.once(norms.magnitudes, squares)[:, None]
    right = (flat * (1.0 / scale)).reshape(right.shape)
    # Large values are divided by M before they are multiplied, small values after. Beyond
    # 2^127 the left vector is zero.
    scale = scale.reshape(*left.shape[:-1], 1)
    inverse = factor.inverse_scale.reshape(-1, *(1,) * (left.ndim - 1))
    large = jnp.minimum(jnp.maximum(scale, 1.0) * inverse, 2.0**127)
    left = norms.select(factor, left * jnp.minimum(scale, 1.0) * large)
    right = norms.shortened(factor, right)
    return jnp.einsum(subscripts, left, right, precision=lax.Precision.HIGHEST)


def sum_entries(g: Array, factor: norms.ClipFactor) -> Array:
    """Sums clipped gradients over the batch, float32[n].

    Args:
      g: Gradients of the examples, float32 [B, n].
      factor: Clip factors of the examples.
    """
    return _contract("bi,bo->io", jnp.ones((len(g), 1)), g, factor)[0]


def _transpose_view(use: Use, like: Array, x: Array) -> Array:
    """Brings a cotangent of a use's operand back to the parameter's layout."""
    parameter = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return jax.linear_transpose(use.view, parameter)(x)[0]
