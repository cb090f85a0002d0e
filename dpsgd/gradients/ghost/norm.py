"""Norms of one parameter's gradients, without forming the gradients.

Errors of Gram products, and their margin: docs/explanation/norms-and-clipping-in-float32.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dpsgd.gradients import norms
from dpsgd.gradients.ghost.parts import Parts, sum_repeated
from dpsgd.gradients.ghost.routes import Route
from dpsgd.gradients.ghost.uses import contraction_of, rows_of
from dpsgd.gradients.taps import Use

_GRAM_MARGIN = 2.0**-20
_LARGEST = 2.0**380
"""Squared norm above which scaled sides may leave the float32 range."""


def square_norms(route: Route, uses: Sequence[Use], parts: Parts, cotangents: Any) -> Array:
    """Returns one parameter's squared gradient norms, float64[B].

    The parameter's route forms no entries.

    Args:
      route: Route of the parameter.
      uses: Tapped uses of the parameter.
      parts: Sides of contractions and rows of look-ups, from `parts_of`.
      cotangents: Cotangents of the tapped outputs by path, [B, ...].
    """
    if route.kind == "slice":
        return norms.square_sums(cotangents[uses[0].path])
    if route.kind == "rows":
        return norms.square_sums(parts.rows()[1])
    contractions = [c for u in uses if (c := contraction_of(u))]
    first = contractions[0]
    # Two uses of one parameter may contract opposite sides of it: align them.
    aligned = [
        (x, y) if c.inner == first.inner else (y, x)
        for (x, y), c in zip(parts.products.values(), contractions, strict=True)
    ]
    left, right = (jnp.concatenate(side, axis=2) for side in zip(*aligned, strict=True))
    lefts, rights = (norms.square_sums(side, lead=3) for side in (left, right))
    with norms.float64():
        diagonal = square = jnp.sum(lefts * rights, axis=(1, 2))
    if route.kind == "gram":
        sides = _unit_rows(left, lefts), _unit_rows(right, rights)
        square = _gram(*sides)
        if parts.look_ups:
            rows_left = any(r.rows == first.inner for u in uses if (r := rows_of(u)))
            crossed, square_h = _crossed(*(sides if rows_left else sides[::-1]), *parts.rows())
            with norms.float64():
                square, diagonal = square + crossed, diagonal + square_h
        with norms.float64():
            # Rounding may leave a small negative number where everything cancels; NaN stays NaN.
            square = jnp.maximum(square, 0.0) + _GRAM_MARGIN * diagonal
    with norms.float64():
        return jnp.where(diagonal < _LARGEST, square, jnp.inf)


def _unit_rows(x: Array, squares: Array) -> tuple[Array, Array]:
    """Returns vectors of norms in [1, 2) and their scales, float64 powers of two."""
    scale = norms.magnitudes(squares)
    with norms.float64():
        return x * (1.0 / scale)[..., None], lax.convert_element_type(scale, jnp.float64)


def _gram(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
    """Returns squared norms of sum_s left_s right_s^T, sides [B, batch, s, :]."""
    ll, rr = (
        jnp.einsum("bksc,bktc->bkst", x, x, precision=lax.Precision.HIGHEST)
        for x, _ in (left, right)
    )
    with norms.float64():
        scale = left[1] * right[1]
        scaled = lax.convert_element_type(ll * rr, jnp.float64) * scale[..., None]
        return jnp.sum(scaled * scale[..., None, :], axis=(1, 2, 3))


def _crossed(
    by_row: tuple[Array, Array], by_column: tuple[Array, Array], flat: Array, h: Array
) -> tuple[Array, Array]:
    """Returns the look-ups' terms in squared norms of contractions, and in their diagonals.

    `by_row` is the side along the looked-up rows, with its scales; `flat` has their indices, [B,
    K], and `h` their cotangents, [B, K, :].
    """
    squares = norms.square_sums(h, lead=2)
    unit, scale = _unit_rows(h, squares)
    entries = jnp.take_along_axis(by_row[0][:, 0], flat[:, None, :], axis=2)
    precision = lax.Precision.HIGHEST
    dots = jnp.einsum("bsd,bkd->bsk", by_column[0][:, 0], unit, precision=precision)
    repeated = norms.square_sums(sum_repeated(flat, h))
    with norms.float64():
        product = lax.convert_element_type(entries * dots, jnp.float64) * scale[:, None, :]
        product *= (by_row[1] * by_column[1])[:, 0, :, None]
        return 2 * jnp.sum(product, axis=(1, 2)) + repeated, jnp.sum(squares, axis=1)
