"""Float32 Gaussian noise for DP-SGD with proved tails and support.

Philox4x32-10 encrypts one counter per coordinate, so that noise is a pure function of (key, step,
leaf, index). Box and Muller's polar form turns each block into a normal. Sum plus noise is rounded
stochastically to a public grid, which is post-processing of the Gaussian mechanism. Proof and
limits: docs/explanation/float-noise-on-a-public-grid.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpsgd.core.marks import mark_value
from dpsgd.core.normals import half_circle_sine, normal, radius, uniform
from dpsgd.core.philox import COUNTED, Coordinates, StepKey, word, words_at
from dpsgd.core.state import Scales
from dpsgd.packing import join, packs, split

GRID_BITS = 18
"""The noise's standard deviation has 2^GRID_BITS to 2^(GRID_BITS + 1) grid cells."""

# Below this the grid would leave the normal range of float32. Rounding the noise up is safe.
_SMALLEST_STDDEV = np.float32(2.0**-100)


def grid(stddev: jax.typing.ArrayLike) -> jax.Array:
    """Return the spacing of the public output grid, float32 scalar.

    The spacing is g = 2^(floor(log2 stddev) - GRID_BITS).

    Args:
      stddev: Standard deviation of the noise, float32 scalar; may be traced. Values below 2^-100
        count as 2^-100.

    >>> float(grid(1.5)) == 2.0**-18
    True
    """
    stddev = jnp.maximum(jnp.asarray(stddev, jnp.float32), _SMALLEST_STDDEV)
    bits = lax.bitcast_convert_type(stddev, jnp.int32)
    exponent = (bits >> 23) - GRID_BITS  # stddev is positive and normal: no sign, no subnormals
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def standard_normal(
    noise_key: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
    leaf: jax.typing.ArrayLike,
    shape: tuple[int, ...],
) -> jax.Array:
    """Return standard normal float32 noise.

    Each coordinate is a function of (noise_key, step, leaf, its row-major index) alone. For DP use
    `add_gaussian_noise`, which puts the result on the public grid.

    Args:
      noise_key: uint32 `[4]`, from `RootKey.noise_key`; may be traced.
      step: Training step, an integer in [0, 2^32); may be traced.
      leaf: Index of the array within its tree, an integer in [0, 2^32); may be traced.
      shape: Shape of the result; fewer than 2^32 along each axis and 2^64 in all.

    >>> standard_normal(np.arange(4, dtype=np.uint32), 0, 0, (2, 3)).shape
    (2, 3)

    Raises:
      ValueError: If `noise_key` is not uint32 `[4]`.
    """
    return _draw(normal, StepKey(noise_key, step), Coordinates(leaf), shape)


