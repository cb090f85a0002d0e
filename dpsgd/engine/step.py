"""One step, and a block of steps as one compiled program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dpsgd.core.algorithm import Algorithm, Context, View
from dpsgd.core.marks import mark_value
from dpsgd.core.mechanism import Scales
from dpsgd.core.state import TrainState, split_leaves
from dpsgd.engine.closures import require_closed
from dpsgd.engine.placement import AXIS, Exchange, Placement
from dpsgd.engine.programs import Program, program, shapes_of_rows
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.gradients.losses import example_keys
from samplers import BatchSampler
from samplers.batches import IndexBlock

PyTree = Any

WHOLE, SHARDED = PartitionSpec(), PartitionSpec(AXIS)


class Watch(NamedTuple):
    """What a block of steps returns to an audit: an argument of the program that trains.

    All of it is of parameters or of private gradients, which the guarantee covers.

    Attributes:
      return_gradient: Whether the parameters after each step are its private mean gradient, in
        place of the updated ones: bool scalar. The optimizer's state is updated either way.
      places: Of each leaf of the parameters, coordinates that are written down after each step:
        int32[min(size, `WATCHED`)], row-major.
    """

    return_gradient: Any
    places: tuple[Any, ...]

    @classmethod
    def nothing(cls, params: PyTree) -> Watch:
        """Returns the value of training: the first places, and no gradient."""
        sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
        places = tuple(np.arange(min(size, WATCHED), dtype=np.int32) for size in sizes)
        return cls(np.bool_(False), places)


WATCHED = 128
"""Most coordinates of a leaf that are written down after each step."""


def block_function(
    algorithm: Algorithm, sampler: BatchSampler
) -> Callable[..., tuple[Any, Diagnostics, Any]]:
    """Returns (state, data, plan, noise_key, scales, watch) -> (state, diagnostics, watched).

    Further arguments are `loss_key`, where the loss takes a key, and `known`, of each parameter
    group's `Schedule`.
    """
    return functools.partial(_run_block, _Step.of(algorithm, sampler))


def block_program(
    algorithm: Algorithm,
    sampler: BatchSampler,
    arguments: tuple[Any, ...],
    layout: Any = None,
) -> Program:
    """Returns the program of `block_function`.

    The first argument's buffers are given away. Without a `layout`, one device computes.

    Raises:
      ValueError: as for `require_closed`.
    """
    parts, shardings = (_Step.of(algorithm, sampler, layout),), None
    if layout is not None and (placement := layout.placement) is not None:
        state, whole = placement.state(arguments[0]), placement.replicated
        rows = placement.by_rows if layout.streamed else whole
        places = state, rows, placement.plan(arguments[2]), whole, whole, whole, whole, whole
        shardings = places, (state, whole, whole)
    made = program(_run_block, parts, arguments, donate_argnums=(0,), shardings=shardings)
    require_closed(algorithm, sampler, made.traced.jaxpr, arguments[0])
    return made


def compiled_block(*of: Any) -> jax.stages.Compiled:
    """Returns the executable of `block_program`."""
    return block_program(*of).compiled


@dataclass(frozen=True)
class _Step:
    """One step of a block: views, clipped sum and update, over all parameter groups."""

    algorithm: Algorithm
    accumulates: bool
    clipped_shape: tuple[int, ...]
    placement: Placement | None
    streamed: bool
    """Whether each device has rows of its own, and `places` are among these."""

    @classmethod
    def of(cls, algorithm: Algorithm, sampler: BatchSampler, layout: Any = None) -> _Step:
        where = (layout.placement, layout.streamed) if layout else (None, False)
        return cls(algorithm, sampler.accumulates, sampler.clipped_shape, *where)

    def __call__(self, state, j, data, plan, noise_key, scales, watch, loss_key, known):
        """Returns the state after the step, and its diagnostics."""
        placement, shapes = self.placement, jax.eval_shape(lambda: state.raw_params)
        example = shapes_of_rows(data, *self.clipped_shape)
        frozen = functools.partial(self.algorithm.frozen, shapes, example)

        def whole(exchange, state, j, data, plan, noise_key, scales, revealed, loss_key, known):
            rest = j, shapes, exchange, revealed
            contexts = [Context(noise_key, scales, one, *rest) for one in known]
            found, viewed = self._sum(state, j, data, plan, scales, loss_key, contexts)
            total, diagnostics = exchange.total(found)
            return self._updated(state, total, viewed, frozen, contexts), diagnostics

        given = noise_key, scales, watch.return_gradient, loss_key, known
        if placement is None:
            return whole(Exchange(), state, j, data, plan, *given)
        if state.tables:  # their rows lie with the devices, and so does the whole step
            parts = placement.specs(state)
            of_all = parts, WHOLE, *self._specs(plan), *(WHOLE,) * len(given)
            step = functools.partial(whole, Exchange(placement))
            return placement.on_each(step, of_all, (parts, WHOLE))(state, j, data, plan, *given)
        total, diagnostics = self._placed_sum(state, j, data, plan, scales, loss_key)
        context = Context(noise_key, scales, return_gradient=watch.return_gradient)
        groups = len(self.algorithm.groups)
        viewed, contexts = (None,) * groups, [context] * groups
        return self._updated(state, total, viewed, frozen, contexts), diagnostics

    def _placed_sum(self, state, j, data, plan, scales, loss_key):
        """Returns the clipped sum over the devices, and diagnostics; of dense parameters alone."""
        placement, rows = self.placement, self._specs(plan)
        assert placement is not None
        frozen, groups = state.frozen, len(self.algorithm.groups)
        if placement.shards_rows(state):
            contexts = [Context(None, scales)] * groups
            # Each device looks up its own rows; what follows is sharded by the compiler.
            batch = placement.on_each(self._batch, (WHOLE, WHOLE, *rows, WHOLE), SHARDED)
            how = {"batch_at": batch, "devices": len(placement.devices)}
            found, _ = self._sum(state, j, data, plan, scales, loss_key, contexts, **how)
            total, diagnostics = found
            shardings, _ = split_leaves(placement.params(state.raw_params), state.frozen)
            return jax.lax.with_sharding_constraint(total, shardings), diagnostics

        def of_device(step, params, j, data, plan, scales, loss_key):
            own = TrainState(step, params, (), frozen=frozen)
            contexts = [Context(None, scales)] * groups
            found, _ = self._sum(own, j, data, plan, scales, loss_key, contexts)
            return placement.total(found)

        summed = placement.on_each(of_device, (*(WHOLE,) * 3, *rows, WHOLE, WHOLE), WHOLE)
        return summed(state.step, state.raw_params, j, data, plan, scales, loss_key)

    def _sum(self, state, j, data, plan, scales, loss_key, contexts, *, batch_at=None, **how):
        """Returns the clipped sum over the passes of step `j`, diagnostics, and what was viewed."""
        batch_at = batch_at or self._batch

        def of_pass(row):
            batch, weights, keys = batch_at(state.step, row, data, plan, loss_key)
            view = View(state.raw_params, batch, weights, keys, {})
            viewed = []
            for group, context in zip(self.algorithm.groups, contexts, strict=True):
                view, seen = group.view(state, view, context)
                viewed.append(seen)
            named = {**view.loss, **how}
            if state.frozen:
                named["frozen"] = frozenset(state.frozen)
            given = view.params, view.batch, view.weights, scales, *view.keys
            return self.algorithm.clipped_sum(*given, **named), tuple(viewed)

        if not self.accumulates:
            return of_pass(j)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(of_pass, jnp.int32(0))
        )

        def add(row, total):
            return jax.tree.map(jnp.add, total, of_pass(row))

        return jax.lax.fori_loop(plan.starts[j], plan.starts[j + 1], add, zeros)

    def _updated(self, state, total, viewed, frozen, contexts):
        """Returns the state after the update, or with the private mean gradient if it is asked."""
        total = jax.tree.map(lambda leaf: mark_value(leaf, "sum"), total)
        noise_key, scales, *_ = contexts[-1]
        # Asked when the loss has been differentiated, which refuses one that examples could mix in.
        if (found := frozen()) != frozenset(state.frozen):
            leaves = jax.tree_util.tree_leaves_with_path(state.raw_params)
            names = [
                jax.tree_util.keystr(leaves[k][0]) for k in sorted(found ^ state.frozen.keys())
            ]
            raise ValueError(
                "the state was made for other frozen parameters than those that no derivative of "
                f"the loss reaches; they differ in params{', params'.join(names[:3])}: make the "
                "state by algorithm.init(params, mechanism, rows), with one row or more"
            )
        how: dict[str, Any] = {}
        if any(seen is not None for seen in viewed):
            how = {"viewed": viewed, "contexts": contexts}
        state, gradient = self.algorithm.update(state, total, noise_key, scales, **how)
        # In the one pass over all coordinates that the update is: a select costs nothing there.
        shown = functools.partial(jnp.where, contexts[-1].return_gradient)
        return state.with_tables(
            state.lazy_tables, jax.tree.map(shown, gradient, state.dense_params)
        )

    def _batch(self, step, row, data, plan, loss_key):
        """Returns what is clipped in one pass: examples, their weights, and their keys if any."""
        places = plan.indices if plan.places is None else plan.places
        indices = places[row].reshape(-1, *self.clipped_shape)
        weights = plan.weights[row].reshape(indices.shape[0], -1).max(axis=1)
        batch = jax.tree.map(lambda column: column[indices], data)
        if not self.algorithm.takes_key:
            return batch, weights, ()
        first = plan.indices[row].reshape(indices.shape[0], -1)[:, 0]  # of what is clipped as one
        return batch, weights, (example_keys(loss_key, step, first, plan.shards),)

    def _specs(self, plan):
        """Returns where rows of the data lie, and a plan, for `Placement.on_each`."""
        assert self.placement is not None
        columns = jax.tree.map(lambda sharding: sharding.spec, self.placement.plan(plan))
        return SHARDED if self.streamed else WHOLE, columns


def _run_block(
    step: _Step,
    state: TrainState,
    data: PyTree,
    plan: IndexBlock,
    noise_key: Any,
    scales: Scales,
    watch: Watch,
    loss_key: Any = None,
    known: tuple[Any, ...] | None = None,
) -> tuple[TrainState, Diagnostics, Any]:
    known = known or (None,) * len(step.algorithm.groups)

    def one_step(j, carry):
        state, log, watched = carry
        arguments = data, plan, noise_key, scales, watch, loss_key, known
        state, diagnostics = step(state, j, *arguments)
        log = jax.tree.map(lambda column, x: column.at[j].set(x), log, diagnostics)
        leaves = zip(jax.tree.leaves(state.raw_params), watch.places, strict=True)
        here = [leaf.ravel()[places].astype(jnp.float32) for leaf, places in leaves]
        return state, log, watched.at[j].set(jnp.concatenate(here))

    block_steps = plan.starts.shape[0] - 1
    log = Diagnostics(*(jnp.zeros(block_steps, jnp.float32) for _ in Diagnostics._fields))
    watched = jnp.zeros((block_steps, sum(map(len, watch.places))), jnp.float32)
    # A dynamic trip count: a last, shorter block runs in the same program, without idle steps.
    return jax.lax.fori_loop(0, plan.num_steps, one_step, (state, log, watched))


def flushed(
    algorithm: Algorithm,
    state: TrainState,
    known: tuple[Any, ...],
    noise_key: Any,
    scales: Scales,
    placement: Placement | None = None,
) -> TrainState:
    """Returns the state with all pending noise added, which the guarantee covers.

    The buffers of `state` are given away, as no other draw may follow from it. `known` are the
    laws after its steps, from `Schedules.after`.
    """
    arguments = state, known, noise_key, scales
    return flush_program(algorithm, arguments, placement).compiled(*arguments)[0]


def flush_program(
    algorithm: Algorithm, arguments: tuple[Any, ...], placement: Placement | None
) -> Program:
    """Returns the program of `flushed`.

    It also returns the steps of rows, in the place of the buffers that are given away.
    """
    parts, shardings = (algorithm.groups, placement), None
    if placement is not None:
        whole = [placement.replicated] * (len(arguments) - 1)
        ends = jax.eval_shape(functools.partial(_flushed, algorithm.groups, None), *arguments)
        where = placement.state(arguments[0])
        steps = {k: table.steps for k, table in where.tables.items()}
        shardings = (where, *whole), (placement.state(ends[0]), steps)
    return program(_flushed, parts, arguments, donate_argnums=(0,), shardings=shardings)


def _flushed(groups, placement, state, known, noise_key, scales):
    shapes, exchange = jax.eval_shape(lambda: state.raw_params), Exchange(placement)

    def flush(state, known, noise_key, scales):  # of each device its own rows
        for group, own in zip(groups, known, strict=True):
            context = Context(noise_key, scales, own, shapes=shapes, exchange=exchange)
            state = group.flush(state, context)
        return state

    if placement is not None:
        parts = placement.specs(state)
        flush = placement.on_each(flush, (parts, WHOLE, WHOLE, WHOLE), parts)
    state = flush(state, known, noise_key, scales)
    tables = {k: table._replace(steps=None) for k, table in state.tables.items()}
    return state._replace(tables=tables), {k: table.steps for k, table in state.tables.items()}
