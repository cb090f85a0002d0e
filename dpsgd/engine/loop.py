"""The training loop: blocks of steps as one compiled program, fed by background threads."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.algorithm import Algorithm, Schedule
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState, opened
from dpsgd.engine.algorithm import owned
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.blocks import cut, in_background, most_passes, plan_blocks, widened, with_rows
from dpsgd.engine.modules import check_parameters
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import (
    arrays_digest,
    digest,
    executable,
    put,
    shapes_of_rows,
    text_digest,
)
from dpsgd.engine.step import Watch, compiled_block, flushed
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, BatchSource, IndexBlock, UnitData
from samplers.base import MAX_EXAMPLES

PyTree = Any

BLOCK_STEPS = 64
"""Steps of one dispatch, unless something else is asked for."""

STREAMED_BYTES = 2**28
"""Most bytes of rows that one block of streamed data brings along, where one step has fewer."""


class Block(NamedTuple):
    """What one block of steps leaves behind. It may still be computing: whoever reads it waits.

    `state` is donated to the next block: copy what must outlive the iteration before advancing it.
    """

    state: TrainState
    """After the block's last step. Where noise is `pending` in it, it is NOT covered."""
    steps: range
    log: Diagnostics
    """float32[block_steps] each, on the device; what follows the block's last step is void."""
    watched: Any
    """What `Watch.places` names, leaf after leaf: float32[block_steps, places], on the device. Of
    lazy tables it is NOT covered by the guarantee: noise is pending in their rows."""

    @property
    def diagnostics(self) -> Diagnostics:
        """Per step, NumPy float32[steps]. NOT covered by the guarantee."""
        return jax.tree.map(lambda column: np.asarray(column)[: len(self.steps)], self.log)


def repeats_exactly() -> bool:
    """Whether the same program of the same inputs gives the same bits again on the default backend.

    On a CPU it does, in another process too. On a GPU, sums by atomic operations and kernels picked
    by timing may differ in the last bits; a step that is repeated for a run that goes on would then
    release those bits without noise.
    """
    return jax.default_backend() == "cpu"


