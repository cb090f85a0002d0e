"""Float32 norms of per-example gradients, safe from overflow, underflow and missed clips.

The clipped example is h t, h = g / M, t = min(M, C (1 - 17 u) / r), r = sqrt(sum_k h_k^2), with u =
2^-24 and M a power of two next to max_k |g_k|. Its norm, as float32 stores it, is at most C:
docs/explanation/norms-and-clipping-in-float32.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from dpsgd.core.marks import mark_value
from dpsgd.gradients.isolation import is_narrow

T = TypeVar("T")

CLIP_MARGIN = 17 * 2.0**-24
"""Relative distance from the clip norm, about 1e-6, that absorbs rounding."""

_PAIRWISE = 16
_BLOCK = 1024
_UNROLLED = 32


class Norm(NamedTuple):
    """Per-example L2 norms scale * sqrt(square), whose product may overflow.

    Attributes:
      scale: float32[B], powers of two in [2^-100, 2^126].
      square: float32[B], sum of squares of the scaled gradient; not finite if an entry is not.
    """

    scale: Array
    square: Array


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


def _two_sum(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Adds two unevaluated sums high + low; Knuth's error-free transformation of the high parts."""
    high = a[0] + b[0]
    virtual = high - a[0]
    error = (a[0] - (high - virtual)) + (b[0] - virtual)
    return high, (a[1] + b[1]) + error


