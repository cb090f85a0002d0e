"""Norms of one parameter's gradients, without forming the gradients.

Errors of Gram products, and their margin: docs/explanation/norms-and-clipping-in-float32.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dpsgd.gradients import norms
from dpsgd.gradients.ghost.parts import Parts, sum_repeated
from dpsgd.gradients.ghost.routes import Route
from dpsgd.gradients.ghost.uses import contraction_of, rows_of
from dpsgd.gradients.taps import Use

_GRAM_MARGIN = 2.0**-20
_MANY_POSITIONS = 16
"""Number of positions above which the margin grows with its square, as roundings add up."""
_LARGEST = 2.0**380
"""Squared norm above which scaled sides may leave the float32 range."""
_STEEPEST = 2.0**240
"""Least squared ratio of a cotangent to the gradient at which a sum may cut it off."""
_STEEPEST_CONVOLVED = 2.0**180
"""The same for a cotangent times the norm of all activations, in a convolution."""
_SMALLEST = 2.0**-200
"""Square of the smallest scale of a gradient, see `dpsgd.gradients.norms.magnitudes`."""


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
    first, lengths = contractions[0], [c.length for c in contractions]
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
        square, positions = _gram(left, right), left.shape[2]
        if parts.look_ups:
            rows_left = any(r.rows == first.inner for u in uses if (r := rows_of(u)))
            by_row, by_column = (left, right) if rows_left else (right, left)
            crossed, square_h = _crossed(by_row, by_column, *parts.rows())
            with norms.float64():
                square, diagonal = square + crossed, diagonal + square_h
            positions += sum(row.shape[1] for _, row, _ in parts.look_ups.values())
        with norms.float64():
            # Rounding may leave a small negative number where everything cancels; NaN stays NaN.
            margin = _GRAM_MARGIN * max(1.0, positions / _MANY_POSITIONS) ** 2
            square = jnp.maximum(square, 0.0) + margin * diagonal
            # A cotangent that the sum cut off could no longer cancel others.
            swapped = np.repeat([c.inner != first.inner for c in contractions], lengths)
            longest = jnp.where(lefts * rights > 0, jnp.where(swapped, lefts, rights), 0.0)
            longest = jnp.max(longest, axis=(1, 2))
            steepest = _STEEPEST
            if uses[0].op == "conv_general_dilated":  # then all are: `add_use` scales one by one
                longest *= jnp.maximum(jnp.sum(lefts, axis=(1, 2)), _SMALLEST)
                steepest = _STEEPEST_CONVOLVED
            limit = steepest * jnp.maximum(square, _SMALLEST)
            square = jnp.where(longest < limit, square, jnp.inf)
    with norms.float64():
        return jnp.where(diagonal < _LARGEST, square, jnp.inf)


def _wide(x: Array) -> Array:
    return lax.convert_element_type(x.astype(jnp.float32), jnp.float64)


def _gram(left: Array, right: Array) -> Array:
    """Returns squared norms of sum_s left_s right_s^T, sides [B, batch, s, :], float64[B].

    In float64: rounding errors of float32 can agree for all pairs of positions, as where a row
    repeats two of them, and then outweigh any margin.
    """
    with norms.float64():
        ll, rr = (jnp.einsum("bksc,bktc->bkst", x, x) for x in map(_wide, (left, right)))
        return jnp.sum(ll * rr, axis=(1, 2, 3))


def _crossed(by_row: Array, by_column: Array, flat: Array, h: Array) -> tuple[Array, Array]:
    """Returns the look-ups' terms in squared norms of contractions, and in their diagonals.

    `by_row` is the side along the looked-up rows; `flat` has their indices, [B, K], and `h` their
    cotangents, [B, K, :].
    """
    entries = jnp.take_along_axis(by_row[:, 0], flat[:, None, :], axis=2)
    squares, repeated = norms.square_sums(h, lead=2), norms.square_sums(sum_repeated(flat, h))
    with norms.float64():
        dots = jnp.einsum("bsd,bkd->bsk", _wide(by_column[:, 0]), _wide(h))
        crossed = jnp.sum(_wide(entries) * dots, axis=(1, 2))
        return 2 * crossed + repeated, jnp.sum(squares, axis=1)