class Layout(NamedTuple):
    """How the blocks of a run are laid out: all have these shapes, and one program runs them.

    Attributes:
      block_steps: Steps of a full block.
      passes: Rows of its plan, each the indices of one pass.
      streamed: Whether each block's rows of the data travel with it; else all lie on the device.
      placement: Which devices compute; None is one.
    """

    block_steps: int
    passes: int
    streamed: bool
    placement: Placement | None = None

    @classmethod
    def of(
        cls,
        sampler: BatchSampler,
        data: PyTree,
        *,
        block_steps: int = BLOCK_STEPS,
        data_on: Literal["device", "host"] | None = None,
        placement: Placement | None = None,
    ) -> Layout:
        """Returns the layout of a run, see `train_blocks` for the arguments."""
        leaves = jax.tree.leaves(data)
        size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        if data_on is None and len(_held(sampler, placement)) < sampler.num_shards:
            data_on = "host"
        if sampler.num_examples > MAX_EXAMPLES:  # 32 bits number them in a program
            if data_on == "device":
                raise ValueError(
                    f"a program numbers {MAX_EXAMPLES:,} rows on a device, and the data have "
                    f"{sampler.num_examples:,}: data_on='host'"
                )
            data_on = "host"
        if data_on is None:
            # None for CPUs, which share the host's memory.
            memory = jax.local_devices()[0].memory_stats() or {}
            free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
            data_on = "host" if size > free / 2 else "device"
        if data_on == "host":
            a_step = sampler.padded_batch_size * size / sampler.num_examples
            block_steps = max(1, min(block_steps, int(STREAMED_BYTES / a_step)))
        passes = most_passes(sampler, block_steps)
        return cls(block_steps, passes, data_on == "host", placement)

    def program(self, algorithm: Algorithm, mechanism: Mechanism, state: Any, data: PyTree):
        """Returns the executable that `train_blocks` runs, from shapes alone: see `arguments`."""
        arguments = self.arguments(algorithm, mechanism, state, data)
        return compiled_block(algorithm, mechanism.sampler, arguments, self)

    def arguments(
        self, algorithm: Algorithm, mechanism: Mechanism, state: Any, data: PyTree
    ) -> tuple[Any, ...]:
        """Returns the arguments of `compiled_block`, or their shapes.

        Args:
          algorithm: From `dpsgd`.
          mechanism: Sampler, sigma and C.
          state: From `algorithm.init`, or its shapes.
          data: Training rows, or their shapes.
        """
        sampler = mechanism.sampler
        index = jax.ShapeDtypeStruct((self.passes, self._width(sampler)), jnp.int32)
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
        root = RootKey.from_entropy()  # only the shapes of its keys are read
        keys = _keys(algorithm, mechanism, root, 0)
        # No weak types, as in `train_blocks`.
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        state = state if state.pending else jax.eval_shape(opened, state)
        schedules = schedules_of(algorithm, sampler.num_steps)
        blocks = tuple(one and one.of(range(1), self.block_steps) for one in schedules)
        watch = Watch.nothing(state.raw_params)
        return state, columns, plan, keys[0], mechanism.scales(), watch, keys[1], blocks

    def put_state(self, state: Any) -> Any:
        """Puts a state where it belongs, in buffers that may be given away if those here may be."""
        if self.placement is not None:
            state = self.placement.put_state(state)
        # No weak types: one program for a state that was just made and for one that was read back.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)

    def opened(self, state: TrainState) -> TrainState:
        """Returns what `state.opened` does, of a state whose buffers are given away."""
        if state.pending or not state.tables:
            return state
        shardings = None
        if self.placement is not None:
            end = jax.eval_shape(opened, state)
            shardings = (self.placement.state(state),), self.placement.state(end)
        how: Any = {"donate_argnums": (0,), "shardings": shardings}
        return executable(opened, (), (state,), **how)(state)

    def put_data(self, data: PyTree) -> PyTree:
        """Puts the data where blocks read them: of those that travel, nothing yet."""
        # What is mapped from files stays there; other arrays that are none of JAX's are read whole.
        if self.streamed:
            return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, data)
        data = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), data)
        placement = self.placement
        return put(data) if placement is None else placement.put(data, placement.replicated)

    def put_block(
        self, sampler: BatchSampler, data: PyTree, plan: IndexBlock
    ) -> tuple[PyTree, IndexBlock]:
        """Puts on the devices what a block reads; returns its rows, and its plan.

        Args:
          sampler: Which drew it.
          data: From `put_data`; or the rows of those shards alone that are `held`.
          plan: Of NumPy arrays, of all shards; or of those that are held.
        """
        placement = self.placement
        if placement is None:
            return put(with_rows(data, plan)) if self.streamed else (data, put(plan))
        groups, width = self._groups(sampler), self._width(sampler)
        if plan.indices.shape[1] < sampler.padded_batch_size:
            own = widened(plan, width // groups)
        else:
            plan = widened(plan, width, groups)
            if not self.streamed:
                return data, placement.put(plan, placement.plan(plan))
            each, here = width // len(placement.devices), placement.here
            own = cut(plan, slice(here.start * each, here.stop * each))
        rows, own = with_rows(data, own, len(placement.here))
        rows = placement.put_parts(rows, placement.by_rows)
        return rows, placement.put_parts(own, placement.plan(own))

    def held(self, sampler: BatchSampler) -> range:
        """Returns the shards that this process draws and reads the rows of."""
        return _held(sampler, self.placement) if self.streamed else range(sampler.num_shards)

    def _groups(self, sampler: BatchSampler) -> int:
        """Returns how many processes have shards of their own."""
        return sampler.num_shards // len(self.held(sampler))

    def _width(self, sampler: BatchSampler) -> int:
        """Returns how many places a pass has, with those that fill up what the devices share."""
        size, unit = sampler.padded_batch_size, math.prod(sampler.clipped_shape)
        return size if self.placement is None else self.placement.width(size, unit)


def _held(sampler: BatchSampler, placement: Placement | None) -> range:
    return range(sampler.num_shards) if placement is None else placement.shards(sampler)


def _keys(
    algorithm: Algorithm, mechanism: Mechanism, root: RootKey, generation: int
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the keys of a generation's noise and, if the loss takes one, of its loss."""
    loss = jnp.asarray(root.loss_key(generation)) if algorithm.takes_key else None
    return jnp.asarray(mechanism.noise_key(root, generation)), loss


def train_blocks(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    data: PyTree | UnitData,
    *,
    root: RootKey,
    generation: int = 0,
    block_steps: int = BLOCK_STEPS,
    data_on: Literal["device", "host"] | None = None,
    declare: Callable[[range], None] = lambda steps: None,
    donate: bool = False,
    watch: Watch | None = None,
    placement: Placement | None = None,
    batches: Callable[[int], BatchFiles] | None = None,
    flush_every: int | None = None,
    run: str | None = None,
) -> Generator[Block]:
    """Runs `algorithm` from `state` to the sampler's last step, yielding every block as it begins.

    While one block computes, background threads draw the batches of the next, and of the next
    epoch; and the caller may look at the block before. No more than two are ever under way.

    Args:
      algorithm: From `dpsgd`.
      mechanism: Sampler, sigma and C.
      state: From `algorithm.init`, or a later one to continue from.
      data: Pytree of arrays with one leading row per example, [num_examples, ...]; or `UnitData`.
      root: Secret from which the streams of sampling, noise and the loss derive.
      generation: Which continuation of the run this is; another one means other randomness. The
        same root and generation may repeat a run, or go on with it, and serve no other: two runs
        under one noise have a noise-free difference. One that is begun anew begins with the
        `noise` of `algorithm.init`, or correlated noise costs more than is said.
      block_steps: Steps per dispatch.
      data_on: Where the data lie. "device": only indices and weights travel. "host": in memory or
        memory-mapped, and each block's rows travel with it; to the same bits. By default "host" if
        the device says how much memory it has and the data would take more than half of what is
        free; or if several processes share the sampler's shards, each of which then reads the rows
        of its own alone.
      declare: Called with the steps of each block before any of its noise exists; the block runs
        only when it has returned.
      donate: Whether the buffers of `state` may be overwritten. By default it is copied, and holds
        after training what it held before.
      watch: What blocks show of themselves, to an audit; by default what training needs: nothing.
      placement: Which devices compute; by default one. On others the same steps have other bits, as
        sums are added up in another order: to go on with a run on others is another generation.
      batches: Opens, by the sampling seed, files of the batches that are drawn otherwise: then no
        row of `data` is read.
      flush_every: F: a block ends when a multiple of F steps of the run are done, and all noise of
        lazy tables that is pending is drawn then, so that the guarantee covers `Block.state`: part
        of the path that repeats a run. After the run's last step it always does.
      run: Names the run that claims the root, see `RootKey.begin_run`, and whose data, parameters
        and program somebody else holds fast. By default they are read and claimed here: for one
        generation of a root, data, mechanism and program must be those of the first call, which is
        another program in other blocks; and so must the state, if a call began with its step.

    Raises:
      ValueError: if another run has claimed `root`, or it was used otherwise; the data have not
        exactly the sampler's number of examples, or not the units that it draws, the parameters
        hold batch statistics, the loss could see other examples than its own, or `flush_every` is
        below one.
    """
    if flush_every is not None and flush_every < 1:
        raise ValueError(f"flush_every must be at least 1, got {flush_every}")
    data = columns_of(mechanism.sampler, data)
    check_parameters(state.raw_params)
    _check_noise_state(mechanism, state)
    # Before buffers are given away.
    claims = not run and not root.insecure and mechanism.noise_multiplier > 0
    uses = _uses(generation, mechanism, data, state) if claims else {}
    noise_key, loss_key = _keys(algorithm, mechanism, root, generation)
    scales = mechanism.scales()
    watch = watch or Watch.nothing(state.raw_params)
    num_steps = mechanism.sampler.num_steps
    schedules = schedules_of(algorithm, num_steps)
    layout = Layout.of(
        mechanism.sampler, data, block_steps=block_steps, data_on=data_on, placement=placement
    )
    now: Any = layout.put_state(state if donate else owned(state))
    if batches is not None and not layout.streamed:
        raise ValueError("batches that were drawn ahead bring their rows along: data_on='host'")
    seed, held = root.sampling_seed(generation), layout.held(mechanism.sampler)
    source: BatchSource
    if batches is not None:
        source = batches(seed)
    else:
        source = BatchSource(mechanism.sampler, seed, shards=held, read_ahead=True)
    inputs = _inputs(source, data, layout, first_step=int(now.step), ends=flush_every)
    under_way: deque[Diagnostics] = deque()
    program, begun = None, False  # one for all blocks, whatever is set in JAX meanwhile
    with closing(in_background(inputs)) as blocks:
        for steps, rows, plan in blocks:
            now = layout.opened(now)
            known = tuple(one and one.of(steps, layout.block_steps) for one in schedules)
            arguments = now, rows, plan, noise_key, scales, watch, loss_key, known
            # The first time, this may refuse the loss.
            program = program or compiled_block(algorithm, mechanism.sampler, arguments, layout)
            if not begun:  # what is refused before has not begun
                if uses:
                    uses[f"{generation}:program"] = digest(program)
                root.begin_run(run or "train_blocks", uses)
                begun = True
            declare(steps)
            if len(under_way) == 2:
                jax.block_until_ready(under_way.popleft())
            now, log, watched = program(*arguments)
            under_way.append(log)
            ends = steps.stop == num_steps or (flush_every and steps.stop % flush_every == 0)
            if now.pending and ends:
                known = tuple(one and one.after(steps.stop) for one in schedules)
                now = flushed(algorithm, now, known, noise_key, scales, placement)
            yield Block(now, steps, log, watched)


def schedules_of(algorithm: Algorithm, num_steps: int) -> list[Schedule | None]:
    """Returns what each parameter group knows of a run of so many steps."""
    return [group.schedule(num_steps) for group in algorithm.groups]


def _uses(generation: int, mechanism: Mechanism, data: PyTree, state: TrainState) -> dict[str, str]:
    """Returns digests of what one noise may be used for, by generation and, of a state, step."""
    return {
        f"{generation}:mechanism": text_digest(_described(mechanism)),
        f"{generation}:data": arrays_digest(data),
        f"{generation}:{int(state.step)}:parameters": arrays_digest(state),
    }


def _described(x: Any) -> str:
    """Returns what tells a value of dataclasses, tuples and arrays from another one."""
    if isinstance(x, np.ndarray | jax.Array):
        return arrays_digest(x)
    if isinstance(x, tuple | list):
        return f"[{', '.join(map(_described, x))}]"
    if dataclasses.is_dataclass(x):
        fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return f"{type(x)}{ {name: _described(value) for name, value in fields.items()} }"
    return repr(x)


def _inputs(
    source: BatchSource, data: PyTree, layout: Layout, *, first_step: int, ends: int | None
) -> Iterator[tuple[range, PyTree, IndexBlock]]:
    """Yields steps, data and plan of every block, on the device."""
    if isinstance(source, BatchFiles):
        for steps, rows, plan in source.blocks(first_step, layout.block_steps, ends=ends):
            yield steps, *layout.put_block(source.sampler, rows, plan)
        return
    if len(source.rows) < source.sampler.num_examples:  # what is mapped from files is not read yet
        data = jax.tree.map(lambda column: column[source.rows.start : source.rows.stop], data)
    data = layout.put_data(data)
    how: Any = {"first_step": first_step, "block_steps": layout.block_steps, "ends": ends}
    for steps, plan in plan_blocks(source, **how):
        yield steps, *layout.put_block(source.sampler, data, plan)


def columns_of(sampler: BatchSampler, data: PyTree | UnitData) -> PyTree:
    """Returns the arrays of `data`, or raises ValueError where they are not what a sampler draws.

    Each must have one row per example of the sampler; and units, where the data say what they are,
    must be those that it protects.
    """
    if isinstance(data, UnitData):
        sampler.protected_unit(data.population)
        data = data.columns
    if not jax.tree.leaves(data):
        raise ValueError("data holds no arrays")
    for path, column in jax.tree_util.tree_leaves_with_path(data):
        name = f"data{jax.tree_util.keystr(path)}"
        if not np.ndim(column) or not hasattr(column, "dtype"):
            raise ValueError(
                f"{name} is {type(column).__name__} and no array with one row for each example"
            )
        if not jnp.issubdtype(column.dtype, np.number) and column.dtype != np.bool_:
            raise ValueError(f"{name} holds {column.dtype}, of which nothing can be computed")
        if column.shape[0] != sampler.num_examples:
            raise ValueError(
                f"{name} has {column.shape[0]} rows, but the sampler was built for "
                f"num_examples={sampler.num_examples}: its guarantee is for those"
            )
    return data


def _check_noise_state(mechanism: Mechanism, state: TrainState) -> None:
    """Raises ValueError unless `state` has what the mechanism's noise needs from step to step."""
    needed = jax.eval_shape(mechanism.noise.init, state.raw_params)
    if not mechanism.noise_multiplier:
        needed = ()
    if jax.tree.map(jnp.shape, state.noise) != jax.tree.map(jnp.shape, needed):
        raise ValueError(
            f"the state was not made for {mechanism.noise}: make it by algorithm.init(params, "
            "mechanism)"
        )
