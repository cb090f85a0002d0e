"""Training step, and a block of steps as one compiled program."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dpsgd.core.algorithm import Context, View
from dpsgd.core.marks import mark_value
from dpsgd.core.state import Diagnostics, Scales, TrainState, split_leaves
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.closures import require_closed
from dpsgd.engine.placement import AXIS, Placement
from dpsgd.engine.programs import Program, program, shapes_of_rows
from dpsgd.gradients.losses import example_keys
from dpsgd.gradients.rules import FLAT
from samplers import BatchSampler
from samplers.batches import IndexBlock

PyTree = Any

WHOLE, SHARDED = PartitionSpec(), PartitionSpec(AXIS)


class Watch(NamedTuple):
    """Values that a block returns to an audit, an argument of the training program.

    They come from parameters or private gradients, which the guarantee covers.

    Attributes:
      return_gradient: bool scalar, True to return each step's private mean gradient in place of the
        updated parameters. The optimizer's state is updated either way.
      places: Flat indices recorded after every step, int32[min(size, `WATCHED`)] for each parameter
        leaf.
    """

    return_gradient: Any
    places: tuple[Any, ...]

    @classmethod
    def nothing(cls, params: PyTree) -> Watch:
        """Returns the value for training, without gradients.

        The recorded coordinates are the first of each leaf.

        >>> Watch.nothing({"bias": np.zeros(3)}).places
        (array([0, 1, 2], dtype=int32),)
        """
        sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
        places = tuple(np.arange(min(size, WATCHED), dtype=np.int32) for size in sizes)
        return cls(np.bool_(False), places)


WATCHED = 128
"""Most coordinates of a leaf that are recorded after each step."""

MAX_ENTRIES = 2**31 - 1
"""Most entries of a leaf of the parameters: flat indices are int32, also in the audit."""


class BlockInputs(NamedTuple):
    """Inputs of a block of steps beside the training state."""

    data: PyTree
    """Columns of the data, or of the rows that the plan's places index."""
    plan: IndexBlock
    """Batches of the steps."""
    noise_key: Any
    """uint32[4], key of the noise stream."""
    scales: Scales
    """Scales C, sigma C and b of the mechanism."""
    watch: Watch
    """Values that the block returns to an audit."""
    loss_key: Any = None
    """uint32[2], for a loss with a key."""
    laws: Any = None
    """`StepLaws` of lazy tables; None without any."""


def block_function(
    algorithm: Algorithm, sampler: BatchSampler, layout: Any = None
) -> functools.partial[tuple[Any, Diagnostics, Any]]:
    """Returns a block of steps as a pure function.

    It maps (state, `BlockInputs`) to (state, diagnostics, watched).

    Args:
      algorithm: Training algorithm.
      sampler: Sampler of the run.
      layout: Layout of the blocks; by default on one device.
    """
    placed = (layout.placement, layout.streamed) if layout else (Placement.one(), False)
    algorithm = algorithm._replace(clipping=FLAT)  # the run's rule is that of `clipped_sum`
    step = _Step(algorithm, sampler.accumulates, sampler.clipped_shape, *placed)
    return functools.partial(_run_block, step)


