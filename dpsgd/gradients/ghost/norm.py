"""Norms of one parameter's gradients, without forming the gradients.

Errors of Gram products, and their margin: docs/explanation/norms-and-clipping-in-float32.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dpsgd.gradients import norms
from dpsgd.gradients.ghost.parts import Parts, fold, sum_repeated
from dpsgd.gradients.ghost.routes import Route
from dpsgd.gradients.ghost.uses import contraction_of, rows_of
from dpsgd.gradients.taps import Use

_GRAM_MARGIN = 2.0**-20


def norm_of(route: Route, uses: Sequence[Use], parts: Parts, cotangents: Any) -> norms.Norm:
    """Returns one parameter's gradient norms on a route without entries.

    Args:
      route: Route of the parameter.
      uses: Tapped uses of the parameter.
      parts: Sides of contractions and rows of look-ups, from `parts_of`.
      cotangents: Cotangents of the tapped outputs by path, [B, ...].
    """
    if route.kind == "slice":
        return norms.norm(cotangents[uses[0].path])
    looked_up = [parts.look_ups[u.path] for u in uses if u.path in parts.look_ups]
    if route.kind == "rows":
        return norms.norm(jnp.concatenate([h for _, _, h in looked_up], axis=1))
    contractions = [c for u in uses if (c := contraction_of(u))]
    factors = [parts.products[u.path] for u in uses if u.path in parts.products]
    first = contractions[0]
    if route.kind == "outer":
        inner, outer = factors[0]
        return norms.combine(
            [
                norms.product(norms.norm(inner[:, k]), norms.norm(outer[:, k]))
                for k in range(first.batch_size)
            ]
        )
    # Two uses of one parameter may contract opposite sides of it: align them.
    aligned = [
        (x, y) if c.inner == first.inner else (y, x)
        for (x, y), c in zip(factors, contractions, strict=True)
    ]
    left, right = (jnp.concatenate(side, axis=2) for side in zip(*aligned, strict=True))
    if not looked_up:
        return _gram_norm(left, right, None)
    flat = jnp.concatenate([x[1] for x in looked_up], axis=1)
    h = jnp.concatenate([x[2] for x in looked_up], axis=1)
    rows_left = any(r.rows == first.inner for u in uses if (r := rows_of(u)))
    return _gram_norm(left, right, (flat, h, rows_left))


def _gram_norm(left: Array, right: Array, look_ups: tuple[Array, Array, bool] | None) -> norms.Norm:
    """Returns the norm of sum_s left_s right_s^T, plus the looked-up rows.

    Args:
      left: One side of the contractions, [B, batch, s, :].
      right: Other side, [B, batch, s, :].
      look_ups: Flat row indices, their cotangents, and True if they are rows of the left side.
    """
    left, right = fold(left, right)
    left = norms.scaled(left, jnp.ones(len(left)))
    size = left.shape[0]
    largest = jnp.max(jnp.abs(right), axis=(1, 2, 3))
    if look_ups is not None:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(look_ups[1]), axis=(1, 2)))
    unit = norms.power_of_two(largest)
    right = norms.scaled(right, 1.0 / unit)
    ll, rr = (
        jnp.einsum("bksc,bktc->bkst", x, x, precision=lax.Precision.HIGHEST) for x in (left, right)
    )
    square = jnp.sum((ll * rr).reshape(size, -1), axis=1)
    diagonal = jnp.einsum("bkss,bkss->b", ll, rr)
    if look_ups is not None:
        flat, h, rows_left = look_ups
        h = norms.scaled(h, 1.0 / unit)
        by_row, by_column = (left, right) if rows_left else (right, left)
        weight = jnp.take_along_axis(by_row[:, 0], flat[:, None, :], axis=2)
        dots = jnp.einsum("bsd,bkd->bsk", by_column[:, 0], h, precision=lax.Precision.HIGHEST)
        square += 2 * jnp.sum(weight * dots, axis=(1, 2))
        square += jnp.sum(jnp.square(sum_repeated(flat, h)), axis=(1, 2))
        diagonal += jnp.sum(jnp.square(h), axis=(1, 2))
    # Rounding may leave a small negative number where everything cancels; NaN stays NaN.
    square = jnp.maximum(square, 0.0) + _GRAM_MARGIN * diagonal
    # As in `norms.product`: products of the sides that may leave the float32 range.
    return norms.Norm(unit, jnp.where(largest < 2.0**126, square, jnp.inf))
