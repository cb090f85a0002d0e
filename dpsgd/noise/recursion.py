"""Recursion of correlated noise: fresh normals minus weighted earlier noises, in one pass.

The noise is a pure function of key and steps, never of the data. Its perturbation by float32:
docs/explanation/correlated-noise.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpsgd.core.gaussian import normal_line
from dpsgd.core.marks import mark_value
from dpsgd.core.philox import COUNTED
from dpsgd.packing import packs, split


def no_history(like: Any, bands: int) -> tuple[jax.Array, ...]:
    """Returns the zero noises before the first step.

    There is one array per pack of leaves.
    Each is float32[bands - 1, coordinates].

    Args:
      like: Tree of the sums, arrays or their shapes.
      bands: Number b of bands; 1 needs no history.

    Raises:
      ValueError: If an array has 2^32 coordinates or more.
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
    """Returns a step's noise in standard deviations, and its history.

    Args:
      like: Tree of the sums, which the noise resembles.
      history: Earlier noises, from `no_history` or the previous step.
      noise_key: uint32[4], key of the noise stream.
      step: int32 scalar, number of the update, >= 0.
      ratios: float32[b - 1], c_1 / c_0, ..., c_{b-1} / c_0.
      gain: float32, 1 / c_0 if the squares of the coefficients add up to 1.
    """
    leaves, structure = jax.tree.flatten(like)
    groups = packs(_sizes(like))

    def recursed(row: Any, past: list[Any]) -> list[jax.Array]:
        """Returns each pack's noise, fresh normals minus `past`, the weighted earlier noises."""
        return [
            gain * normal_line(noise_key, step, group, [leaves[k].size for k in group], row)
            - earlier
            for group, earlier in zip(groups, past, strict=True)
        ]

    def in_place(past: list[jax.Array]) -> list[jax.Array]:  # CPUs compute it once: a loop of a row
        rows = lax.optimization_barrier(jnp.uint32(1))
        return lax.fori_loop(jnp.uint32(0), rows, recursed, past)

    if history_steps := ratios.size:
        slot = mark_value(jnp.asarray(step, jnp.int32) % history_steps, "ring", step=step)
        rows_back = slot - 1 - np.arange(history_steps, dtype=np.int32)
        lag = rows_back % history_steps  # row k holds n of step t - 1 - lag[k]
        weights = jnp.asarray(ratios)[lag]
        past = [
            jnp.matmul(weights, earlier, precision=lax.Precision.HIGHEST)  # no TF32
            for earlier in history
        ]
        rows = lax.platform_dependent(past, cpu=in_place, default=lambda past: recursed(0, past))
        history = tuple(
            lax.dynamic_update_index_in_dim(earlier, row, slot, 0)
            for earlier, row in zip(history, rows, strict=True)
        )
    else:
        rows = recursed(0, [0.0] * len(groups))
    for row, group in zip(rows, groups, strict=True):
        for k, leaf in zip(group, split(row, [leaves[k].shape for k in group]), strict=True):
            leaves[k] = leaf
    return jax.tree.unflatten(structure, leaves), history


def _sizes(like: Any) -> dict[int, int]:
    sizes = {k: int(np.prod(np.shape(leaf))) for k, leaf in enumerate(jax.tree.leaves(like))}
    if max(sizes.values(), default=0) >= COUNTED:
        raise ValueError("correlated noise takes arrays of fewer than 2^32 coordinates each")
    return sizes
