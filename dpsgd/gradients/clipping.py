"""Per-example clipping: batch sums of gradients with L2 norm at most C each."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from accounting.checks import check_count
from dpsgd.core.state import Diagnostics, Scales, join_leaves, split_leaves
from dpsgd.gradients import ghost, memory
from dpsgd.gradients.losses import LossFn, loss_rows, row_loss, takes_key
from dpsgd.gradients.norms import ClipFactor
from dpsgd.gradients.rules import FLAT, ClippingRule

PyTree = Any
_Carry = tuple[dict[int, Array], Diagnostics]
"""Sum of each trained leaf, by the leaf's index, and diagnostics."""
SumTree = PyTree
"""Tree of the structure and shapes of the parameters, in float32."""


def clipped_grad(
    loss_fn: LossFn,
    *,
    l2_clip_norm: ArrayLike,
    clipping: ClippingRule = FLAT,
    microbatch_size: int | None = None,
) -> Callable[..., tuple[SumTree, Diagnostics]]:
    r"""Builds (params, batch, weights) -> (sum of clipped gradients, diagnostics).

    With $g_i$ the gradient of `loss_fn(params, example i)` over all leaves of `params` together,
    cast to float32, and $C$ = `l2_clip_norm`, the function returns

    $$ \sum_{i : w_i > 0,\ g_i \text{ finite}} g_i \min\{1, (1 - 17u) C / \|g_i\|_2\} $$

    in float32 with unit roundoff $u = 2^{-24}$: the SUM, not the mean. Zeroing out one example
    moves it by at most $C$ in L2 norm: the margin of 1e-6 covers rounding, see
    `dpsgd.gradients.norms`.

    One backward pass gives the sum; per-example gradients are formed only for leaves that the loss
    uses in a way without a rule (`dpsgd.explain` lists them). Edge cases:

      * A gradient with a NaN or an infinity contributes exactly zero and is counted.
      * A huge finite gradient (1e30, whose square overflows) is clipped like any other.
      * A row of weight <= 0 or NaN contributes exactly zero, even if it holds NaN. Every other
        weight counts the example once.
      * $C = \infty$ clips nothing (and a sum that overflows float32 is infinite).

    Args:
      loss_fn: Pure function (params, example) -> scalar loss, or (params, example, key). It is
        traced on one example, so that examples cannot mix; a trace that could see the batch, or
        calls foreign code, is refused, see `dpsgd.gradients.isolation`. Data in a closure bypass
        clipping unnoticed.
      l2_clip_norm: $C > 0$, a float or a (traced) scalar; infinity turns clipping off.
      clipping: Clipping rule: `FlatClipping`, as above, `PerLayerClipping` or `AutomaticClipping`.
        Each bounds an example's contribution by norm C.
      microbatch_size: Number of examples processed at a time, in a loop. It changes memory and
        speed, and the result only by the order of float32 additions. By default the most that fit
        in `dpsgd.gradients.memory.MICROBATCH_BYTES`, estimated from the shapes, and on a CPU at
        most `CACHED_EXAMPLES`.

    Returns:
      A pure function of `params` (tree of floating-point arrays), `batch` (tree of arrays with a
      leading axis of B >= 1 examples) and `weights` (float32[B]: 1 for an example, 0 for padding);
      for a loss with a key, also of `keys` ([B], as from `jax.random.split`, or from
      `dpsgd.gradients.losses.example_keys`). Keys drawn independently of the examples cost no
      privacy.

    Raises:
      ValueError: For a clip norm that is not positive, a microbatch size below one, or a loss whose
        signature is ambiguous about a key. The function raises it for missing or unexpected keys
        and keys of kind "rbg", parameters that are not floating-point, unequal leading axes, and a
        loss that is not a real scalar, could see other examples, or closes over traced values.

    Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

    >>> import jax.numpy as jnp
    >>> def loss_fn(w, example):
    ...     return jnp.dot(w, example)
    >>> grad_fn = clipped_grad(loss_fn, l2_clip_norm=1.0)
    >>> batch = jnp.array([[6.0, 8.0], [0.25, 0.5], [jnp.nan, 1.0], [9.0, 9.0]])
    >>> total, diagnostics = grad_fn(jnp.zeros(2), batch, jnp.array([1.0, 1.0, 1.0, 0.0]))
    >>> print([f"{x:.3f}" for x in total], diagnostics.clipped_count)
    ['0.850', '1.300'] 1.0
    """
    if not isinstance(l2_clip_norm, jax.core.Tracer):
        c = float(np.asarray(l2_clip_norm))
        if math.isnan(c) or c <= 0:
            raise ValueError(f"l2_clip_norm must be positive, got {c}")
    total, scales = ClippedSum(loss_fn, clipping, microbatch_size), Scales(l2_clip_norm, None, None)

    def clipped_sum(
        params: PyTree, batch: PyTree, weights: ArrayLike, keys: PyTree = None
    ) -> tuple[SumTree, Diagnostics]:
        return total(params, batch, weights, scales, keys)

    return clipped_sum


