"""Noise that is made of fresh normals and of the noise of the steps before, in one pass.

The noise is a pure function of key and steps, whatever the data are. Its perturbation by float32:
docs/explanation/correlated-noise.md.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpsgd.core.marks import marked
from dpsgd.noise.gaussian import normal_line
from dpsgd.noise.philox import COUNTED
from dpsgd.noise.toeplitz import rounded
from dpsgd.packing import packs, split


def no_history(like: Any, bands: int) -> tuple[jax.Array, ...]:
    """Returns the rows before the first step: float32[bands - 1, coordinates] for each pack.

    Args:
      like: Arrays, or their shapes, of the sums.
      bands: b; nothing is kept where it is 1.

    Raises:
      ValueError: if an array has 2^32 coordinates or more.
    """
    sizes = _sizes(like)
    if bands == 1:
        return ()
    shapes = [(bands - 1, sum(sizes[leaf] for leaf in pack)) for pack in packs(sizes)]
    return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)


def next_noise(
    like: Any,
    history: tuple[jax.Array, ...],
    noise_key: Any,
    step: Any,
    coefficients: tuple[float, ...],
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns the noise of a step in standard deviations, a tree like `like`, and the new history.

    Args:
      like: Tree of the sums.
      history: From `no_history`, or the step before.
      noise_key: uint32[4].
      step: int32 scalar, >= 0.
      coefficients: c_0, ..., c_{b-1}.
    """
    leaves, structure = jax.tree.flatten(like)
    parts, kept = packs(_sizes(like)), len(coefficients) - 1
    ratios, gain = rounded(coefficients)

    def line(part: list[int], row: Any = 0) -> jax.Array:
        return normal_line(noise_key, step, part, [leaves[k].size for k in part], row)

    if not kept:
        rows = [gain * line(part) for part in parts]
        return _unpacked(rows, parts, leaves, structure), ()
    slot = marked(jnp.asarray(step, jnp.int32) % kept, "ring", step=step)
    lag = (slot - 1 - np.arange(kept, dtype=np.int32)) % kept  # of row k: n of step t - 1 - lag
    weights = jnp.asarray(ratios)[lag]

    past = [
        jnp.matmul(weights, before, precision=lax.Precision.HIGHEST)  # no TF32
        for before in history
    ]

    def noises(row: Any, past: list[jax.Array]) -> list[jax.Array]:
        return [gain * line(part, row) - sums for part, sums in zip(parts, past, strict=True)]

    rows = _once(noises, past)
    history = tuple(
        lax.dynamic_update_index_in_dim(before, row, slot, 0)
        for before, row in zip(history, rows, strict=True)
    )
    return _unpacked(rows, parts, leaves, structure), history


def empty_buffers(like: Any, count: int) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns the buffers before the first step: so many float32[coordinates] for each pack.

    Args:
      like: Arrays, or their shapes, of the sums.
      count: m.

    Raises:
      ValueError: if an array has 2^32 coordinates or more.
    """
    sizes = _sizes(like)
    lengths = [sum(sizes[leaf] for leaf in pack) for pack in packs(sizes)]
    return tuple(tuple(jnp.zeros(size, jnp.float32) for _ in range(count)) for size in lengths)


def next_buffered_noise(
    like: Any,
    buffers: tuple[tuple[jax.Array, ...], ...],
    noise_key: Any,
    step: Any,
    gain: float,
    exponentials: tuple[tuple[float, float], ...],
) -> tuple[Any, tuple[tuple[jax.Array, ...], ...]]:
    """Returns the noise of a step in standard deviations, a tree like `like`, and new buffers.

    Args:
      like: Tree of the sums.
      buffers: From `empty_buffers`, or the step before.
      noise_key: uint32[4].
      step: int32 scalar, >= 0.
      gain: gamma; a float32 number, as are all that follow.
      exponentials: (omega, lambda) of each buffer.
    """
    leaves, structure = jax.tree.flatten(like)
    parts = packs(_sizes(like))
    factors = [(np.float32(weight), np.float32(decay)) for weight, decay in exponentials]

    past = [
        functools.reduce(
            operator.add, (w * buffer for (w, _), buffer in zip(factors, before, strict=True))
        )
        for before in buffers
    ]

    def noises(row: Any, past: list[jax.Array]) -> list[jax.Array]:
        sizes = [[leaves[k].size for k in part] for part in parts]
        return [
            np.float32(gain) * normal_line(noise_key, step, part, of_part, row) - before
            for part, of_part, before in zip(parts, sizes, past, strict=True)
        ]

    rows = _once(noises, past)
    after = tuple(
        tuple(decay * buffer + row for (_, decay), buffer in zip(factors, before, strict=True))
        for before, row in zip(buffers, rows, strict=True)
    )
    return _unpacked(rows, parts, leaves, structure), after


def _once(
    noises: Callable[[Any, list[jax.Array]], list[jax.Array]], past: list[jax.Array]
) -> list[jax.Array]:
    """Returns `noises` of row 0, which CPUs compute once: in a loop of one row."""

    def in_place(past: list[jax.Array]) -> list[jax.Array]:
        rows = lax.optimization_barrier(jnp.uint32(1))
        return lax.fori_loop(jnp.uint32(0), rows, noises, past)

    return lax.platform_dependent(past, cpu=in_place, default=lambda past: noises(0, past))


def _sizes(like: Any) -> dict[int, int]:
    sizes = {k: int(np.prod(np.shape(leaf))) for k, leaf in enumerate(jax.tree.leaves(like))}
    if max(sizes.values(), default=0) >= COUNTED:
        raise ValueError("correlated noise takes arrays of fewer than 2^32 numbers")
    return sizes


def _unpacked(rows: list, parts: list[list[int]], leaves: list, structure: Any) -> Any:
    found = list(leaves)
    for row, part in zip(rows, parts, strict=True):
        for k, leaf in zip(part, split(row, [leaves[k].shape for k in part]), strict=True):
            found[k] = leaf
    return jax.tree.unflatten(structure, found)
