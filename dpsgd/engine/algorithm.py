"""DP-SGD as a product: per-example clipping x noise x parameter groups, one of them dense."""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dpsgd.core.algorithm import Algorithm, Context, ParamGroup, privatize
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState, split_leaves
from dpsgd.engine.programs import compiled, contents, shapes_of_rows
from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.gradients.isolation import ForeignCalls
from dpsgd.gradients.losses import LossFn, loss_row, row_loss, takes_key
from dpsgd.gradients.rules import FLAT, ClippingRule
from dpsgd.noise.base import Noise

PyTree = Any


def owned(tree: PyTree) -> PyTree:
    """Returns a copy of the arrays of `tree`, in buffers of its own and of no weak type."""
    return compiled(copied, (), (tree,))(tree)


def copied(tree: PyTree) -> PyTree:
    """Returns what `owned` does, as part of a program."""
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
    """Returns DP-SGD (Abadi et al. 2016, Algorithm 1) for any per-example loss and optimizer.

    g_t = (sum_{i in B_t} clip_C(grad loss(theta_t, x_i)) + sigma C z_t) / b, and theta_{t+1} is
    what the optimizer makes of theta_t and g_t. Sampler, sigma and C are the mechanism's, which
    `train` is given beside the algorithm: runs that differ in sigma, C or b, or in a sampler with
    batches of one shape, share one compiled program; with and without noise are two.

    A leaf of the parameters without a path to the loss, such as one that the loss reads under
    `jax.lax.stop_gradient`, stays as it is: it gets no noise and no update, weight decay included,
    and no state of noise or optimizer is kept for it. `init` is then given rows to find it by.

    Args:
      loss_fn: Pure function (params, example) -> scalar loss of what is clipped as one: an example,
        or a unit, of which it sees all rows of the batch, [*sampler.clipped_shape, ...] each leaf.
        Or (params, example, key), for dropout: the key is fresh for each row of the data and each
        step, and a function of these two alone. The guarantee is the same, for any such loss: given
        all keys, which depend on no data, an example's clipped gradient is a function of the
        parameters and of itself, and neighbours have the same keys
        (docs/explanation/isolation-of-examples.md).
      optimizer: Any optax transformation; it sees only the private mean gradient.
      clipping: The rule that brings an example's gradient to norm C: `FlatClipping`,
        `PerLayerClipping` or `AutomaticClipping`. The privacy cost is the same.
      microbatch_size: Examples whose gradients are formed together, on each device; None for as
        many as fit, see `clipped_grad`.
      tables: `LazyTables`, by which those leaves are trained of which the loss only looks up rows,
        so that a step costs what its batch reads; `optimizer` is for the others. By default it is
        for all. The law, and with it the privacy cost, is that of a step that writes
        noise into all rows, see docs/explanation/deferred-noise-for-embedding-tables.md.
      foreign_calls: Whether the loss may call the host (`jax.pure_callback`) and foreign functions
        (`jax.ffi`), one example at a time. They may keep what they are called with, which no trace
        shows, so the guarantee of such a run says that they are not covered.

    Raises:
      TypeError: if `optimizer` is none, or `tables` are no `LazyTables`.
      ValueError: if `microbatch_size` is below one, the signature of `loss_fn` does not tell
        whether it takes a key, or there are `tables` and `foreign_calls`.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}")
    keyed = takes_key(loss_fn)
    try:
        hash(loss_fn)
    except TypeError:  # such as an object that holds arrays: no other is equal to it
        loss_fn = functools.partial(loss_fn)
    if isinstance(loss_fn, ForeignCalls) and not foreign_calls:
        raise ValueError("a loss of ForeignCalls is not covered: say so by foreign_calls=True")
    if not isinstance(loss_fn, types.MethodType) and type(loss_fn).__eq__ is not object.__eq__:
        loss_fn = _LossByContents(loss_fn, contents(loss_fn))
    if not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be one of optax, such as optax.adam(0.01), got {optimizer!r}"
        )
    if tables is not None and not hasattr(tables, "group"):
        raise TypeError(f"tables must be LazyTables(learning_rate, ...), got {tables!r}")
    if foreign_calls:
        loss_fn = ForeignCalls(loss_fn)
    frozen, lazy = FrozenGroup(loss_fn), () if tables is None else (tables.group(loss_fn),)
    groups = (*lazy, frozen, DenseGroup(optimizer))
    return Algorithm(
        _Init(groups),
        _ClippedSum(loss_fn, microbatch_size, clipping),
        _Update(groups),
        keyed,
        groups,
        frozen,
        foreign_calls,
    )


@dataclass(frozen=True)
class _LossByContents:
    """Wraps a loss with its own `__eq__`: equal wrappers have equal `contents`, too.

    JAX keeps traces by the equality of functions.
    """

    loss_fn: LossFn
    contents: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.loss_fn)

    def __call__(self, *arguments: Any) -> Array:
        return self.loss_fn(*arguments)


# The functions of an algorithm are equal where they are made of equal parts. Closures never are.


@dataclass(frozen=True)
class FrozenGroup(ParamGroup):
    """The `ParamGroup` of the leaves that no derivative of the loss reaches: they are left alone.

    Called, it is `Algorithm.frozen`.
    """

    loss_fn: LossFn

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        if rows is None:
            return ()
        example = shapes_of_rows(rows, *(mechanism.sampler.clipped_shape if mechanism else ()))
        return tuple(sorted(self(params, example)))

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        return state._replace(frozen={k: () for k in leaves})

    def update(
        self, state: TrainState, total: PyTree, viewed: None, context: Context
    ) -> tuple[TrainState, None]:
        return state, None

    def __call__(self, params: PyTree, example: PyTree) -> frozenset[int]:
        try:
            found = frozen_leaves(row_loss(self.loss_fn), params, loss_row(self.loss_fn, example))
        except Exception:
            if _takes_batch(self.loss_fn, params, example):
                shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", example)
                raise ValueError(
                    "loss_fn takes a batch, and is called with one example without the axis of the "
                    f"batch, {shapes}: pass the loss of one example; dpsgd maps it over the batch"
                ) from None
            raise
        if len(found) == len(jax.tree.leaves(params)):
            raise ValueError(
                "no parameter has a path to the loss: nothing can be trained; compute it of "
                "floating-point params, some of them without jax.lax.stop_gradient"
            )
        return found


def _takes_batch(loss_fn: LossFn, params: PyTree, example: PyTree) -> bool:
    """Returns whether a loss is that of a batch: defined where examples have one more axis."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((7, *x.shape), x.dtype), example)
    try:
        loss = jax.eval_shape(row_loss(loss_fn), params, loss_row(loss_fn, batch))
    except Exception:
        return False
    return getattr(loss, "shape", None) in ((), (7,))


