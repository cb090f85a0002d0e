"""Noise that is made of fresh normals and of the noise of the steps before, in one pass.

The noise is a pure function of key and steps, whatever the data are. Its perturbation by float32:
docs/explanation/correlated-noise.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpsgd.core.marks import marked
from dpsgd.noise.gaussian import normal_line
from dpsgd.noise.philox import COUNTED
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
    ratios: np.ndarray,
    gain: np.float32,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns the noise of a step in standard deviations, a tree like `like`, and the new history.

    Args:
      like: Tree of the sums.
      history: From `no_history`, or the step before.
      noise_key: uint32[4].
      step: int32 scalar, >= 0.
      ratios: float32[b - 1], c_1 / c_0, ..., c_{b-1} / c_0.
      gain: float32, 1 / c_0 where the squares of the coefficients add up to 1.
    """
    leaves, structure = jax.tree.flatten(like)
    parts = packs(_sizes(like))

    def less(row: Any, past: list[Any]) -> list[jax.Array]:
        return [
            gain * normal_line(noise_key, step, part, [leaves[k].size for k in part], row) - before
            for part, before in zip(parts, past, strict=True)
        ]

    def in_place(past: list[jax.Array]) -> list[jax.Array]:  # CPUs compute it once: a loop of a row
        rows = lax.optimization_barrier(jnp.uint32(1))
        return lax.fori_loop(jnp.uint32(0), rows, less, past)

    if kept := ratios.size:
        slot = marked(jnp.asarray(step, jnp.int32) % kept, "ring", step=step)
        lag = (slot - 1 - np.arange(kept, dtype=np.int32)) % kept  # of row k: n of step t - 1 - lag
        weights = jnp.asarray(ratios)[lag]
        past = [
            jnp.matmul(weights, before, precision=lax.Precision.HIGHEST)  # no TF32
            for before in history
        ]
        rows = lax.platform_dependent(past, cpu=in_place, default=lambda past: less(0, past))
        history = tuple(
            lax.dynamic_update_index_in_dim(before, row, slot, 0)
            for before, row in zip(history, rows, strict=True)
        )
    else:
        rows = less(0, [0.0] * len(parts))
    for row, part in zip(rows, parts, strict=True):
        for k, leaf in zip(part, split(row, [leaves[k].shape for k in part]), strict=True):
            leaves[k] = leaf
    return jax.tree.unflatten(structure, leaves), history


def _sizes(like: Any) -> dict[int, int]:
    sizes = {k: int(np.prod(np.shape(leaf))) for k, leaf in enumerate(jax.tree.leaves(like))}
    if max(sizes.values(), default=0) >= COUNTED:
        raise ValueError("correlated noise takes arrays of fewer than 2^32 numbers")
    return sizes