@dataclass(frozen=True)
class ClippedSum:
    """Sum of a batch's clipped gradients and its diagnostics, see `clipped_grad`."""

    loss_fn: LossFn
    clipping: ClippingRule
    microbatch_size: int | None

    def __post_init__(self) -> None:
        takes_key(self.loss_fn)  # refuses an ambiguous signature
        if self.microbatch_size is not None:
            check_count("microbatch_size", self.microbatch_size)

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        weights: ArrayLike,
        scales: Scales,
        keys: PyTree = None,
        *,
        devices: int = 1,
        frozen: Collection[int] = (),
    ) -> tuple[SumTree, Diagnostics]:
        """Returns the clipped sum and the diagnostics of a batch.

        Args:
          params: Tree of floating-point arrays.
          batch: Tree of arrays [B, ...].
          weights: float32[B], 1 for an example, 0 for padding.
          scales: Scales with the clip norm C.
          keys: Keys [B], for a loss with a key.
          devices: Number of devices over which the compiler shards the batch, in equal consecutive
            ranges. A microbatch takes `microbatch_size` examples of each range, so that all devices
            work.
          frozen: Indices of leaves that no derivative of the loss reaches: the sum has
            `optax.MaskedNode` in their place, and a clipping rule does not see them.
        """
        loss_fn, weights = row_loss(self.loss_fn), jnp.asarray(weights)
        batch = jax.tree.map(jnp.asarray, loss_rows(batch, keys, takes_key(self.loss_fn)))
        _check(loss_fn, params, batch, weights)
        leaves, dense = jax.tree.leaves(params), split_leaves(params, frozen)[0]
        trained = [k for k in range(len(leaves)) if k not in frozen]
        groups = [[trained[k] for k in group] for group in self.clipping.groups(dense)]

        def add(carry: _Carry, batch: PyTree, weights: Array) -> _Carry:
            """Adds a microbatch to the sums and diagnostics so far."""
            losses, group_norms, add_clipped = ghost.gradients(
                loss_fn, params, batch, groups, devices
            )
            factors = self.clipping.factors(group_norms, scales.l2_clip_norm, weights > 0)
            diagnostics = _diagnostics(losses, factors, weights > 0)
            return add_clipped(carry[0], factors), jax.tree.map(operator.add, carry[1], diagnostics)

        zeros = {k: jnp.zeros(jnp.shape(leaves[k]), jnp.float32) for k in trained}
        carry = zeros, Diagnostics(*(jnp.float32(0),) * 4)
        size, per_scan = weights.shape[0] // devices, self.microbatch_size
        if per_scan is None:
            example_bytes = memory.bytes_per_example(loss_fn, params, _first_example(batch))
            most = memory.CACHED_EXAMPLES if jax.default_backend() == "cpu" else size
            per_scan = memory.microbatch_size(size, example_bytes, most)
        if per_scan >= size:
            total, diagnostics = add(carry, batch, weights)
        else:
            total, diagnostics = lax.fori_loop(
                0,
                -(-size // per_scan),
                lambda k, carry: add(carry, *_microbatch((batch, weights), k, per_scan, devices)),
                carry,
            )
        return join_leaves(split_leaves(params, range(len(leaves)))[0], total), diagnostics


def _diagnostics(losses: Array, factors: Sequence[ClipFactor], real: Array) -> Diagnostics:
    shortened = functools.reduce(operator.or_, (factor.clipped for factor in factors))
    losses = losses.astype(jnp.float32)
    finite = jnp.where(real & jnp.isfinite(losses), losses, 0.0)
    counted = finite, shortened, real & ~factors[0].keep, real
    # As one array, which is one sum to compile.
    return Diagnostics(*jnp.sum(jnp.stack([c.astype(jnp.float32) for c in counted]), 1))


def _microbatch(
    rows: tuple[PyTree, Array], number: ArrayLike, per_scan: int, devices: int
) -> tuple[PyTree, Array]:
    """Returns one microbatch of batch and weights, `per_scan` rows of each device's range.

    The last one also has rows of the one before it, at weight zero, to be of equal size.
    """
    size = rows[1].shape[0] // devices
    start = jnp.minimum(number * per_scan, size - per_scan)

    def sliced(x: Array) -> Array:
        """Returns the microbatch of one array."""
        shards = x.reshape(devices, size, *x.shape[1:])
        shards = lax.dynamic_slice_in_dim(shards, start, per_scan, axis=1)
        return shards.reshape(devices * per_scan, *x.shape[1:])

    batch, weights = jax.tree.map(sliced, rows)
    unread = start + jnp.arange(per_scan) >= number * per_scan
    return batch, jnp.where(jnp.tile(unread, devices), weights, 0)


def _first_example(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)


def _check(loss_fn: LossFn, params: PyTree, batch: PyTree, weights: Array) -> None:
    if not jax.tree.leaves(params):
        raise ValueError("params holds no arrays, so there is nothing to take a gradient of")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {dtype}, but only floating-point leaves "
                "have gradients: pass it as part of the batch or close over it in loss_fn"
            )
    if weights.ndim != 1 or weights.shape[0] == 0:
        raise ValueError(f"weights must have shape [B] with B >= 1, got {list(weights.shape)}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] != weights.shape[0]:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, but the leading "
                f"axis must have one row for each of the {weights.shape[0]} weights"
            )
    loss = jax.eval_shape(loss_fn, params, _first_example(batch))
    if not (
        isinstance(loss, jax.ShapeDtypeStruct)
        and loss.shape == ()
        and jnp.issubdtype(loss.dtype, jnp.floating)
    ):
        raise ValueError(f"loss_fn must return one real floating-point scalar, got {loss}")