@dataclass(frozen=True)
class _Init:
    groups: tuple[ParamGroup, ...]

    def __call__(
        self, params: PyTree, mechanism: Mechanism | None = None, rows: PyTree = None
    ) -> TrainState:
        leaves = tuple(group.leaves(params, mechanism, rows) for group in self.groups)
        noise = mechanism.noise if mechanism and mechanism.noise_multiplier else None
        return compiled(_initial, (self.groups, leaves, noise), (params,))(params)


def _initial(
    groups: tuple[ParamGroup, ...],
    leaves: tuple[tuple[int, ...], ...],
    noise: Noise | None,
    params: PyTree,
) -> TrainState:
    # The optimizer's state may hold the very parameters, and arrays that its maker gave it.
    state = TrainState(jnp.zeros((), jnp.int32), copied(params), ())
    for group, own in zip(groups, leaves, strict=True):
        state = group.init(state, own)
    return state._replace(noise=copied(noise.init(state.dense_params)) if noise else ())


@dataclass(frozen=True)
class _ClippedSum:
    loss_fn: LossFn
    microbatch_size: int | None
    clipping: ClippingRule

    def __call__(
        self, params, batch, weights, scales, keys=None, *, devices=1, loss_fn=None, frozen=()
    ):
        gradient = clipped_grad(
            loss_fn or self.loss_fn,
            l2_clip_norm=scales.l2_clip_norm,
            clipping=self.clipping,
            microbatch_size=self.microbatch_size,
            devices=devices,
            frozen=frozen,
        )
        return gradient(params, batch, weights, keys)


@dataclass(frozen=True)
class _Update:
    groups: tuple[ParamGroup, ...]

    @property
    def optimizer(self) -> optax.GradientTransformation | None:
        return getattr(self.groups[-1], "optimizer", None)

    def __call__(self, state, total, noise_key, scales, *, viewed=None, contexts=None):
        viewed = viewed or [None] * len(self.groups)
        contexts = contexts or [Context(noise_key, scales)] * len(self.groups)
        gradient = None
        for group, seen, context in zip(self.groups, viewed, contexts, strict=True):
            state, gradient = group.update(state, total, seen, context)
        return state._replace(step=state.step + 1), gradient


@dataclass(frozen=True)
class DenseGroup(ParamGroup):
    """The `ParamGroup` of all leaves that no other group has: noise in each at every step.

    The optimizer sees the private mean gradient alone, and none but these leaves.
    """

    optimizer: optax.GradientTransformation

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        return ()

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        return state._replace(opt_state=copied(self.optimizer.init(state.dense_params)))

    def update(
        self, state: TrainState, total: PyTree, viewed: None, context: Context
    ) -> tuple[TrainState, PyTree]:
        key, scales, old = context.noise_key, context.scales, state.dense_params
        total, _ = split_leaves(total, {*state.tables, *state.frozen})
        gradient, noise = privatize(total, state.noise, key, state.step, scales)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, old)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, old)
        state = state.with_tables(state.lazy_tables, optax.apply_updates(old, updates))
        return state._replace(opt_state=opt_state, noise=noise), gradient