def block_program(
    algorithm: Algorithm,
    sampler: BatchSampler,
    arguments: tuple[TrainState, BlockInputs],
    layout: Any = None,
) -> Program:
    """Returns the program of `block_function`.

    Args:
      algorithm: Training algorithm.
      sampler: Sampler of the run.
      arguments: Arguments of the function, or their shapes; the first one's buffers are donated.
      layout: Layout of the blocks; by default on one device.

    Raises:
      ValueError: As from `require_closed`, or if a leaf has more than `MAX_ENTRIES` entries.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments[0].raw_params):
        if (size := math.prod(leaf.shape)) > MAX_ENTRIES:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has {size:,} entries, and 32 bits number at "
                f"most {MAX_ENTRIES:,}: split it into several arrays"
            )
    (step,) = block_function(algorithm, sampler, layout).args
    placement = step.placement
    state, replicated = placement.state(arguments[0]), placement.replicated
    scalars: Any = (replicated,) * 5
    rows = placement.by_rows if step.streamed else replicated
    inputs = BlockInputs(rows, placement.plan(arguments[1].plan), *scalars)
    shardings = (state, inputs), (state, replicated, replicated)
    built = program(_run_block, (step,), arguments, donate_argnums=(0,), shardings=shardings)
    require_closed(algorithm, sampler, built.traced.jaxpr, arguments[0])
    return built


def compiled_block(*arguments: Any) -> jax.stages.Compiled:
    """Returns the executable of `block_program`."""
    return block_program(*arguments).compiled


@dataclass(frozen=True)
class _Step:
    """Step of a block: view of lazy tables, clipped sum and update."""

    algorithm: Algorithm
    accumulates: bool
    clipped_shape: tuple[int, ...]
    placement: Placement
    streamed: bool
    """True if each device has other rows, which `places` index."""

    def __call__(
        self, state: TrainState, j: Any, inputs: BlockInputs
    ) -> tuple[TrainState, Diagnostics]:
        """Returns the state after step `j` of the block, and its diagnostics."""
        placement = self.placement
        if state.tables:  # their rows lie with the devices, and so does the whole step
            specs = placement.specs(state)
            step = functools.partial(self._lazy_step, jax.eval_shape(lambda: state.raw_params))
            in_specs = specs, WHOLE, self._specs(inputs.plan)
            return placement.on_each(step, in_specs, (specs, WHOLE))(state, j, inputs)
        total, diagnostics = self._dense_sum(state, j, inputs)
        return self._updated(state, total, inputs), diagnostics

    def _lazy_step(
        self, shapes: PyTree, state: TrainState, j: Any, inputs: BlockInputs
    ) -> tuple[TrainState, Diagnostics]:
        """Returns a device's part of the state after a step, and the diagnostics of all."""
        shared = inputs.laws.select(j), shapes, self.placement, inputs.watch.return_gradient
        context = Context(inputs.noise_key, inputs.scales, *shared)
        summed, viewed = self._sum(state, j, inputs, context)
        total, diagnostics = self.placement.total(summed)
        return self._updated(state, total, inputs, viewed, context), diagnostics

    def _dense_sum(
        self, state: TrainState, j: Any, inputs: BlockInputs
    ) -> tuple[PyTree, Diagnostics]:
        """Returns the clipped sum over the devices and diagnostics, for dense parameters."""
        placement, specs = self.placement, self._specs(inputs.plan)
        frozen = state.frozen
        if placement.shards_rows(state):
            # Each device looks up its own rows; what follows is sharded by the compiler.
            batch = placement.on_each(self._batch, (WHOLE, WHOLE, specs), SHARDED)
            sharded = {"batch_at": batch, "devices": len(placement.devices)}
            (total, diagnostics), _ = self._sum(state, j, inputs, **sharded)
            shardings, _ = split_leaves(placement.state(state).raw_params, frozen)
            return jax.lax.with_sharding_constraint(total, shardings), diagnostics

        def device_sum(step, params, j, inputs):
            """Returns the sum over the devices of each one's part of the batch."""
            local_state = TrainState(step, params, (), frozen=frozen)
            return placement.total(self._sum(local_state, j, inputs)[0])

        summed = placement.on_each(device_sum, (WHOLE, WHOLE, WHOLE, specs), WHOLE)
        return summed(state.step, state.raw_params, j, inputs)

    def _sum(self, state, j, inputs, context=None, *, batch_at=None, **how):
        """Returns the clipped sum over the passes of step `j`, diagnostics, and views."""
        batch_at, starts = batch_at or self._batch, inputs.plan.starts
        if state.frozen:
            how["frozen"] = frozenset(state.frozen)

        def pass_sum(row):
            """Returns the clipped sum and diagnostics of one pass, and its views."""
            batch, weights, keys = batch_at(state.step, row, inputs)
            view = View(state.raw_params, batch, weights, keys)
            viewed = None
            if context is not None:
                view, viewed = self.algorithm.lazy.view(state, view, context)
            batch = view.params, view.batch, view.weights, inputs.scales, *view.keys
            return self.algorithm.clipped_sum(*batch, **how), viewed

        if not self.accumulates:
            return pass_sum(j)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(pass_sum, jnp.int32(0))
        )

        def add(row, total):
            """Adds a pass to the passes so far."""
            return jax.tree.map(jnp.add, total, pass_sum(row))

        return jax.lax.fori_loop(starts[j], starts[j + 1], add, zeros)

    def _updated(self, state, total, inputs, viewed=None, context=None):
        """Returns the updated state, or its private mean gradient if the watch asks for it."""
        total = jax.tree.map(lambda leaf: mark_value(leaf, "sum"), total)
        shapes = context.shapes if context else jax.eval_shape(lambda: state.raw_params)
        # After the loss is differentiated, which refuses a loss that could mix examples.
        frozen = self.algorithm.frozen(shapes, shapes_of_rows(inputs.data, *self.clipped_shape))
        if frozen != frozenset(state.frozen):
            leaves = jax.tree_util.tree_leaves_with_path(state.raw_params)
            names = [
                jax.tree_util.keystr(leaves[k][0]) for k in sorted(frozen ^ state.frozen.keys())
            ]
            raise ValueError(
                "the frozen parameters of the state are not those that no derivative of the loss "
                f"reaches; they differ in params{', params'.join(names[:3])}: make the "
                "state by algorithm.init(params, mechanism, rows), with one row or more"
            )
        if context:
            state = self.algorithm.lazy.update(state, total, viewed, context)
        state, gradient = self.algorithm.update(state, total, inputs.noise_key, inputs.scales)
        # In the one pass over all coordinates that the update is: a select costs nothing there.
        chosen = functools.partial(jnp.where, inputs.watch.return_gradient)
        return state.with_tables(
            state.lazy_tables, jax.tree.map(chosen, gradient, state.dense_params)
        )

    def _batch(self, step, row, inputs):
        """Returns one pass: clipped examples, their weights, and their keys if any."""
        plan = inputs.plan
        places = plan.indices if plan.places is None else plan.places
        indices = places[row].reshape(-1, *self.clipped_shape)
        weights = plan.weights[row].reshape(indices.shape[0], -1).max(axis=1)
        batch = jax.tree.map(lambda column: column[indices], inputs.data)
        if not self.algorithm.takes_key:
            return batch, weights, ()
        first = plan.indices[row].reshape(indices.shape[0], -1)[:, 0]  # first of each unit
        return batch, weights, (example_keys(inputs.loss_key, step, first, plan.shards),)

    def _specs(self, plan):
        """Returns the partition of the inputs, for `Placement.on_each`."""
        columns = jax.tree.map(lambda sharding: sharding.spec, self.placement.plan(plan))
        replicated: Any = WHOLE
        return BlockInputs(SHARDED if self.streamed else replicated, columns, *(replicated,) * 5)


