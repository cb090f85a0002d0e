"""Packing of small arrays into one, so that an operation is compiled once for them all.

A step's compile time is its kernels', and each leaf of the parameters has its own. Large arrays
stay separate, as copies would cost memory and time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array

SMALL = 2**12
"""Most coordinates of an array that is packed with others."""


def packs(sizes: Mapping[int, int]) -> list[list[int]]:
    """Returns groups of array indices, small arrays together.

    Args:
      sizes: Number of coordinates of each array, by its index.

    >>> packs({0: 3, 1: 10**6, 2: 5})
    [[0, 2], [1]]
    """
    small = [k for k, size in sizes.items() if size <= SMALL]
    return [pack for pack in (small, *([k] for k, size in sizes.items() if size > SMALL)) if pack]


def join(arrays: Sequence[Array], lead: int = 0) -> Array:
    """Returns arrays joined in one axis.

    >>> join([jnp.zeros(3), jnp.zeros((2, 2))]).shape
    (7,)

    Args:
      arrays: Arrays with equal first `lead` axes, which stay; the others are flattened.
      lead: Number of axes that stay.
    """
    flat = [x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=lead)


def split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Returns the arrays that `join` joined.

    >>> [x.shape for x in split(jnp.zeros(7), [(3,), (2, 2)])]
    [(3,), (2, 2)]

    Args:
      joined: Array with one axis.
      shapes: Shape of each array.
    """
    stops = itertools.accumulate(map(math.prod, shapes))
    return [
        joined[stop - math.prod(shape) : stop].reshape(shape)
        for stop, shape in zip(stops, shapes, strict=True)
    ]
