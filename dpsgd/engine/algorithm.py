"""DP-SGD as a product: per-example clipping x noise x optimizer."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpsgd.core.algorithm import Algorithm, Context, privatize
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Noise
from dpsgd.core.state import Scales, TrainState, split_leaves
from dpsgd.engine.programs import compiled, shapes_of_rows
from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.gradients.losses import Loss, LossFn, loss_row, row_loss, takes_key
from dpsgd.gradients.rules import FLAT, ClippingRule

PyTree = Any


def copy_buffers(tree: PyTree) -> PyTree:
    """Copies the arrays of `tree` into new buffers, without weak types."""
    return compiled(copy_leaves, (), (tree,))(tree)


def copy_leaves(tree: PyTree) -> PyTree:
    """Copies arrays as `copy_buffers` does, within a program."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), tree)


def dpsgd(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    clipping: ClippingRule = FLAT,
    microbatch_size: int | None = None,
    tables: Any = None,
    foreign_calls: bool = False,
) -> Algorithm:
    """Returns DP-SGD for a per-example loss and an optimizer.

    g_t = (sum_{i in B_t} clip_C(grad loss(theta_t, x_i)) + sigma C z_t) / b, and the optimizer maps
    theta_t and g_t to theta_{t+1} (Abadi et al. 2016, Algorithm 1). Sampler, sigma and C are the
    mechanism's, which `train` takes beside the algorithm: runs that differ in sigma, C or b, or in
    samplers with batches of one shape, share one compiled program; with and without noise are two.

    A leaf of the parameters without a path to the loss, such as one under `jax.lax.stop_gradient`,
    stays constant: it gets no noise, no update, weight decay included, and no state. `init` needs
    rows to find it.

    Args:
      loss_fn: Pure function (params, example) -> scalar loss of one clipped unit: an example, or
        all rows of a unit in the batch, [*sampler.clipped_shape, ...] each leaf. Or (params,
        example, key), for dropout: the key is a function of the row and the step alone. Keys do not
        change the guarantee, as neighbours have equal keys
        (docs/explanation/isolation-of-examples.md).
      optimizer: Any optax transformation; it sees only the private mean gradient.
      clipping: Rule that brings an example's gradient to norm C: `FlatClipping`, `PerLayerClipping`
        or `AutomaticClipping`. The privacy cost is the same.
      microbatch_size: Number of examples differentiated together, on each device; None for the most
        that fit, see `clipped_grad`.
      tables: `LazyTables`, the optimizer of leaves that the loss reads by row look-ups only. A step
        then takes time for its batch's rows alone; by default `optimizer` trains all leaves. The
        law of the noise and the privacy cost are the same, see
        docs/explanation/deferred-noise-for-embedding-tables.md.
      foreign_calls: True to allow the loss calls of the host (`jax.pure_callback`) and of foreign
        functions (`jax.ffi`), one example at a time. They may keep their arguments, so the
        guarantee says that they are not covered.

    >>> algorithm = dpsgd(lambda w, x: (w - x) ** 2, optax.sgd(0.1))
    >>> algorithm.takes_key
    False

    Raises:
      TypeError: If `optimizer` is no optax transformation, or `tables` are no `LazyTables`.
      ValueError: If `microbatch_size` is below one, the signature of `loss_fn` is ambiguous about a
        key, or `tables` and `foreign_calls` are combined.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}")
    keyed = takes_key(loss_fn)
    try:
        hash(loss_fn)
    except TypeError:  # such as an object that may change: no other is equal to it
        loss_fn = functools.partial(loss_fn)
    if not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be one of optax, such as optax.adam(0.01), got {optimizer!r}"
        )
    if tables is not None and not hasattr(tables, "group"):
        raise TypeError(f"tables must be LazyTables(learning_rate, ...), got {tables!r}")
    if tables is not None and foreign_calls:
        raise ValueError("foreign_calls=True is not for lazy tables; leave out tables=")
    loss_fn = Loss(loss_fn, foreign_calls)
    lazy = None if tables is None else tables.group(loss_fn)
    frozen = _Frozen(loss_fn)
    return Algorithm(
        _Init(optimizer, frozen, lazy),
        _ClippedSum(loss_fn, microbatch_size, clipping),
        _Update(optimizer, lazy),
        keyed,
        lazy,
        frozen,
        foreign_calls,
        loss_fn,
        clipping,
        optimizer,
    )


def with_loss(algorithm: Algorithm, loss_fn: LossFn) -> Algorithm:
    """Returns an algorithm of dense parameters with another per-example loss.

    Args:
      algorithm: Algorithm from `dpsgd`, without lazy tables.
      loss_fn: Pure function (params, example), or (params, example, key), to a scalar loss.

    Raises:
      ValueError: If the algorithm has lazy tables, or its functions were replaced.
    """
    init, clipped_sum = algorithm.init, algorithm.clipped_sum
    if not isinstance(init, _Init) or not isinstance(clipped_sum, _ClippedSum) or init.lazy:
        raise ValueError(
            "the loss of an algorithm with tables or with a clipped_sum of its own is fixed"
        )
    loss_fn = Loss(loss_fn, algorithm.foreign_calls)
    frozen = _Frozen(loss_fn)
    return algorithm._replace(
        init=dataclasses.replace(init, frozen=frozen),
        clipped_sum=dataclasses.replace(clipped_sum, loss_fn=loss_fn),
        frozen=frozen,
        takes_key=takes_key(loss_fn),
        loss_fn=loss_fn,
    )


# The functions of an algorithm share programs where they have the same parts. Closures never do.


@dataclass(frozen=True)
class _Frozen:
    """Indices of the leaves that no derivative reaches, see `Algorithm.frozen`."""

    loss_fn: LossFn

    def __call__(self, params: PyTree, example: PyTree) -> frozenset[int]:
        try:
            frozen = frozen_leaves(row_loss(self.loss_fn), params, loss_row(self.loss_fn, example))
        except Exception:
            if _takes_batch(self.loss_fn, params, example):
                shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", example)
                raise ValueError(
                    f"loss_fn takes a batch, but is called with one example, {shapes}; pass the "
                    "loss of one example, which dpsgd maps over the batch"
                ) from None
            raise
        if len(frozen) == len(jax.tree.leaves(params)):
            raise ValueError(
                "no parameter has a path to the loss, so nothing can be trained; compute it from "
                "floating-point params, some of them without jax.lax.stop_gradient"
            )
        return frozen


def _takes_batch(loss_fn: LossFn, params: PyTree, example: PyTree) -> bool:
    """Returns True if a loss takes a batch: it is defined for examples with one more axis."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((7, *x.shape), x.dtype), example)
    try:
        loss = jax.eval_shape(row_loss(loss_fn), params, loss_row(loss_fn, batch))
    except Exception:
        return False
    return getattr(loss, "shape", None) in ((), (7,))