def _run_block(
    step: _Step, state: TrainState, inputs: BlockInputs
) -> tuple[TrainState, Diagnostics, Any]:
    plan, places = inputs.plan, inputs.watch.places

    def one_step(j, carry):
        """Takes step `j` of the block, and records diagnostics and watched values."""
        state, log, watched = carry
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=j, axis=0)
        state, diagnostics = step(state, j, inputs)
        log = put(log, jnp.stack(diagnostics))
        leaves = zip(jax.tree.leaves(state.raw_params), places, strict=True)
        watched_values = [leaf.ravel()[index].astype(jnp.float32) for leaf, index in leaves]
        return state, log, put(watched, jnp.concatenate(watched_values))

    block_steps = plan.starts.shape[0] - 1
    log = jnp.zeros((block_steps, len(Diagnostics._fields)), jnp.float32)
    watched = jnp.zeros((block_steps, sum(map(len, places))), jnp.float32)
    # A dynamic trip count: a last, shorter block runs in the same program, without idle steps.
    state, log, watched = jax.lax.fori_loop(0, plan.num_steps, one_step, (state, log, watched))
    return state, Diagnostics(*log.T), watched


def flush_noise(
    algorithm: Algorithm, arguments: tuple[Any, ...], placement: Placement
) -> TrainState:
    """Returns the state with all pending noise added.

    The guarantee covers it.

    Args:
      algorithm: Training algorithm.
      arguments: Training state, whose buffers are donated (no other draw may follow from it); laws
        of the flush, from `RunLaws.flush_arrays`; uint32[4], key of the noise stream; and scales of
        the mechanism.
      placement: Devices that compute.
    """
    return flush_program(algorithm, arguments, placement).compiled(*arguments)[0]


def flush_program(
    algorithm: Algorithm, arguments: tuple[Any, ...], placement: Placement
) -> Program:
    """Returns the program of `flush_noise`.

    It also returns the steps of rows, in the place of the donated buffers.

    Args:
      algorithm: Training algorithm.
      arguments: Arguments of `flush_noise`, or their shapes.
      placement: Devices that compute.
    """
    replicated, state = [placement.replicated] * (len(arguments) - 1), placement.state(arguments[0])
    shardings = (state, *replicated), _without_steps(state)
    static = algorithm.lazy, placement
    return program(_flush_all, static, arguments, donate_argnums=(0,), shardings=shardings)


def _flush_all(lazy, placement, state, laws, noise_key, scales):
    shapes, specs = jax.eval_shape(lambda: state.raw_params), placement.specs(state)

    def flush(state, laws, noise_key, scales):
        """Returns a device's part of the state, its rows flushed."""
        return lazy.flush(state, Context(noise_key, scales, laws, shapes, placement))

    flush = placement.on_each(flush, (specs, WHOLE, WHOLE, WHOLE), specs)
    state = flush(state, laws, noise_key, scales)
    return _without_steps(state)


def _without_steps(state: TrainState) -> tuple[TrainState, dict[int, Any]]:
    """Returns a state, or its shardings, without the steps of rows, and these steps."""
    tables = {k: table._replace(steps=None) for k, table in state.tables.items()}
    return state._replace(tables=tables), {k: table.steps for k, table in state.tables.items()}
