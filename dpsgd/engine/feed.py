"""Feed of a run: layout of its blocks, and transport of rows and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting.checks import check_count
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState, defer_noise
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.blocks import most_passes, pad_columns, plan_blocks, select_columns, with_rows
from dpsgd.engine.placement import Placement, check_placement
from dpsgd.engine.programs import program, put_on_device, shapes_of_rows
from dpsgd.engine.sources import is_streamed, take_rows
from dpsgd.engine.step import BlockInputs, Watch, compiled_block
from dpsgd.noise.keys import Keys, Seeds
from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock
from samplers.plans import MAX_EXAMPLES

PyTree = Any
Inputs = tuple[range, PyTree, IndexBlock]
"""Steps of a block, its rows (or those that its places index), and its plan."""

BLOCK_STEPS = 64
"""Default number of steps in one dispatch."""

STREAMED_BYTES = 2**28
"""Capacity of a streamed block, bytes of rows; a single step may exceed it."""


class Layout(NamedTuple):
    """Shapes of a run's blocks, which one compiled program runs.

    Attributes:
      block_steps: Number of steps of a full block.
      passes: Number of rows of its plan, each with the indices of one pass.
      streamed: True if each block's rows travel with it; otherwise all rows lie on the device.
      placement: Devices that compute.
    """

    block_steps: int
    passes: int
    streamed: bool
    placement: Placement

    @classmethod
    def choose(
        cls,
        sampler: BatchSampler,
        data: PyTree,
        *,
        block_steps: int = BLOCK_STEPS,
        data_on: Literal["device", "host"] | None = None,
        placement: Placement | None = None,
    ) -> Layout:
        """Returns the layout of a run.

        Args:
          sampler: Sampler of the run.
          data: Columns of the data, or their shapes.
          block_steps: Number of steps of a full block, less if a block's rows would take too much.
          data_on: "device" or "host", see `train_blocks`.
          placement: Devices that compute; by default one.

        Raises:
          TypeError: If `placement` is no `Placement`.
          ValueError: If another argument has no such value, or the data have too many rows for it.

        >>> from samplers import Deterministic
        >>> Layout.choose(Deterministic(100, batch_size=10), np.zeros((100, 2))).block_steps
        64
        """
        check_count("block_steps", block_steps)
        if data_on not in (None, "device", "host"):
            raise ValueError(f"data_on must be 'device', 'host' or None, got {data_on!r}")
        check_placement(placement)
        leaves, placement = jax.tree.leaves(data), placement or Placement.one()
        size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        if data_on is None and len(placement.shards(sampler)) < sampler.num_shards:
            data_on = "host"
        if sampler.num_examples > MAX_EXAMPLES:  # 32 bits number them in a program
            if data_on == "device":
                raise ValueError(
                    f"data_on='device' allows {MAX_EXAMPLES:,} rows, and the data have "
                    f"{sampler.num_examples:,}; take data_on='host'"
                )
            data_on = "host"
        if data_on is None:
            data_on = "host" if is_streamed(data) or size > placement.free_memory / 2 else "device"
        if data_on == "host":
            a_step = sampler.padded_batch_size * size / sampler.num_examples
            block_steps = max(1, min(block_steps, int(STREAMED_BYTES / a_step)))
        passes = most_passes(sampler, block_steps)
        return cls(block_steps, passes, data_on == "host", placement)

    def program(self, algorithm: Algorithm, mechanism: Mechanism, state: Any, data: PyTree):
        """Returns the executable that `train_blocks` runs.

        Arguments as in `arguments`.
        """
        arguments = self.arguments(algorithm, mechanism, state, data)
        return compiled_block(algorithm, mechanism.sampler, arguments, self)

    def arguments(
        self, algorithm: Algorithm, mechanism: Mechanism, state: Any, data: PyTree
    ) -> tuple[TrainState, BlockInputs]:
        """Returns the shapes of the arguments of `block_program`.

        Args:
          algorithm: Training algorithm.
          mechanism: Mechanism of the run.
          state: Training state, or its shapes.
          data: Columns of the data, or their shapes.
        """
        sampler = mechanism.sampler
        index = jax.ShapeDtypeStruct((self.passes, self.width(sampler)), jnp.int32)
        plan = IndexBlock(
            index,
            index.update(dtype=jnp.float32),
            jax.ShapeDtypeStruct((self.block_steps + 1,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            index if self.streamed or sampler.num_shards > 1 else None,
            jax.ShapeDtypeStruct(index.shape[1:], jnp.int32) if sampler.num_shards > 1 else None,
        )
        rows = index.size if self.streamed else sampler.num_examples
        columns = shapes_of_rows(data, rows)
        noise_key, loss_key = (jax.ShapeDtypeStruct((n,), jnp.uint32) for n in (4, 2))
        # No weak types, as in `train_blocks`.
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        state = state if state.pending else jax.eval_shape(defer_noise, state)
        run_laws = algorithm.gap_laws(sampler.num_steps)
        laws = run_laws and run_laws.block_arrays(range(1), self.block_steps)
        watch = Watch.nothing(state.raw_params)
        taken = loss_key if algorithm.takes_key else None
        scales = mechanism.scales()
        return state, BlockInputs(columns, plan, noise_key, scales, watch, taken, laws)

    def put_state(self, state: Any) -> Any:
        """Puts a state on the devices."""
        state = self.placement.put_whole(state, self.placement.state(state))
        # No weak types: one program for a state that was just made and for one that was read back.
        return jax.tree.map(
            lambda x: jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x, state
        )  # keys of random numbers have none

    def defer_noise(self, state: TrainState) -> TrainState:
        """Returns `defer_noise` of a state whose buffers are donated."""
        if state.pending or not state.tables:
            return state
        deferred = jax.eval_shape(defer_noise, state)
        shardings = (self.placement.state(state),), self.placement.state(deferred)
        deferring = program(defer_noise, (), (state,), donate_argnums=(0,), shardings=shardings)
        return deferring.compiled(state)

    def hold(self, data: PyTree) -> PyTree:
        """Puts the data on the devices, or on the host.

        They stay on the host if rows travel with their blocks.
        """
        if self.streamed:  # mapped files stay mapped; other arrays are read whole
            return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, data)
        data = take_rows(data, slice(None)) if is_streamed(data) else data
        data = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), data)
        return self.placement.put_whole(data, self.placement.replicated)

    def put_block(
        self, sampler: BatchSampler, rows: PyTree, plan: IndexBlock
    ) -> tuple[PyTree, IndexBlock]:
        """Puts a plan on the devices, with its rows if streamed.

        Args:
          sampler: Sampler of the run.
          rows: Rows from `hold`.
          plan: Plan of NumPy arrays, of all data shards or of this process's.
        """
        placement, width = self.placement, self.width(sampler)
        if not self.streamed:
            plan = pad_columns(plan, width)
            return rows, placement.put_whole(plan, placement.plan(plan))
        groups = sampler.num_shards // len(self.process_shards(sampler))
        if plan.indices.shape[1] < sampler.padded_batch_size:
            plan = pad_columns(plan, width // groups)
        else:
            columns_per_device, local = width // len(placement.devices), placement.here
            columns = slice(local.start * columns_per_device, local.stop * columns_per_device)
            plan = select_columns(pad_columns(plan, width, groups), columns)
        rows, plan = with_rows(rows, plan, len(placement.here))
        rows = placement.put_parts(rows, placement.by_rows)
        return rows, placement.put_parts(plan, placement.plan(plan))

    def feed(
        self,
        sampler: BatchSampler,
        data: PyTree,
        seeds: Seeds,
        batches: BatchFiles | None = None,
    ) -> Callable[..., Iterator[Inputs]]:
        """Returns the blocks of a run, with their rows.

        Args:
          sampler: Sampler of the run.
          data: Columns of the data.
          seeds: Sampling seeds.
          batches: Batches drawn ahead, in place of draws and rows.

        Returns:
          A function (first step, ends=None) that yields all blocks from a step on, on the devices;
          one ends at each multiple of `ends`.

        Raises:
          ValueError: If batches were drawn ahead, but rows do not travel.
        """
        draw: Callable[..., Iterator[Inputs]]
        if batches is not None:
            if not self.streamed:
                raise ValueError("batches drawn ahead contain their rows; use data_on='host'")
            draw = batches.blocks
        else:
            shards = self.process_shards(sampler)
            source = BatchSource(sampler, seeds, shards=shards, read_ahead=True)
            first, stop = source.rows.start, source.rows.stop
            if stop - first < sampler.num_examples:  # mapped files are not read yet
                data = jax.tree.map(lambda column: column[first:stop], data)
            columns = self.hold(data)

            def draw(first_step: int, block_steps: int, *, ends: int | None) -> Iterator[Inputs]:
                """Yields steps, columns of all rows, and plan of each block."""
                limits: Any = {"first_step": first_step, "block_steps": block_steps, "ends": ends}
                return ((steps, columns, plan) for steps, plan in plan_blocks(source, **limits))

        def blocks(first_step: int, ends: int | None = None) -> Iterator[Inputs]:
            """Yields all blocks from a step on, on the devices."""
            for steps, rows, plan in draw(first_step, self.block_steps, ends=ends):
                yield steps, *self.put_block(sampler, rows, plan)

        return blocks

    def process_shards(self, sampler: BatchSampler) -> range:
        """Returns the data shards that this process draws."""
        return self.placement.shards(sampler) if self.streamed else range(sampler.num_shards)

    def width(self, sampler: BatchSampler) -> int:
        """Returns the number of places of a pass, padding included."""
        return self.placement.width(sampler.padded_batch_size, math.prod(sampler.clipped_shape))


def keys_of(algorithm: Algorithm, keys: Keys) -> tuple[jax.Array, jax.Array | None]:
    """Returns the keys of noise and loss, on the device."""
    return put_on_device((keys.noise, keys.loss if algorithm.takes_key else None))