def _fold(x: Array, block: int) -> Array:
    """Pads the last axis with zeros and splits it into `block` parts: (B, n) -> (B, block, m)."""
    width = -(-x.shape[1] // block)
    return _pad(x, width * block).reshape(x.shape[0], block, width)


def _pad(x: Array, width: int) -> Array:
    return x if x.shape[1] == width else jnp.pad(x, ((0, 0), (0, width - x.shape[1])))


def _sum(x: Array) -> Array:
    """Sums float32[B, n] of non-negative numbers over n with a relative error of at most 2 u."""
    high, low = x, jnp.zeros_like(x)
    zero = jnp.float32(0)
    while high.shape[1] > 1:
        block = min(_BLOCK, high.shape[1])
        high, low = lax.reduce(
            (_fold(high, block), _fold(low, block)), (zero, zero), _two_sum, dimensions=(1,)
        )
    return jnp.sum(high + low, axis=1)


def _sum_of_squares(x: Array, factor: Array) -> Array:
    """Sums (x factor[:, None])^2 of float32[B, n] over n with a relative error of at most 7 u."""
    size = x.shape[1]
    width = max(1, -(-size // _PAIRWISE))
    # Slices, not a reshape of a padded copy: one pass over x that writes a sixteenth of its size.
    slices = [
        lax.slice_in_dim(x, start, min(start + width, size), axis=1)
        for start in range(0, max(1, size), width)
    ]
    column = _rows(factor, x)
    squares = [lax.square(_clamped(piece * column)) for piece in slices]
    total = _pairwise(jnp.add, [_pad(square, width) for square in squares])
    # XLA for CPUs would fuse it into the compensated sum, which takes one number after another.
    return _sum(lax.platform_dependent(total, cpu=lax.optimization_barrier, default=lambda x: x))


def _pairwise(add: Callable[[T, T], T], terms: list[T]) -> T:
    """Adds one or more terms in a tree of ceil(log2(len(terms))) levels."""
    while len(terms) > 1:
        odd = terms[len(terms) & ~1 :]
        terms = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)] + odd
    return terms[0]


def power_of_two(x: Array) -> Array:
    """Returns powers of two in (x/2, x], clamped to [2^-100, 2^126].

    The bounds keep the reciprocal of each float32 x >= 0 normal: processors may flush subnormals to
    zero.

    >>> power_of_two(jnp.float32([0.0, 1.0, 5.0])).tolist()[1:]
    [1.0, 4.0]
    """
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF  # biased by 127
    return lax.bitcast_convert_type(jnp.clip(exponent, 27, 253) << 23, jnp.float32)


def scaled(x: Array, factor: Array) -> Array:
    """Returns float32 x [B, ...] times factor[B], clamped to finite numbers.

    The clamp keeps compilers from squaring constants and factors separately.
    """
    return _clamped(x * _rows(factor, x))


def _clamped(x: Array) -> Array:
    largest = np.float32(
        jnp.finfo(jnp.float32).max
    )  # no float: where x64 is enabled, that is float64
    return lax.clamp(-largest, x, largest)


def row_scale(x: Array) -> Array:
    """Returns powers of two next to each row's largest magnitude."""
    return power_of_two(jnp.max(jnp.abs(x), axis=1, initial=0.0))


@jax.jit  # traced once for all arrays of one shape
def norm(x: Array) -> Norm:
    """Returns the norms of rows `x` [B, ...], any real dtype.

    >>> row_norms = norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    >>> (row_norms.scale * jnp.sqrt(row_norms.square)).tolist()
    [5.0, 0.0]
    """
    x = x.astype(jnp.float32).reshape(x.shape[0], math.prod(x.shape[1:]))
    scale = row_scale(x)
    return Norm(scale, _sum_of_squares(x, 1.0 / scale))


def combine(norms: Sequence[Norm]) -> Norm:
    """Returns the norms of concatenated gradients from their parts' norms."""
    if len(norms) == 1:
        return norms[0]

    def together(norms: Sequence[Norm]) -> Norm:
        scales, squares = (jnp.stack(column, axis=1) for column in zip(*norms, strict=True))
        scale = jnp.max(scales, axis=1)
        ratios = scales / scale[:, None]
        return Norm(scale, _sum(squares * ratios * ratios))

    def elementwise(norms: Sequence[Norm]) -> Norm:
        scale = functools.reduce(jnp.maximum, (n.scale for n in norms))
        ratios = [n.scale / scale for n in norms]
        squares = [n.square * ratio * ratio for n, ratio in zip(norms, ratios, strict=True)]
        high, low = _pairwise(_two_sum, [(square, jnp.zeros_like(square)) for square in squares])
        return Norm(scale, high + low)

    # Few are added elementwise over the examples, which accelerators make one kernel of. But what
    # is elementwise, XLA's compiler for CPUs computes anew in every kernel that reads of it, and
    # every leaf's sum does: a program that grows as the square of their number. Only a reduction is
    # made once; so it is with many of them anywhere.
    if len(norms) > _UNROLLED:
        return together(norms)
    return lax.platform_dependent(list(norms), cpu=together, default=elementwise)


def product(a: Norm, b: Norm) -> Norm:
    """Returns the norms of outer products of two vectors.

    It is the product of their norms, and not finite if entries of the outer product may leave the
    float32 range.

    Args:
      a: Norms of the first vectors, [B].
      b: Norms of the second vectors, [B].
    """
    exact = a.scale * b.scale
    scale = jnp.clip(exact, 2.0**-100, 2.0**126)
    ratio = jnp.where(exact > scale, jnp.inf, a.scale / scale * b.scale)  # 1 in the ordinary range
    return Norm(scale, a.square * b.square * ratio * ratio)


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
      gamma: Stability constant in [2^-100, 2^96] for normalising in place of clipping: the factor
        is C / (norm + gamma).
    """
    marked_clip_norm = mark_value(jnp.asarray(l2_clip_norm, jnp.float32), "clip", clip=l2_clip_norm)
    limit = marked_clip_norm * jnp.float32(1.0 - CLIP_MARGIN)
    limit = limit if share is None else limit * jnp.float32(share)
    keep = counts & jnp.isfinite(norm.square)
    square = jnp.where(keep, norm.square, 0.0)
    inverse_scale = 1.0 / norm.scale
    if gamma is None:
        # For a zero gradient the quotient is inf (or 0/0 for a clip norm that underflows): no
        # clipping.
        bound = jnp.where(square > 0, limit / jnp.sqrt(square), jnp.inf)
        target = jnp.minimum(norm.scale, bound)
    else:
        # The sum is at least the root, and at least 1 where the scale is at its least.
        length = jnp.sqrt(square) + jnp.float32(gamma) * inverse_scale
        bound = jnp.where(length > 0, limit / length, 0.0)
        target = jnp.where(jnp.isinf(limit), norm.scale, bound)
    return ClipFactor(
        keep=keep,
        inverse_scale=inverse_scale,
        target=target,
        clipped=keep & (bound < norm.scale),
    )


def contribution(factor: ClipFactor, x: Array) -> Array:
    """Scales `x` [B, ...], linear in the gradients, to float32 contributions."""
    return shortened(factor, x.astype(jnp.float32) * _rows(factor.inverse_scale, x))


def normalized(factor: ClipFactor, x: Array) -> Array:
    """Returns h = x / M for `x` [B, ...], zero in uncounted rows."""
    return select(factor, x.astype(jnp.float32) * _rows(factor.inverse_scale, x))


def shortened(factor: ClipFactor, x: Array) -> Array:
    """Returns x t for `x` [B, ...], zero in uncounted rows.

    `normalized` of one factor of a product and `shortened` of the other make a contribution.
    """
    return select(factor, x.astype(jnp.float32) * _rows(factor.target, x))


def select(factor: ClipFactor, x: Array) -> Array:
    """Returns `x` [B, ...] in float32, zero in uncounted rows.

    The rows are selected away, not multiplied: 0 * NaN is NaN.
    """
    return jnp.where(_rows(factor.keep, x), x.astype(jnp.float32), 0.0)


def shared(tree: T) -> T:
    """Returns arrays with narrow floats widened to float32, computed once.

    Norm and sum read the same values: the barrier prevents a second computation, and the reduced
    precision stays even if a compiler drops a pair of conversions for one reader.
    """

    def exact(x: Array) -> Array:
        if not is_narrow(x):
            return x
        # At all 8 bits of the exponent: with fewer, subnormal float16 numbers would become 0.
        return lax.reduce_precision(x.astype(jnp.float32), 8, jnp.finfo(x.dtype).nmant)

    return jax.tree.map(exact, lax.optimization_barrier(tree))


def _rows(v: Array, x: Array) -> Array:
    return v.reshape(v.shape + (1,) * (x.ndim - 1))
