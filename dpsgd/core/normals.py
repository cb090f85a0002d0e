"""Standard normals and uniforms from random words, float32.

Box and Muller's polar form: z = sqrt(-2 ln u) sin(psi) is standard normal for independent u and
psi, uniform in (0, 1) and in (-pi, pi).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SQRT_HALF = np.float32(math.sqrt(0.5))
_SQRT_HALF_BITS = np.int32(_SQRT_HALF.view(np.int32))
_SQRT_HALF_WORD = np.uint32(round(2**32 * math.sqrt(0.5)))
_LN2 = np.float32(math.log(2.0))

# ln(1 + f) = f - f^2/2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1], relative error 3.2e-8, and
# sin(pi x / 2) = x Q(x^2) on [-1, 1], relative error 5.4e-9. Minimax fits by Lawson's iteration.
_LOG1P = (0.3333390951, -0.2500133812, 0.1996306330, -0.1657758504, 0.1491476893, -0.1426748633,
          0.0870043039)  # fmt: skip
_SIN = (1.5707963705, -0.6459637284, 0.0796896815, -0.0046737664, 0.0001514851)


def normal(words: tuple[jax.Array, ...]) -> jax.Array:
    """Return standard normals.

    Args:
      words: Three or more arrays of uniform and independent words, uint32 of one shape.
    """
    return radius(words[0], words[1]) * half_circle_sine(words[2])


def uniform(word: jax.Array) -> jax.Array:
    """Return (w + 1/2) / 2^23 for w the upper 23 bits of the `word`: uniform in (0, 1)."""
    return ((word >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)


@jax.jit  # traced once for words of one shape
def radius(high: jax.Array, low: jax.Array) -> jax.Array:
    """Return sqrt(-2 ln u) for u = (2^32 high + low + 1/2) / 2^64, relative error below 3e-7.

    Args:
      high: Upper words of u, uint32.
      low: Lower words of u, uint32.
    """
    # Above sqrt(1/2), take 1 - u, whose integer form is the complement of both words: exact.
    near_one = high >= _SQRT_HALF_WORD
    flip = jnp.where(near_one, np.uint32(0xFFFFFFFF), np.uint32(0))
    high, low = high ^ flip, low ^ flip
    tail = (low.astype(jnp.float32) + 0.5) * np.float32(2.0**-64)
    distance = high.astype(jnp.float32) * np.float32(2.0**-32) + tail  # u, or 1 - u: relative 2^-23

    # u = 2^exponent (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); near one simply f = -(1 - u).
    bits = lax.bitcast_convert_type(distance, jnp.int32) - _SQRT_HALF_BITS
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) + _SQRT_HALF_BITS, jnp.float32)
    f = jnp.where(near_one, -distance, mantissa - 1.0)
    exponent = jnp.where(near_one, 0, bits >> 23).astype(jnp.float32)

    log1p = f - (f * f) * (0.5 - f * _polynomial(_LOG1P, f))
    return jnp.sqrt(-2.0 * (exponent * _LN2 + log1p))


@jax.jit  # traced once for words of one shape
def half_circle_sine(word: jax.Array) -> jax.Array:
    """Return sin(psi) for psi = pi (w + 1/2) / 2^32, w in [-2^31, 2^31) the signed `word`."""
    signed = lax.bitcast_convert_type(word, jnp.int32).astype(jnp.float32) + 0.5
    x = signed * np.float32(2.0**-31)
    return x * _polynomial(_SIN, x * x)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    result = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + np.float32(coefficient)
    return result
