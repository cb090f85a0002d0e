"""Philox4x32-10: pseudorandom words by key, step, leaf and index.

See docs/explanation/float-noise-on-a-public-grid.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COUNTED = 2**32
"""Number of positions that one counter word distinguishes."""

KEY_WORDS = 4
"""Length of a noise key, 32-bit words."""

# Philox4x32: multipliers, and the Weyl increments of the key (Salmon et al. 2011, section 3.3).
_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_WORD, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


class StepKey(NamedTuple):
    """Key of the noise of all arrays in one step."""

    noise_key: Any
    """uint32 `[4]`, key of the noise stream."""
    step: Any
    """Training step, an integer in [0, 2^32)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coordinates:
    """Names of an array's coordinates within a step; each has its own Philox block."""

    leaf: Any
    """Index of the array in its tree, an integer in [0, 2^32); a scalar, or with `position` one per
    coordinate."""
    row: Any = 0
    """Row of an array [1, *shape]: a traced or a constant 0."""
    position: Any = None
    """Row-major indices for `one_axis`, uint32; by default all of the shape, in order."""
    one_axis: bool = field(default=False, metadata={"static": True})
    """True to count all axes as one."""


def words_at(
    key: StepKey, coordinates: Coordinates, shape: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """Returns the Philox block of each coordinate, 4 uint32 arrays.

    Args:
      key: Key of the step.
      coordinates: Names of the coordinates.
      shape: Shape of the array, and of the results.

    Raises:
      ValueError: If the noise key is not uint32 `[4]`, or the step or leaf is out of range.
    """
    noise_key, position = jnp.asarray(key.noise_key), coordinates.position
    if noise_key.shape != (KEY_WORDS,) or noise_key.dtype != jnp.uint32:
        raise ValueError(
            f"a noise key is uint32 [{KEY_WORDS}], got {noise_key.dtype} {list(noise_key.shape)}; "
            "take it from RootKey.noise_key"
        )
    zero = jnp.zeros(shape, jnp.uint32)
    first = zero + jnp.asarray(coordinates.row, jnp.uint32)
    size = math.prod(shape)
    if coordinates.one_axis:
        flat = lax.iota(jnp.uint32, size).reshape(shape) if position is None else position
        low, high = _flat_index([first, flat], (1, size))
    else:
        along = [lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
        low, high = _flat_index([first, *along], (1, *shape))
    counter = (
        low,
        high,
        zero + (word(coordinates.leaf, "leaf") ^ noise_key[2]),
        zero + (word(key.step, "step") ^ noise_key[3]),
    )
    return philox4x32(counter, (noise_key[0], noise_key[1]))


def word(value: jax.typing.ArrayLike, name: str) -> jax.Array:
    """Returns a counter word, uint32 scalar or array.

    Raises:
      ValueError: If a Python integer is out of range.
    """
    if isinstance(value, int) and not 0 <= value < 2**32:
        raise ValueError(f"{name} must be in [0, 2^32), got {value}")
    return jnp.asarray(np.uint32(value) if isinstance(value, int) else value).astype(jnp.uint32)


def _flat_index(positions: list[jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the low and high words of a row-major index, given its `positions` by axis."""
    low = high = jnp.zeros(jnp.broadcast_shapes(*(p.shape for p in positions)), jnp.uint32)
    wide = math.prod(shape) > COUNTED
    for along, size in zip(positions, shape, strict=True):
        if wide:
            high = high * np.uint32(size) + _mulhi(low, np.uint32(size))
        low = low * np.uint32(size) + along
        if wide:
            high = high + (low < along).astype(jnp.uint32)  # the carry
    return low, high


@jax.jit  # traced once for counters of one shape
def philox4x32(
    counter: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    key: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns a counter's Philox4x32-10 block, 4 uint32 words elementwise.

    One round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0
    c0)), where hi and lo are the words of the 64-bit product; the key words advance by a Weyl
    sequence between rounds.

    Args:
      counter: Words (c0, c1, c2, c3), uint32 arrays of one shape.
      key: Words (k0, k1), uint32 scalars.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, section
    3.3.
    """
    keys = [
        (key[0] + np.uint32(i * _WEYL[0] % 2**32), key[1] + np.uint32(i * _WEYL[1] % 2**32))
        for i in range(_ROUNDS)
    ]
    # Each word stays in a 64-bit lane from round to round, and only its low half counts: the
    # multiplier ignores the high half, and hi is a shift. Splitting every product into 32-bit lanes
    # and widening them again takes CPUs half as long again. (On the context, see `_mulhi`.)
    with jax.enable_x64(True):
        c0, c1, c2, c3 = (lax.convert_element_type(word, jnp.uint64) for word in counter)
        for k0, k1 in keys:
            k0, k1 = (lax.convert_element_type(word, jnp.uint64) for word in (k0, k1))
            product0 = (c0 & _LOW_WORD) * np.uint64(_MULTIPLIERS[0])
            product1 = (c2 & _LOW_WORD) * np.uint64(_MULTIPLIERS[1])
            c0, c1 = (product1 >> _WORD_BITS) ^ c1 ^ k0, product1
            c2, c3 = (product0 >> _WORD_BITS) ^ c3 ^ k1, product0
        c0, c1, c2, c3 = (lax.convert_element_type(word, jnp.uint32) for word in (c0, c1, c2, c3))
    return c0, c1, c2, c3


def _mulhi(a: jax.Array, b: np.uint32) -> jax.Array:
    """Returns the high word of the 64-bit product of uint32 `a` and the constant `b`."""
    with jax.enable_x64(True):
        product = lax.convert_element_type(a, jnp.uint64) * np.uint64(b)
        return lax.convert_element_type(product >> np.uint64(32), jnp.uint32)
