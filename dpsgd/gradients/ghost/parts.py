"""Terms of norms and clipped sums: sides of contractions and rows of look-ups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dpsgd.gradients.ghost.routes import Route
from dpsgd.gradients.ghost.uses import contraction_of, dot_axes, named_axes, row_axes, rows_of
from dpsgd.gradients.taps import Path, Use


@dataclass(frozen=True)
class Parts:
    """Terms of one parameter's norm and sum, by the path of the use.

    Attributes:
      products: Both sides of each contraction, see `_factors`.
      look_ups: Index and cotangents of each look-up, see `_look_ups`.
    """

    products: dict[Path, tuple[Array, Array]]
    look_ups: dict[Path, tuple[Array, Array, Array]]

    def rows(self) -> tuple[Array, Array]:
        """Returns all looked-up rows with their cotangents.

        The result is (flat row indices [B, K], cotangents [B, K, width]).
        """
        _, *rows = zip(*self.look_ups.values(), strict=True)
        flat, h = (jnp.concatenate(x, axis=1) for x in rows)
        return flat, h


def parts_of(route: Route, uses: Sequence[Use], others: Any, cotangents: Any) -> Parts:
    """Returns the terms of one parameter's norm and sum.

    Args:
      route: Route of the parameter, which forms no entries.
      uses: Tapped uses of the parameter.
      others: Operands beside the parameter, by path.
      cotangents: Cotangents of the tapped outputs by path, [B, ...].
    """
    products = {
        u.path: _factors(u, others[u.path][0], cotangents[u.path])
        for u in uses
        if contraction_of(u)
    }
    look_ups = {
        u.path: _look_ups(u, others[u.path], cotangents[u.path]) for u in uses if rows_of(u)
    }
    terms = Parts(products, look_ups)
    if route.kind == "rows":
        # Equal rows are summed once, over all uses, so that the vector whose norm is taken is the
        # one that is scattered.
        stops = itertools.accumulate(row.shape[1] for _, row, _ in look_ups.values())
        pieces = jnp.split(sum_repeated(*terms.rows()), list(stops)[:-1], axis=1)
        for (path, (index, row, _)), h in zip(list(look_ups.items()), pieces, strict=True):
            look_ups[path] = index, row, h
    return terms


def _factors(use: Use, activation: Array, cotangent: Array) -> tuple[Array, Array]:
    """Returns the inner [B, batch, length, inner] and outer [B, batch, length, outer] sides."""
    c = contraction_of(use)
    assert c is not None
    size = activation.shape[0]
    a, g = activation.astype(jnp.float32), cotangent.astype(jnp.float32)
    if use.op == "dot_general":
        inner, batch, free, partners = dot_axes(use)
        contracted, batched = partners[: len(inner)], partners[len(inner) :]
        seq = [k for k in range(a.ndim - 1) if k not in partners]
        a = a.transpose([0, *(1 + k for k in (*batched, *seq, *contracted))])
        # The output has the batch axes, then the left operand's free axes, then the right one's.
        axes = [len(batch) + (len(seq) if use.position else 0) + k for k in range(len(free))]
        outer = [axes[free.index(k)] for k in named_axes(use, free)[0]]
        remaining_axes = [k for k in range(g.ndim - 1) if k not in axes]
        g = g.transpose([0, *(1 + k for k in (*remaining_axes, *outer))])
    else:
        a, g = _patches(use, a, g)
    return (
        a.reshape(size, c.batch_size, c.length, c.inner_size),
        g.reshape(size, c.batch_size, c.length, c.outer_size),
    )


def _patches(use: Use, a: Array, g: Array) -> tuple[Array, Array]:
    """Turns a convolution into a matrix product: each output position with the inputs it sees."""
    spec = use.params["dimension_numbers"]
    size, images = a.shape[0], use.out.shape[spec.out_spec[0]]
    a = a.transpose([0, *(1 + k for k in spec.lhs_spec)])
    g = g.transpose([0, *(1 + k for k in spec.out_spec)])
    a = lax.conv_general_dilated_patches(
        a.reshape(size * images, *a.shape[2:]),
        filter_shape=[use.operand.shape[k] for k in spec.rhs_spec[2:]],
        window_strides=use.params["window_strides"],
        padding=use.params["padding"],
        lhs_dilation=use.params["lhs_dilation"],
        rhs_dilation=use.params["rhs_dilation"],
        precision=lax.Precision.HIGHEST,
    )
    positions = math.prod(a.shape[2:])
    a = a.reshape(size, images, a.shape[1], positions).swapaxes(2, 3)
    return a, g.reshape(size, images, g.shape[2], positions).swapaxes(2, 3)


def _look_ups(use: Use, others: Sequence[Array], cotangent: Array) -> tuple[Array, Array, Array]:
    """Returns the rows that a use looks up, and their cotangents.

    Returns:
      The index of each look-up, int32[B, count, axes]; its flat row number, int32[B, count]; and
      the cotangents of the rows, float32[B, count, width], zero for look-ups out of bounds, which
      have no gradient.
    """
    axes, rows, shape = row_axes(use), rows_of(use), use.operand.shape
    assert axes is not None
    assert rows is not None
    size = cotangent.shape[0]
    columns = [k for k in range(len(shape)) if k not in axes]
    if use.op == "gather":
        numbers = use.params["dimension_numbers"]
        index = others[0].reshape(size, rows.count, len(axes))
        clamps = use.params["mode"] == lax.GatherScatterMode.CLIP
        # The axes of the output that run along the operand's, in the same order.
        present = [k for k in range(len(shape)) if k not in numbers.collapsed_slice_dims]
        position = dict(zip(present, numbers.offset_dims, strict=True))
    else:
        index = jnp.stack([others[k] for k in axes], axis=-1)[:, None]
        clamps, position = True, {k: k for k in range(len(shape))}
    # An axis of length one may be collapsed: it is not in the output.
    along = [position[k] for k in named_axes(use, columns)[0] if k in position]
    across = [d for d in range(cotangent.ndim - 1) if d not in along]
    h = cotangent.astype(jnp.float32).transpose([0, *(1 + d for d in (*across, *along))])
    h = h.reshape(size, rows.count, rows.width)

    unsigned = jnp.issubdtype(index.dtype, jnp.unsignedinteger)
    index = index.astype(jnp.promote_types(index.dtype, jnp.uint32 if unsigned else jnp.int32))
    limits = jnp.asarray([shape[k] - 1 for k in axes], index.dtype)
    if not clamps:
        inside = jnp.all((index >= 0) & (index <= limits), axis=-1)
        h = jnp.where(inside[..., None], h, 0.0)
    index = jnp.clip(index, 0, limits).astype(jnp.int32)
    flat = jnp.zeros((size, rows.count), jnp.int32)
    for k in named_axes(use, axes)[0]:
        flat = flat * shape[k] + index[..., axes.index(k)]
    return index, flat, h


def sum_repeated(flat: Array, h: Array) -> Array:
    """Sums vectors over equal rows of each example.

    Each sum takes the place of its first term; the other terms become zero.

    Args:
      flat: Flat row indices, int32 [B, K].
      h: Vectors of these rows, float32 [B, K, width].

    >>> sum_repeated(jnp.array([[4, 7, 4]]), jnp.ones((1, 3, 1))).ravel().tolist()
    [2.0, 1.0, 0.0]
    """
    same = flat[:, :, None] == flat[:, None, :]
    places = jnp.arange(flat.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(same, places, flat.shape[1]), axis=2)
    examples = jnp.arange(len(flat), dtype=jnp.int32)[:, None]
    return jnp.zeros_like(h).at[examples, first].add(h, mode="promise_in_bounds")
