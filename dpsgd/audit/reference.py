r"""Recomputes the noise of a run from its law, in float64.

The audit checks `dpsgd.noise`, and so uses none of its code. With a key of four 32-bit words k, the
coordinate `index` of array `leaf` gets in step `step` the block of four words

    w = Philox4x32-10((index mod 2^32, index div 2^32, (leaf + 2^24 purpose) xor k_2, step xor k_3))

under (k_0, k_1). The block determines one normal number z and one uniform number U,

    z = sqrt(-2 ln u) sin(pi (w_2 + 1/2) / 2^32),  u = (2^32 w_0 + w_1 + 1/2) / 2^64,  w_2 signed,
    U = (w_3 div 2^9 + 1/2) / 2^23.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STEP, MOMENTUM, VALUE = 1, 2, 3
"""Purposes of noise in a table's rows; noise of arrays without deferred noise has purpose 0."""

_LOW, _WORD = np.uint64(2**32 - 1), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_CHUNK = 2**15  # numbers that are worked on together, so that they stay in a core's cache


def normals(key: Any, step: Any, leaf: int, index: Any, purpose: int = 0) -> np.ndarray:
    """Returns the normal numbers z of coordinates.

    Args:
      key: Key of the noise, uint32[4].
      step: Numbers of steps, in [0, 2^32).
      leaf: Index of the array, below 2^24.
      index: Row-major indices of coordinates, which broadcast with `step`.
      purpose: Purpose of the noise, see `STEP`.

    Returns:
      float64 of the common shape of `step` and `index`.
    """
    return _mapped(_normal, key, step, leaf, index, purpose)


def uniforms(key: Any, step: Any, leaf: int, index: Any, purpose: int = 0) -> np.ndarray:
    """Returns the uniform numbers U, with arguments as in `normals`."""
    return _mapped(_uniform, key, step, leaf, index, purpose)


def _mapped(convert, key, step, leaf, index, purpose) -> np.ndarray:
    step, index = np.broadcast_arrays(np.asarray(step, np.uint64), np.asarray(index, np.uint64))
    k0, k1, k2, k3 = map(int, np.asarray(key))
    values = np.empty(index.shape)
    flat, steps, indices = values.reshape(-1), step.reshape(-1), index.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        low, high = indices[chunk] & _LOW, indices[chunk] >> _WORD
        name = np.full(low.size, (leaf + (purpose << 24)) ^ k2, np.uint64)
        flat[chunk] = convert(philox([low, high, name, steps[chunk] ^ np.uint64(k3)], k0, k1))
    return values


def philox(counter: list[np.ndarray], k0: int, k1: int) -> list[np.ndarray]:
    """Returns Philox4x32-10 blocks of counters.

    Args:
      counter: Four arrays uint64[n] of 32-bit words.
      k0: First word of the key.
      k1: Second word of the key.

    Returns:
      Four arrays uint64[n] of 32-bit words.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, 3.3.
    """
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product2 >> _WORD) ^ c1 ^ np.uint64(k0), product2 & _LOW
        c2, c3 = (product0 >> _WORD) ^ c3 ^ np.uint64(k1), product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) % 2**32, (k1 + _WEYL[1]) % 2**32
    return [c0, c1, c2, c3]


def _normal(words: list[np.ndarray]) -> np.ndarray:
    high, low, angle, _ = words
    near_one = high >= 2**31  # use digits of 1 - u, not of u
    complement = np.where(near_one, _LOW, np.uint64(0))
    fraction = (high ^ complement) * 2.0**-32 + ((low ^ complement) + 0.5) * 2.0**-64
    logarithm = np.where(near_one, np.log1p(-fraction), np.log(fraction))
    signed = angle.astype(np.uint32).view(np.int32)
    return np.sqrt(-2 * logarithm) * np.sin(np.pi * 2.0**-32 * (signed + 0.5))


def _uniform(words: list[np.ndarray]) -> np.ndarray:
    return ((words[3] >> np.uint64(9)) + 0.5) * 2.0**-23
