"""Small arrays side by side in one, so that an operation on every coordinate is compiled once.

The time to compile a step is that of its kernels, and each leaf of the parameters has its own.
Large arrays stay by themselves, as to copy them would cost memory and time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array

SMALL = 2**12
"""Most coordinates of an array that is put beside others."""


def packs(sizes: Mapping[int, int]) -> list[list[int]]:
    """Returns which arrays lie together: all the small ones, and each large one alone.

    Args:
      sizes: How many coordinates each array has, by its number.

    >>> packs({0: 3, 1: 10**6, 2: 5})
    [[0, 2], [1]]
    """
    small = [k for k, size in sizes.items() if size <= SMALL]
    return [pack for pack in (small, *([k] for k, size in sizes.items() if size > SMALL)) if pack]


def join(arrays: Sequence[Array], lead: int = 0) -> Array:
    """Returns one or more arrays side by side, in one axis after their first `lead` ones."""
    flat = [x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=lead)


def split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Returns the arrays of which `join` made the line `joined`."""
    ends = itertools.accumulate(map(math.prod, shapes))
    return [
        joined[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]
