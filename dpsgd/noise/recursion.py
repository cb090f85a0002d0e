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
from dpsgd.noise.correlated import rounded
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
    ratios, gain = rounded(coefficients)
    line = _Line(like, noise_key, step, gain)
    if not ratios.size:
        return line.unpacked([gain * line.normals(part) for part in line.parts]), ()
    kept = ratios.size
    slot = marked(jnp.asarray(step, jnp.int32) % kept, "ring", step=step)
    lag = (slot - 1 - np.arange(kept, dtype=np.int32)) % kept  # of row k: n of step t - 1 - lag
    weights = jnp.asarray(ratios)[lag]
    past = [
        jnp.matmul(weights, before, precision=lax.Precision.HIGHEST)  # no TF32
        for before in history
    ]
    rows = line.less(past)
    history = tuple(
        lax.dynamic_update_index_in_dim(before, row, slot, 0)
        for before, row in zip(history, rows, strict=True)
    )
    return line.unpacked(rows), history


class _Line:
    """The noise of a step, in one line for each pack of leaves."""

    def __init__(self, like: Any, noise_key: Any, step: Any, gain: np.float32) -> None:
        self._leaves, self._structure = jax.tree.flatten(like)
        self.parts, self._gain = packs(_sizes(like)), gain
        self._named = noise_key, step

    def normals(self, part: list[int], row: Any = 0) -> jax.Array:
        return normal_line(*self._named, part, [self._leaves[k].size for k in part], row)

    def less(self, past: list[jax.Array]) -> list[jax.Array]:
        """Returns gain z less `past`, which CPUs compute once: in a loop of one row."""

        def noises(row: Any, past: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(self.parts, past, strict=True)
            return [self._gain * self.normals(part, row) - before for part, before in pairs]

        def in_place(past: list[jax.Array]) -> list[jax.Array]:
            rows = lax.optimization_barrier(jnp.uint32(1))
            return lax.fori_loop(jnp.uint32(0), rows, noises, past)

        return lax.platform_dependent(past, cpu=in_place, default=lambda past: noises(0, past))

    def unpacked(self, rows: list[jax.Array]) -> Any:
        """Returns the tree of which these are the lines."""
        found = list(self._leaves)
        for row, part in zip(rows, self.parts, strict=True):
            leaves = split(row, [found[k].shape for k in part])
            for k, leaf in zip(part, leaves, strict=True):
                found[k] = leaf
        return jax.tree.unflatten(self._structure, found)


def _sizes(like: Any) -> dict[int, int]:
    sizes = {k: int(np.prod(np.shape(leaf))) for k, leaf in enumerate(jax.tree.leaves(like))}
    if max(sizes.values(), default=0) >= COUNTED:
        raise ValueError("correlated noise takes arrays of fewer than 2^32 numbers")
    return sizes