def add_gaussian_noise(
    tree: Any,
    noise_key: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
    stddev: jax.typing.ArrayLike,
    *,
    divisor: jax.typing.ArrayLike = 1.0,
    noise: Any = None,
    spread: float = 1.0,
) -> Any:
    """Return the noised `tree` on a public grid, over `divisor`.

    For each leaf S the result is (S + stddev z) / divisor, z standard normal, where the sum is
    rounded stochastically to multiples of g = `grid(stddev)`. Noise is drawn once on the global
    array, independent of sharding. A leaf's index in `jax.tree.leaves(tree)` selects its noise.

    Args:
      tree: *Sum* of clipped gradients, a tree of float32 arrays (not yet divided by anything).
      noise_key: uint32 `[4]`, from `RootKey.noise_key`; may be traced.
      step: Training step, an integer in [0, 2^32), used once per run; may be traced.
      stddev: Standard deviation of the noise, noise multiplier times l2 clip norm, in the units of
        `tree`; may be traced. Values below 2^-100 count as 2^-100, also a traced 0: no comparison
        decides whether there is noise, as XLA takes numbers below 2^-126 for 0. A traced stddev
        that is negative, infinite or NaN gives NaN.
      divisor: Public float32 scalar that divides the noised sum in the same pass; may be traced.
      noise: Noise in place of z, a tree like `tree` that depends on no data and not on the word U
        of the Philox blocks that rounds it.
      spread: Upper bound on the standard deviation of `noise`; a larger one makes the grid coarser.

    Raises:
      ValueError: If a leaf is not float32 or has an axis of 2^32 or more, `noise_key` is not uint32
        `[4]`, or a concrete `stddev` or `divisor` is not positive or not finite.

    Source: the Gaussian mechanism of DP-SGD (Abadi et al., "Deep learning with differential
    privacy", 2016, algorithm 1), rounded after Mironov 2012.
    """
    for name, scalar in (("stddev", stddev), ("divisor", divisor)):
        if not isinstance(scalar, jax.core.Tracer) and not 0 < np.asarray(scalar) < math.inf:
            raise ValueError(f"{name} must be finite and positive, got {scalar}")
    leaves, structure = jax.tree.flatten(tree)
    _check_sums(leaves)
    key = StepKey(noise_key, word(step, "step"))
    inputs = {"key": noise_key, "step": key.step, "stddev": stddev, "divisor": divisor}
    spacing, cells = _grid_of(stddev, spread)
    # Unknown to the compiler, which would multiply by the inverse of a constant: other bits.
    opaque_divisor = lax.optimization_barrier(jnp.asarray(divisor, jnp.float32))
    totals = [jnp.asarray(total) for total in leaves]
    noises = [None] * len(leaves) if noise is None else jax.tree.leaves(noise)
    noising = _Noising(key, spacing, cells, opaque_divisor, noises)
    outputs = lax.platform_dependent(totals, cpu=noising.in_place, default=noising.fused)
    outputs = [
        mark_value(output, "release", total=total, noise=z, **inputs)
        for output, total, z in zip(outputs, totals, noises, strict=True)
    ]
    return jax.tree.unflatten(structure, outputs)


def _check_sums(leaves: list) -> None:
    for leaf, total in enumerate(leaves):
        if jnp.result_type(total) != jnp.float32:
            raise ValueError(
                f"noise is added to float32 sums only, but leaf {leaf} is "
                f"{jnp.result_type(total)}; cast before clipping and summing"
            )
        if max(jnp.shape(total), default=0) >= COUNTED:
            raise ValueError(f"leaf {leaf} has shape {jnp.shape(total)}: an axis exceeds 32 bits")


class _Noising(NamedTuple):
    """Noised sums over a divisor, for accelerators in one pass and for CPUs in place.

    Accelerators fuse noise and optimizer into one pass. XLA's compiler for CPUs has no fusion with
    several outputs: it would compute the noise anew for each moment that the optimizer keeps. It
    fuses nothing across the border of a loop, so there the noise is made once and added in the
    place of the sum: a loop over the one row of an array [1, *shape]. As every counter depends on
    the row, nothing is computed and stored beforehand. The barrier keeps XLA from knowing the
    number of rows, and from taking the loop away.
    """

    key: StepKey
    spacing: jax.Array
    cells: jax.Array
    divisor: jax.Array
    noises: list
    """Noise in place of fresh normals, by leaf; None for fresh ones."""

    def fused(self, totals: list) -> list:
        """Returns the outputs of all leaves, leaf by leaf."""
        return self._noised(0, totals, [_names([k], {}) for k in range(len(totals))], self.noises)

    def in_place(self, totals: list) -> list:
        """Returns the outputs of all leaves, small ones side by side."""
        rows = lax.optimization_barrier(jnp.uint32(1))
        shapes = [total.shape for total in totals]
        lined = {leaf: total.size for leaf, total in enumerate(totals) if _fits_a_line(total)}
        groups = [*packs(lined), *([leaf] for leaf in range(len(totals)) if leaf not in lined)]
        names = [_names(pack, lined) for pack in groups]

        def side_by_side(leaves: list) -> list:
            """Returns the arrays of each group as one."""
            return [
                join([leaves[leaf] for leaf in pack]) if pack[0] in lined else leaves[pack[0]]
                for pack in groups
            ]

        arrays = side_by_side(totals)
        lines = [] if not self.noises or self.noises[0] is None else side_by_side(self.noises)

        def advanced(row: jax.Array, arrays: list) -> list:
            """Returns the outputs of all groups."""
            # Plus 0, which depends on the row: else its rounding would be stored beforehand.
            row_noises = [z + row.astype(jnp.float32) for z in lines] or [None] * len(groups)
            return self._noised(row, arrays, names, row_noises)

        arrays = lax.fori_loop(jnp.uint32(0), rows, advanced, arrays)
        outputs = list(totals)
        for pack, array in zip(groups, arrays, strict=True):
            pieces = split(array, [shapes[leaf] for leaf in pack]) if pack[0] in lined else [array]
            for leaf, output in zip(pack, pieces, strict=True):
                outputs[leaf] = output
        return outputs

    def _noised(self, row: Any, totals: list, names: list, noises: list) -> list:
        outputs = []
        for total, (leaf, position), z in zip(totals, names, noises, strict=True):
            # Times the inverse: exact like the division, as both are powers of two.
            total_cells = total * (1 / self.spacing)
            whole_cells = jnp.round(total_cells)
            fraction = total_cells - whole_cells
            one_axis = position is not None or _fits_a_line(total)
            coordinates = Coordinates(leaf, row, position, one_axis)
            rounded = _rounded_noise(self.key, coordinates, self.cells, fraction, z)
            outputs.append((whole_cells + rounded) * self.spacing / self.divisor)
        return outputs


