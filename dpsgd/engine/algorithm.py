"""DP-SGD as a product: per-example clipping x noise x optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpsgd.core.algorithm import privatize
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Noise
from dpsgd.core.state import Diagnostics, Scales, TrainState, split_leaves
from dpsgd.engine.lazy.group import LazyRows, LazyTables
from dpsgd.engine.lazy.laws import RunLaws
from dpsgd.engine.programs import MOST_PROGRAMS, Parts, compiled, shapes_of_rows
from dpsgd.gradients.clipping import ClippedSum
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.gradients.losses import (
    Loss,
    LossFn,
    allows_foreign_calls,
    loss_row,
    row_loss,
    takes_key,
)
from dpsgd.gradients.rules import FLAT, ClippingRule

PyTree = Any


def copy_buffers(tree: PyTree) -> PyTree:
    """Copies the arrays of `tree` into new buffers, without weak types."""
    return compiled(copy_leaves, (), (tree,))(tree)


def copy_leaves(tree: PyTree) -> PyTree:
    """Copies arrays as `copy_buffers` does, within a program."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), tree)


class Algorithm(NamedTuple):
    """Private training algorithm as pure functions of explicit state, scales and keys.

    Algorithms made by `dpsgd` from the same functions and equal settings share compiled programs.
    The functions that run an algorithm take its mechanism.
    """

    loss_fn: Callable[..., jax.Array] | None
    """Loss of one clipped example or unit; None if `clipped_sum` is custom."""
    clipping: ClippingRule
    """Rule that brings an example's gradient to norm C."""
    optimizer: optax.GradientTransformation
    """Optimizer of dense leaves."""
    clipped_sum: Callable[..., tuple[PyTree, Diagnostics]]
    """(params, batch, weights, scales) -> (sum of clipped per-example gradients, diagnostics), see
    `ClippedSum`."""
    update: Callable[..., tuple[TrainState, PyTree]]
    """(state, sum, noise_key, scales) -> (state after one noisy update, private mean gradient of
    `dense_params`, in their types). Lazy tables stay, see `LazyRows.update`."""
    lazy: Any = None
    """Lazy tables, `LazyRows`; None if all leaves are dense."""
    freezes: bool = True
    """True if leaves that no derivative reaches stay constant."""

    @property
    def takes_key(self) -> bool:
        """True if the loss takes a key."""
        return self.loss_fn is not None and takes_key(self.loss_fn)

    @property
    def foreign_calls(self) -> bool:
        """True if the loss may call the host and foreign functions, which no guarantee covers."""
        return self.loss_fn is not None and allows_foreign_calls(self.loss_fn)

    @property
    def tables(self) -> Any:
        """Optimizer `LazyTables` of lazy tables; None without any."""
        return self.lazy and self.lazy.tables

    def gap_laws(self, num_steps: int) -> Any:
        """Returns the `RunLaws` of lazy tables in a run, or None."""
        return self.tables and RunLaws(self.tables.of_run(num_steps))

    def init(
        self, params: PyTree, mechanism: Mechanism | None = None, rows: PyTree = None
    ) -> TrainState:
        """Returns the state before the first step, in new buffers, which blocks may overwrite.

        Args:
          params: Initial parameters.
          mechanism: Mechanism of the run, needed for correlated noise and lazy tables.
          rows: Rows of the data (some of them, or their shapes), needed for lazy tables and frozen
            leaves.

        Raises:
          ValueError: If these parameters cannot be trained under this mechanism.
        """
        tables = () if self.lazy is None else self.lazy.leaves(params, mechanism, rows)
        frozen: frozenset[int] = frozenset()
        if rows is not None:
            lead = mechanism.sampler.clipped_shape if mechanism else ()
            frozen = self.frozen(params, shapes_of_rows(rows, *lead))
        noise = mechanism.noise if mechanism and mechanism.noise_multiplier else None
        static = self.optimizer, self.lazy, tables, tuple(sorted(frozen)), noise
        return compiled(_initial, static, (params,))(params)

    def frozen(self, params: PyTree, example: PyTree) -> frozenset[int]:
        """Returns the indices of the leaves that no derivative reaches.

        Args:
          params: Parameters, or their shapes.
          example: One example, or its shapes.

        Raises:
          ValueError: If the loss takes a batch, or no derivative reaches any leaf.
        """
        if not self.freezes or self.loss_fn is None:
            return frozenset()
        leaves, structure = jax.tree.flatten((params, example))
        shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        try:
            frozen = _frozen(Parts(self), structure, *shapes)
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


@functools.lru_cache(maxsize=MOST_PROGRAMS)  # as programs, with equal frozen leaves
def _frozen(parts: Parts, structure: Any, *shapes: jax.ShapeDtypeStruct) -> frozenset[int]:
    (algorithm,) = parts.values
    loss_fn = algorithm.loss_fn
    params, example = jax.tree.unflatten(structure, shapes)
    return frozen_leaves(row_loss(loss_fn), params, loss_row(loss_fn, example))


def dpsgd(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    clipping: ClippingRule = FLAT,
    microbatch_size: int | None = None,
    tables: LazyTables | None = None,
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
      TypeError: If `optimizer` is no optax transformation, `clipping` no rule, or `tables` are no
        `LazyTables`.
      ValueError: If `microbatch_size` is no integer >= 1, the signature of `loss_fn` is ambiguous
        about a key, or `tables` and `foreign_calls` are combined.
    """
    takes_key(loss_fn)  # refuses an ambiguous signature
    try:
        hash(loss_fn)
    except TypeError:  # such as an object that may change: no other is equal to it
        loss_fn = functools.partial(loss_fn)
    if not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be one of optax, such as optax.adam(0.01), got {optimizer!r}"
        )
    if isinstance(clipping, type) or not isinstance(clipping, ClippingRule):
        raise TypeError(f"clipping must be a rule, such as PerLayerClipping(), got {clipping!r}")
    if tables is not None and not isinstance(tables, LazyTables):
        raise TypeError(f"tables must be LazyTables(learning_rate, ...), got {tables!r}")
    if tables is not None and foreign_calls:
        raise ValueError("foreign_calls=True is not for lazy tables; leave out tables=")
    loss_fn = Loss(loss_fn, foreign_calls)
    lazy = None if tables is None else LazyRows(tables, loss_fn)
    clipped_sum = ClippedSum(loss_fn, clipping, microbatch_size)
    return Algorithm(loss_fn, clipping, optimizer, clipped_sum, _Update(optimizer), lazy)


def _takes_batch(loss_fn: LossFn, params: PyTree, example: PyTree) -> bool:
    """Returns True if a loss takes a batch: it is defined for examples with one more axis."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((7, *x.shape), x.dtype), example)
    try:
        loss = jax.eval_shape(row_loss(loss_fn), params, loss_row(loss_fn, batch))
    except Exception:
        return False
    return getattr(loss, "shape", None) in ((), (7,))


def _initial(
    optimizer: optax.GradientTransformation,
    lazy: LazyRows | None,
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
class _Update:
    """Update of an algorithm; a closure would not share programs."""

    optimizer: optax.GradientTransformation

    def __call__(
        self, state: TrainState, total: PyTree, noise_key: Any, scales: Scales
    ) -> tuple[TrainState, PyTree]:
        old = state.dense_params
        total, _ = split_leaves(total, {*state.tables, *state.frozen})
        gradient, noise = privatize(total, state.noise, noise_key, state.step, scales)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, old)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, old)
        state = state.with_tables(state.lazy_tables, optax.apply_updates(old, updates))
        return state._replace(step=state.step + 1, opt_state=opt_state, noise=noise), gradient
