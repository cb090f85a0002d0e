"""Computes a private gradient slowly in float64, as DP-SGD is defined.

`reference_step` computes the gradient of every example, clips it, sums, adds noise and divides. It
shares no code with the compiled step but the loss and its differentiation. Noise comes from
`dpsgd.audit.reference`, the documented law of the keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from dpsgd.audit import reference
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.engine.programs import in_32_bits
from dpsgd.gradients.rules import FLAT, AutomaticClipping, ClippingRule, PerLayerClipping
from dpsgd.noise.correlated import BandedToeplitz

PyTree = Any

_CHUNK = 128  # examples that are differentiated together


def reference_step(
    loss_fn: Callable[..., Any],
    params: PyTree,
    rows: PyTree,
    weights: np.ndarray,
    mechanism: Mechanism,
    noise_key: np.ndarray,
    step: int,
    *,
    clipping: ClippingRule = FLAT,
    frozen: Collection[int] = (),
    loss_keys: Any = None,
) -> list[np.ndarray | None]:
    r"""Returns the private mean gradient of one step of DP-SGD.

    .. math:: \left(\sum_{i: w_i > 0} \mathrm{clip}_C(g_i) + \sigma C n\right) / b

    with :math:`g_i` the gradient of `loss_fn` at row i of `rows`, zero if an entry is not finite;
    :math:`w_i` its weight in `weights`; :math:`\mathrm{clip}_C` the rule `clipping`; and C, sigma,
    b and the law of n taken from `mechanism`.

    Args:
      loss_fn: (params, row) -> scalar, or (params, row, key) -> scalar.
      params: Tree of floating-point arrays.
      rows: Tree of arrays [B, ...], one row for each clipped example (or unit of examples).
      weights: float[B]; a row counts where its weight is positive.
      mechanism: Noise multiplier, clip norm, sampler and noise law.
      noise_key: uint32[4], key of the noise stream of the attempt.
      step: Number of the step in its attempt, at least 0.
      clipping: Flat, per-layer or automatic clipping.
      frozen: Indices of the leaves that get no gradient.
      loss_keys: JAX keys [B], for a loss that takes a key.

    Returns:
      float64 arrays in the shapes of the leaves of `params`; None for frozen leaves.

    Raises:
      TypeError: if `clipping` or the noise of `mechanism` has no reference here.

    >>> from samplers import Deterministic
    >>> mechanism, rows = Mechanism(Deterministic(2, 2), 0.0, 1.0), np.array([[3.0], [0.5]])
    >>> reference_step(jax.numpy.dot, np.zeros(1), rows, np.ones(2), mechanism, np.zeros(4), 0)
    [array([0.75])]

    Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1.
    """
    leaves = jax.tree.leaves(params)
    trained = [k for k in range(len(leaves)) if k not in frozen]
    scale = mechanism.l2_clip_norm
    total = [np.zeros(np.shape(leaves[k])) for k in trained]
    counted = np.flatnonzero(np.asarray(weights) > 0)
    groups = leaf_groups(clipping, params, trained)
    for start in range(0, counted.size, _CHUNK):
        grads = _gradients(loss_fn, params, rows, loss_keys, counted[start : start + _CHUNK])
        trained_grads = [grads[k].astype(np.float64) for k in trained]
        for group, factor in zip(
            groups, clip_factors(clipping, trained_grads, groups, scale), strict=True
        ):
            for k in group:
                finite = np.where(_beside(factor, trained_grads[k]) > 0, trained_grads[k], 0.0)
                total[k] += np.tensordot(factor, finite, axes=1)
    deviation, size = mechanism.noise_multiplier * scale, mechanism.sampler.expected_batch_size
    private: list[np.ndarray | None] = [None] * len(leaves)
    for number, (k, summed) in enumerate(zip(trained, total, strict=True)):
        noise = noise_values(mechanism.noise, noise_key, step, number, summed.size)
        private[k] = np.asarray((summed + deviation * noise.reshape(summed.shape)) / size)
    return private


def clip_factors(
    clipping: ClippingRule,
    gradients: Sequence[np.ndarray],
    groups: Sequence[Sequence[int]],
    l2_clip_norm: float,
) -> list[np.ndarray]:
    r"""Returns the clip factors of examples by leaf group.

    With :math:`\|g\|` the norm of one example's gradient over a group and C = `l2_clip_norm`: flat
    :math:`\min(1, C / \|g\|)`, automatic :math:`C / (\|g\| + \gamma)`, per-layer
    :math:`\min(1, C_k / \|g\|)` with :math:`C_k^2` the group's share of :math:`C^2`.

    Args:
      clipping: Clipping rule.
      gradients: float64[B, ...] of every trained leaf.
      groups: Positions in `gradients`, one list for each group.
      l2_clip_norm: C > 0.

    Returns:
      float64[B] of every group; zero for an example with an entry that is not finite.

    Raises:
      TypeError: if the rule has no reference here.

    >>> clip_factors(FLAT, [np.array([[3.0, 4.0], [0.3, 0.4]])], [[0]], 1.0)[0].tolist()
    [0.2, 1.0]
    """
    require_reference(clipping)
    squares = [sum(_square_sums(gradients[k]) for k in group) for group in groups]
    norms = [np.sqrt(square) for square in squares]
    finite = np.all([np.isfinite(norm) for norm in norms], axis=0)
    shares: Sequence[float] = [1.0] * len(groups)
    if isinstance(clipping, PerLayerClipping):
        shares = clipping.shares or shares
    factors = []
    for norm, share in zip(norms, shares, strict=True):
        bound = l2_clip_norm * math.sqrt(share / sum(shares))
        with np.errstate(divide="ignore", invalid="ignore"):
            if isinstance(clipping, AutomaticClipping):
                factor = bound / (norm + clipping.gamma)
            else:
                factor = np.minimum(1.0, bound / norm)
        factors.append(np.where(finite, factor, 0.0))
    return factors


def require_reference(clipping: ClippingRule) -> None:
    """Raises TypeError unless `clipping` is a built-in rule."""
    if type(clipping) not in (type(FLAT), PerLayerClipping, AutomaticClipping):
        raise TypeError(
            f"clipping={clipping!r} has no reference implementation; use a built-in rule"
        )


def noise_values(noise: Any, noise_key: np.ndarray, step: int, leaf: int, size: int) -> np.ndarray:
    r"""Returns a leaf's noise n in units of standard deviations.

    Independent noise is :math:`n_t = z_t`, banded noise
    :math:`n_t = (z_t - c_1 n_{t-1} - \dots - c_{b-1} n_{t-b+1}) / c_0`, with n before step 0 zero,
    c the coefficients of `noise` and z the normals of `dpsgd.audit.reference.normals`.

    Args:
      noise: `Independent` or `BandedToeplitz`.
      noise_key: Key of the noise, uint32[4].
      step: Step t, at least 0.
      leaf: Index of the array among the trained leaves.
      size: Number of coordinates.

    Returns:
      float64[size].

    Raises:
      TypeError: if the noise has no reference here.
    """
    index = np.arange(size)
    if isinstance(noise, BandedToeplitz):
        first, *lagged = noise.coefficients
        history: list[np.ndarray] = []
        for t in range(step + 1):
            earlier = zip(lagged, reversed(history), strict=False)
            z = reference.normals(noise_key, t, leaf, index)
            history.append((z - sum(c * x for c, x in earlier)) / first)
        return history[-1]
    if not isinstance(noise, Independent):
        raise TypeError(
            f"noise={noise!r} has no reference implementation; use Independent or BandedToeplitz"
        )
    return reference.normals(noise_key, step, leaf, index)


def leaf_groups(clipping: ClippingRule, params: PyTree, trained: Sequence[int]) -> list[list[int]]:
    """Returns the groups of leaves that are clipped together.

    Args:
      clipping: Clipping rule.
      params: Tree of parameters.
      trained: Indices of the leaves that get a gradient.

    Returns:
      Indices into `trained`, one list for each group.
    """
    masked = [leaf if k in trained else None for k, leaf in enumerate(jax.tree.leaves(params))]
    return clipping.groups(jax.tree.unflatten(jax.tree.structure(params), masked))


@functools.partial(jax.jit, static_argnums=0)
def _vmapped(loss_fn: Callable[..., Any], params: PyTree, *of_row: Any) -> PyTree:
    return jax.vmap(jax.grad(loss_fn), (None, *(0,) * len(of_row)))(params, *of_row)


def _gradients(loss_fn, params, rows, loss_keys, indices: np.ndarray) -> list[np.ndarray]:
    """Returns the gradients of the examples `indices`, a list of leaves [n, ...]."""
    padded = np.resize(indices, _CHUNK)  # one shape, one program
    of_row = [jax.tree.map(lambda column: column[padded], rows)]
    if loss_keys is not None:
        of_row.append(loss_keys[padded])
    with in_32_bits():
        grads = jax.tree.leaves(_vmapped(loss_fn, params, *of_row))
    return [np.asarray(leaf.astype("float32"))[: indices.size] for leaf in grads]


def _square_sums(gradient: np.ndarray) -> np.ndarray:
    return np.square(gradient.reshape(len(gradient), -1)).sum(axis=1)


def _beside(factor: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    return factor.reshape(-1, *[1] * (gradient.ndim - 1))