def normal_line(
    noise_key: Any, step: Any, pack: list[int], sizes: list[int], row: Any = 0
) -> jax.Array:
    """Return the noise of leaves side by side: float32 `[numbers]`.

    Args:
      noise_key: uint32 `[4]`, key of the noise stream.
      step: Training step.
      pack: Indices of the leaves in their tree.
      sizes: Numbers of coordinates of these leaves, fewer than 2^32 in all.
      row: 0, or a traced 0, on which every number then depends.
    """
    leaf, position = _names(pack, dict(zip(pack, sizes, strict=True)))
    coordinates = Coordinates(leaf, row, position, one_axis=True)
    return _draw(normal, StepKey(noise_key, step), coordinates, (sum(sizes),))


def add_row_noise(
    total: jax.Array, leaf: int, rows: jax.Array, key: StepKey, scales: Scales
) -> jax.Array:
    """Return the noised mean of table rows, float32 `[U, ...]`.

    The result is that part of the output of `add_gaussian_noise`, on the same grid.

    Args:
      total: Sums of the rows, float32 `[U, ...]`.
      leaf: Index of the table in its tree; purpose `STEP` keeps its noise apart from dense leaves.
      rows: Indices of the rows in the table, int32 `[U]`.
      key: Key of the step.
      scales: Scales sigma C, in the units of `total`, and b, which divides the noised sum.
    """
    key = key._replace(step=word(key.step, "step"))
    stddev, divisor = scales.noise_stddev, scales.expected_batch_size
    inputs = {"key": key.noise_key, "step": key.step, "stddev": stddev, "divisor": divisor}
    spacing, cells = _grid_of(stddev)
    # One quotient of scalars: of arrays, some programs take products with the inverse.
    cell = spacing / jnp.asarray(divisor, jnp.float32)
    flat = total.ravel()
    total_cells = flat * (1 / spacing)
    whole_cells = jnp.round(total_cells)
    table = TableRows(leaf, STEP, rows, flat.size // len(rows))
    rounded = _rounded_noise(key, table.coordinates, cells, total_cells - whole_cells)
    noised = ((whole_cells + rounded) * cell).reshape(total.shape)
    return mark_value(noised, "release", total=total, **inputs, rows=rows)


STEP, MOMENTUM, VALUE = 1, 2, 3
"""Purposes of noise in table rows: one step, and momentum and value of a gap; 0 is dense."""


class TableRows(NamedTuple):
    """Rows of a table whose noise is drawn, for one purpose."""

    leaf: int
    """Index of the table in its tree, below 2^24."""
    purpose: int
    """Purpose of the noise, below 2^8; different purposes are independent."""
    rows: jax.Array
    """Indices of the rows, int32 `[U]`."""
    width: int
    """Coordinates of a row; fewer than 2^32 in the whole table."""

    @property
    def coordinates(self) -> Coordinates:
        """Names of all coordinates of the rows."""
        along = lax.iota(jnp.uint32, self.width)
        position = (self.rows.astype(jnp.uint32)[:, None] * np.uint32(self.width) + along).ravel()
        leaf = jnp.uint32(self.leaf + (self.purpose << 24))
        return Coordinates(leaf, position=position, one_axis=True)


def normal_at(noise_key: Any, step: Any, table: TableRows) -> jax.Array:
    """Return standard normals of table rows: float32 `[U, width]`.

    Args:
      noise_key: uint32 `[4]`, key of the noise stream.
      step: Training step.
      table: Rows of the table, and the purpose of the normals.
    """
    return _draw_rows(normal, StepKey(noise_key, step), table)


def uniform_at(noise_key: Any, step: Any, table: TableRows) -> jax.Array:
    """Return uniforms in (0, 1) of table rows: float32 `[U, width]`.

    They are independent of the normals that `normal_at` returns for the same arguments.
    """
    return _draw_rows(lambda words: uniform(words[3]), StepKey(noise_key, step), table)


def _draw_rows(transform: Any, key: StepKey, table: TableRows) -> jax.Array:
    coordinates = table.coordinates
    return _draw(transform, key, coordinates, coordinates.position.shape, table.rows)


def _draw(
    transform: Any, key: StepKey, coordinates: Coordinates, shape: Any, rows: Any = None
) -> jax.Array:
    """Return a transform of the Philox words of each coordinate, marked as a draw."""
    key = key._replace(step=word(key.step, "step"))
    values = transform(words_at(key, coordinates, shape))
    values = values if rows is None else values.reshape(len(rows), -1)
    return mark_value(values, "draw", key=key.noise_key, step=key.step, rows=rows)


def _grid_of(stddev: Any, spread: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return the grid spacing for noise of this spread, and the standard deviation in cells."""
    stddev = jnp.asarray(stddev, jnp.float32)
    # A traced stddev that is wrong must spoil the result, and never lead to too little noise.
    stddev = jnp.where(stddev >= 0, stddev, jnp.nan)
    coarser = max(0, math.ceil(math.log2(spread * 10 / 32)))  # 32 * 2^(GRID_BITS + 1) is 2^24
    spacing = grid(stddev) * 2.0**coarser if coarser else grid(stddev)
    # In [2^GRID_BITS, 2^(GRID_BITS + 1)), where the grid is not coarser.
    return spacing, jnp.maximum(stddev, _SMALLEST_STDDEV) / spacing


def _names(pack: list[int], sizes: dict[int, int]) -> tuple[Any, jax.Array | None]:
    if len(pack) == 1:
        return np.uint32(pack[0]), None
    leaf = [jnp.full(sizes[k], k, jnp.uint32) for k in pack]
    return jnp.concatenate(leaf), jnp.concatenate([lax.iota(jnp.uint32, sizes[k]) for k in pack])


def _fits_a_line(total: jax.Array) -> bool:
    """True if one 32-bit axis can count all coordinates of `total`, with the same noise.

    Reshaping an explicitly sharded array is its owner's decision.
    """
    return total.size < COUNTED and all(axis is None for axis in jax.typeof(total).sharding.spec)


@jax.jit  # traced once for leaves of one shape
def _rounded_noise(
    key: StepKey, coordinates: Coordinates, cells: Any, fraction: jax.Array, noise: Any = None
) -> jax.Array:
    """Return the stochastic rounding of `fraction` + `cells` times z (or `noise`): float32."""
    words = words_at(key, coordinates, fraction.shape)
    if noise is None:
        scaled = (radius(words[0], words[1]) * cells) * half_circle_sine(words[2])
    else:
        scaled = noise * cells
    below = jnp.floor(scaled)
    return below + jnp.ceil((scaled - below) + (fraction - uniform(words[3])))