@dataclass(frozen=True)
class _Init:
    optimizer: optax.GradientTransformation
    frozen: _Frozen
    lazy: Any

    def __call__(
        self, params: PyTree, mechanism: Mechanism | None = None, rows: PyTree = None
    ) -> TrainState:
        tables = () if self.lazy is None else self.lazy.leaves(params, mechanism, rows)
        frozen: frozenset[int] = frozenset()
        if rows is not None:
            lead = mechanism.sampler.clipped_shape if mechanism else ()
            frozen = self.frozen(params, shapes_of_rows(rows, *lead))
        noise = mechanism.noise if mechanism and mechanism.noise_multiplier else None
        static = self.optimizer, self.lazy, tables, tuple(sorted(frozen)), noise
        return compiled(_initial, static, (params,))(params)


def _initial(
    optimizer: optax.GradientTransformation,
    lazy: Any,
    tables: tuple[int, ...],
    frozen: tuple[int, ...],
    noise: Noise | None,
    params: PyTree,
) -> TrainState:
    # The optimizer's state may hold the very parameters, and arrays that its maker gave it.
    state = TrainState(jnp.zeros((), jnp.int32), copy_leaves(params), ())
    if lazy is not None:
        state = lazy.init(state, tables)
    state = state._replace(frozen={k: () for k in frozen})
    state = state._replace(opt_state=copy_leaves(optimizer.init(state.dense_params)))
    return state._replace(noise=copy_leaves(noise.init(state.dense_params)) if noise else ())


@dataclass(frozen=True)
class _ClippedSum:
    loss_fn: LossFn
    microbatch_size: int | None
    clipping: ClippingRule

    def __call__(self, params, batch, weights, scales, keys=None, *, devices=1, frozen=()):
        gradient = clipped_grad(
            self.loss_fn,
            l2_clip_norm=scales.l2_clip_norm,
            clipping=self.clipping,
            microbatch_size=self.microbatch_size,
            devices=devices,
            frozen=frozen,
        )
        return gradient(params, batch, weights, keys)


@dataclass(frozen=True)
class _Update:
    optimizer: optax.GradientTransformation
    lazy: Any

    def __call__(
        self,
        state: TrainState,
        total: PyTree,
        noise_key: Any,
        scales: Scales,
        *,
        viewed: Any = None,
        context: Context | None = None,
    ) -> tuple[TrainState, PyTree]:
        if context is not None:
            state = self.lazy.update(state, total, viewed, context)
        old = state.dense_params
        total, _ = split_leaves(total, {*state.tables, *state.frozen})
        gradient, noise = privatize(total, state.noise, noise_key, state.step, scales)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, old)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, old)
        state = state.with_tables(state.lazy_tables, optax.apply_updates(old, updates))
        return state._replace(step=state.step + 1, opt_state=opt_state, noise=noise), gradient
