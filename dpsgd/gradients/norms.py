"""Norms of per-example gradients, safe from overflow, underflow and missed clips.

Squares are summed in float64, in programs of every precision. The clipped example is h t, with h
= g / M, t = min(M, C (1 - 17 u) / r), r = |g| / M, with u = 2^-24 and M a power of two next to |g|.
Its norm, as float32 stores it, is at most C: docs/explanation/norms-and-clipping-in-float32.md.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from dpsgd.core.marks import mark_value
from dpsgd.gradients.isolation import is_narrow

T = TypeVar("T")

CLIP_MARGIN = 17 * 2.0**-24
"""Relative distance from the clip norm, about 1e-6, that absorbs rounding."""


float64 = functools.partial(jax.enable_x64, True)
"""Context in which JAX computes with float64, in a program of float32, too."""


class Norm(NamedTuple):
    """Per-example L2 norms scale * length, whose product may overflow.

    Attributes:
      scale: float32[B], powers of two in [2^-100, 2^126].
      length: float32[B], norm of the scaled gradient; not finite if an entry is not.
    """

    scale: Array
    length: Array


class ClipFactor(NamedTuple):
    """Factors that turn per-example gradients into their contributions, see `contribution`.

    Attributes:
      keep: bool[B], False for examples that contribute exactly zero.
      inverse_scale: float32[B], 1 / M.
      target: float32[B], t: M for an unclipped example, smaller for a clipped one.
      clipped: bool[B], True for an example that counts and is scaled down.
    """

    keep: Array
    inverse_scale: Array
    target: Array
    clipped: Array


def square_sums(x: Array, lead: int = 1) -> Array:
    """Returns float64 sums of squares over trailing axes.

    Args:
      x: Array of floats.
      lead: Number of leading axes that stay.

    Compute with them under `float64` alone: elsewhere JAX rounds them to float32.

    >>> square_sums(jnp.array([[3.0, 4.0], [0.0, 0.0]]) * 2.0**100).tolist() == [25 * 2.0**200, 0.0]
    True
    """
    with float64():
        wide = lax.convert_element_type(x.astype(jnp.float32), jnp.float64)
        return jnp.sum(lax.square(wide), axis=tuple(range(lead, x.ndim)))


def norm(squares: Sequence[Array]) -> Norm:
    """Returns the norms of gradients from their parts' square sums.

    The square sums are float64[B] each.

    >>> row_norms = norm([square_sums(jnp.array([[3.0, 4.0], [0.0, 0.0]]))])
    >>> (row_norms.scale * row_norms.length).tolist()
    [5.0, 0.0]
    """

    def norm_of_square(square: Array) -> Norm:
        """Returns the square root as a product."""
        scale = magnitudes(square)
        length = jnp.sqrt(square) / lax.convert_element_type(scale, jnp.float64)
        return Norm(scale, length.astype(jnp.float32))

    # Once: compilers would compute it anew for every sum that reads it.
    with float64():
        return once(norm_of_square, functools.reduce(operator.add, squares))


def magnitudes(squares: Array) -> Array:
    """Returns powers of two next to the roots of squares.

    They are float32, in (r / 2, r] for a root r, within [2^-100, 2^126]. The bounds keep the
    reciprocal of each normal: processors may flush subnormals to zero.

    >>> magnitudes(square_sums(jnp.float32([[3.0, 4.0], [1.0, 0.0]]))).tolist()
    [4.0, 1.0]
    """
    with float64():
        root = lax.convert_element_type(jnp.sqrt(squares), jnp.float32)
    exponent = (lax.bitcast_convert_type(root, jnp.int32) >> 23) & 0xFF  # biased by 127
    return lax.bitcast_convert_type(jnp.clip(exponent, 27, 253) << 23, jnp.float32)


def clip_factor(
    norm: Norm,
    l2_clip_norm: ArrayLike,
    counts: Array,
    *,
    share: float | None = None,
    gamma: float | None = None,
) -> ClipFactor:
    """Returns factors that bring norms to at most `l2_clip_norm`.

    An example contributes nothing if `counts` is False for it or its norm is not finite.

    Args:
      norm: Norms of the gradients, [B].
      l2_clip_norm: Clip norm C > 0; infinity clips nothing.
      counts: bool[B], True for the examples that count.
      share: Factor of C, a float32 number in (0, 1].
      gamma: In [2^-100, 2^96], to normalise by C / (norm + gamma) in place of clipping.
    """
    marked_clip_norm = mark_value(jnp.asarray(l2_clip_norm, jnp.float32), "clip", clip=l2_clip_norm)
    limit = marked_clip_norm * jnp.float32(1.0 - CLIP_MARGIN)
    limit = limit if share is None else limit * jnp.float32(share)
    keep = counts & jnp.isfinite(norm.length)
    length = jnp.where(keep, norm.length, 0.0)
    inverse_scale = 1.0 / norm.scale
    if gamma is None:
        # For a zero gradient the quotient is inf (or 0/0 for a clip norm that underflows): no
        # clipping.
        bound = jnp.where(length > 0, limit / length, jnp.inf)
        target = jnp.minimum(norm.scale, bound)
    else:
        # The sum is at least the length, and at least 1 where the scale is at its least.
        length += jnp.float32(gamma) * inverse_scale
        bound = jnp.where(length > 0, limit / length, 0.0)
        target = jnp.where(jnp.isinf(limit), norm.scale, bound)
    return ClipFactor(keep, inverse_scale, target, keep & (bound < norm.scale))


def contribution(factor: ClipFactor, x: Array) -> Array:
    """Returns float32 contributions of values linear in the gradients.

    Args:
      factor: Clip factors of the examples.
      x: Values to scale, [B, ...].
    """
    return shortened(factor, x.astype(jnp.float32) * _rows(factor.inverse_scale, x))


def shortened(factor: ClipFactor, x: Array) -> Array:
    """Returns x t, zero in uncounted rows, float32.

    Args:
      factor: Clip factors of the examples, with targets t.
      x: Values that are scaled by 1 / M already, [B, ...].
    """
    return select(factor, x.astype(jnp.float32) * _rows(factor.target, x))


def select(factor: ClipFactor, x: Array) -> Array:
    """Returns `x` in float32, zero in uncounted rows.

    The rows are selected away, not multiplied: 0 * NaN is NaN.

    Args:
      factor: Clip factors of the examples.
      x: Values of the examples, [B, ...].
    """
    return jnp.where(_rows(factor.keep, x), x.astype(jnp.float32), 0.0)


def once(function: Callable[..., T], *arguments: Any) -> T:
    """Returns a function's result, computed once, with narrow floats widened to float32.

    Norm and sum read the same values: compilers would compute them anew for each reader, with other
    products fused into additions, and where terms cancel, the results have nothing in common. On
    CPUs, whose compiler drops barriers before it fuses, the function is a branch that is always
    taken. The reduced precision stays even if a compiler drops a pair of conversions for one
    reader.
    """

    def exact(x: Array) -> Array:
        """Returns `x` in float32, with its dtype's digits."""
        if not is_narrow(x):
            return x
        # At all 8 bits of the exponent: with fewer, subnormal float16 numbers would become 0.
        return lax.reduce_precision(x.astype(jnp.float32), 8, jnp.finfo(x.dtype).nmant)

    def zeros(*arguments: Any) -> T:
        """Returns zeros for the branch that is never taken."""
        shapes = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    certain = lax.platform_dependent(
        cpu=lambda: lax.optimization_barrier(jnp.bool_(True)), default=lambda: jnp.bool_(True)
    )
    stored = lax.cond(certain, function, zeros, *arguments)
    # A barrier each: one for all would split more kernels of a GPU.
    return jax.tree.map(exact, jax.tree.map(lax.optimization_barrier, stored))


def _rows(v: Array, x: Array) -> Array:
    return v.reshape(v.shape + (1,) * (x.ndim - 1))
