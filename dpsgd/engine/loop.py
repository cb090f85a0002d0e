"""The training loop: blocks of steps as one compiled program, fed by background threads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dpsgd.core.algorithm import Algorithm
from dpsgd.core.marks import marked
from dpsgd.core.mechanism import Mechanism, Scales
from dpsgd.core.state import LazyState, TrainState, opened, unflushed
from dpsgd.engine.algorithm import owned
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.blocks import cut, in_background, most_passes, plan_blocks, widened, with_rows
from dpsgd.engine.lazy.group import BlockLaws, RunLaws, flushed
from dpsgd.engine.modules import check_parameters
from dpsgd.engine.placement import AXIS, Exchange, Placement
from dpsgd.engine.programs import (
    arrays_digest,
    digest,
    executable,
    put,
    shapes_of_rows,
    text_digest,
)
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.gradients.losses import example_keys
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, BatchSource, IndexBlock, UnitData
from samplers.base import MAX_EXAMPLES

PyTree = Any

BLOCK_STEPS = 64
"""Steps of one dispatch, unless something else is asked for."""

STREAMED_BYTES = 2**28
"""Most bytes of rows that one block of streamed data brings along, where one step has fewer."""


class Watch(NamedTuple):
    """What a block of steps shows of itself: to whoever trains nothing, to an audit its releases.

    It is an argument of the compiled program, so that what is audited is the program that trains.
    All that it shows is of parameters or of private gradients: what the guarantee covers.

    Attributes:
      reveals: Whether the parameters after each step are the private mean gradient of that step, in
        place of the updated ones: bool scalar. The optimizer's state is updated either way.
      places: Of each leaf of the parameters, coordinates that are written down after each step:
        int32[min(size, `WATCHED`)], row-major.
    """

    reveals: Any
    places: tuple[Any, ...]

    @classmethod
    def nothing(cls, params: PyTree) -> Watch:
        """Returns what training gives: the first places, and no gradient."""
        sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
        places = tuple(np.arange(min(size, WATCHED), dtype=np.int32) for size in sizes)
        return cls(np.bool_(False), places)


WATCHED = 128
"""Most coordinates of a leaf that are written down after each step."""


class Block(NamedTuple):
    """What one block of steps leaves behind. It may still be computing: whoever reads it waits.

    `state` is donated to the next block: copy what must outlive the iteration before advancing it.
    """

    state: Any
    """A `TrainState`; of lazy tables a `LazyState`, unless it was flushed, which is NOT covered."""
    steps: range
    log: Diagnostics
    """float32[block_steps] each, on the device; what follows the block's last step is void."""
    watched: Any
    """What `Watch.places` names, leaf after leaf: float32[block_steps, places], on the device. Of
    lazy tables it is NOT covered by the guarantee: noise is due in their rows."""

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


def block_function(
    algorithm: Algorithm, sampler: BatchSampler
) -> Callable[..., tuple[Any, Diagnostics, Any]]:
    """Returns a block of steps as a function.

    It is (state, data, plan, noise_key, scales, watch) -> (state, diagnostics, watched), with a
    last argument `loss_key` where the loss takes a key. Of the sampler it depends on little: how a
    batch is cut.
    """
    return functools.partial(_run_block, *_parts(algorithm, sampler))


def compiled_block(
    algorithm: Algorithm,
    sampler: BatchSampler,
    arguments: tuple[Any, ...],
    layout: Layout | None = None,
    make: Callable[..., Any] = executable,
) -> Any:
    """Returns the executable of `block_function` for arguments of these shapes, see `executable`.

    The first argument's buffers are given away. Without a `layout` it is that of one device. With
    `make=traced` it is the trace of which that is compiled.
    """
    parts, shardings = _parts(algorithm, sampler, layout), None
    if layout is not None and (placement := layout.placement) is not None:
        state, whole = placement.state(arguments[0]), placement.replicated
        if arguments[4].grid is not None and placement.deals(arguments[0]):
            raise ValueError(
                "secure noise is drawn for whole arrays, and the gradient of every example is "
                "formed: parameters cannot be dealt out by rows, leave out shard_rows_from"
            )
        rows = placement.by_rows if layout.streamed else whole
        places = state, rows, placement.plan(arguments[2]), whole, whole, whole, whole, whole
        shardings = places, (state, whole, whole)
    return make(_run_block, parts, arguments, donate_argnums=(0,), shardings=shardings)


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
        laws = None
        if algorithm.tables is not None:
            state = jax.eval_shape(opened, state) if isinstance(state, TrainState) else state
            run = RunLaws(algorithm.tables.of_run(sampler.num_steps))
            laws = run.of(range(1), self.block_steps)
        watch = Watch.nothing(unflushed(state))
        return state, columns, plan, keys[0], mechanism.scales(), watch, keys[1], laws

    def put_state(self, state: Any) -> Any:
        """Puts a state where it belongs, in buffers that may be given away if those here may be."""
        if self.placement is not None:
            state = self.placement.put_state(state)
        # No weak types: one program for a state that was just made and for one that was read back.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)

    def opened(self, state: TrainState) -> LazyState:
        """Returns what `lazy_state.opened` does, of a state whose buffers are given away."""
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


def _parts(
    algorithm: Algorithm, sampler: BatchSampler, layout: Layout | None = None
) -> tuple[Any, ...]:
    where = (layout.placement, layout.streamed) if layout else (None, False)
    batches = _Batches(algorithm.takes_key, sampler.clipped_shape, *where)
    if algorithm.tables is not None:
        return (_LazyStep(batches, algorithm.update),)
    step_sum = _StepSum(algorithm.clipped_sum, sampler.accumulates, batches)
    return (_Step(step_sum, algorithm.update, algorithm.frozen),)


@dataclass(frozen=True)
class _Batches:
    """What is clipped in each pass of a block, and on which device."""

    takes_key: bool
    clipped_shape: tuple[int, ...]
    placement: Placement | None
    dealt: bool
    """Whether each device has rows of its own, and `places` are among these."""

    def at(self, step, row, data, plan, loss_key):
        """Returns what is clipped in one pass: examples, their weights, and their keys if any."""
        places = plan.indices if plan.places is None else plan.places
        indices = places[row].reshape(-1, *self.clipped_shape)
        weights = plan.weights[row].reshape(indices.shape[0], -1).max(axis=1)
        batch = jax.tree.map(lambda column: column[indices], data)
        if not self.takes_key:
            return batch, weights, ()
        first = plan.indices[row].reshape(indices.shape[0], -1)[:, 0]  # of what is clipped as one
        return batch, weights, (example_keys(loss_key, step, first, plan.shards),)

    def specs(self, plan: IndexBlock) -> tuple[PartitionSpec, IndexBlock]:
        """Returns where rows of the data lie, and a plan, for `Placement.on_each`."""
        assert self.placement is not None
        columns = jax.tree.map(lambda sharding: sharding.spec, self.placement.plan(plan))
        return DEALT if self.dealt else WHOLE, columns


WHOLE, DEALT = PartitionSpec(), PartitionSpec(AXIS)


@dataclass(frozen=True)
class _StepSum:
    """The sum of clipped gradients of a step: over its passes, and over the devices."""

    clipped_sum: Callable
    accumulates: bool
    batches: _Batches

    def __call__(self, state, j, data, plan, scales, loss_key):
        placement = self.batches.placement
        batch = functools.partial(self.batches.at, state.step)
        if placement is None:
            return self._sum(self.clipped_sum, batch, state.params, j, data, plan, scales, loss_key)
        rows = self.batches.specs(plan)
        if placement.deals(state):
            # Each device looks up its own rows; what follows is dealt out by the compiler.
            dealt = placement.on_each(batch, (WHOLE, *rows, WHOLE), DEALT)
            clipped_sum = functools.partial(self.clipped_sum, devices=len(placement.devices))
            total, diagnostics = self._sum(
                clipped_sum, dealt, state.params, j, data, plan, scales, loss_key
            )
            shardings = placement.params(state.params)
            return jax.lax.with_sharding_constraint(total, shardings), diagnostics

        def whole_sum(step, *arguments):
            batch = functools.partial(self.batches.at, step)
            return placement.total(self._sum(self.clipped_sum, batch, *arguments))

        summed = placement.on_each(whole_sum, (*(WHOLE,) * 3, *rows, WHOLE, WHOLE), WHOLE)
        return summed(state.step, state.params, j, data, plan, scales, loss_key)

    def _sum(self, clipped_sum, batch_of, params, j, data, plan, scales, loss_key):
        """Returns the sum over the passes of step `j`."""

        def batch_sum(row):
            batch, weights, keys = batch_of(row, data, plan, loss_key)
            return clipped_sum(params, batch, weights, scales, *keys)

        if not self.accumulates:
            return batch_sum(j)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(batch_sum, jnp.int32(0)),
        )

        def add(row, total):
            return jax.tree.map(jnp.add, total, batch_sum(row))

        return jax.lax.fori_loop(plan.starts[j], plan.starts[j + 1], add, zeros)


@dataclass(frozen=True)
class _Step:
    """One step of a block: the state after it, diagnostics, and the parameters that it shows."""

    step_sum: _StepSum
    update: Callable
    frozen: Callable

    def __call__(self, state, j, data, plan, noise_key, scales, watch, loss_key, laws):
        total, diagnostics = self.step_sum(state, j, data, plan, scales, loss_key)
        total = jax.tree.map(lambda leaf: marked(leaf, "sum"), total)
        example = shapes_of_rows(data, *self.step_sum.batches.clipped_shape)
        frozen = self.frozen(state.params, example)
        how = {"frozen": frozen} if frozen else {}
        state, gradient = self.update(state, total, noise_key, scales, **how)
        # In the one pass over all coordinates that the update is: a select costs nothing there.
        shown = jax.tree.map(functools.partial(jnp.where, watch.reveals), gradient, state.params)
        return state._replace(params=shown), diagnostics, shown


@dataclass(frozen=True)
class _LazyStep:
    """The same of lazy tables."""

    batches: _Batches
    update: Callable

    def __call__(self, state, j, data, plan, noise_key, scales, watch, loss_key, laws):
        placement = self.batches.placement
        shapes = jax.eval_shape(unflushed, state)

        def step(state, j, data, plan, noise_key, scales, reveals, loss_key, laws):
            batch = self.batches.at(state.step, j, data, plan, loss_key)
            how = noise_key, scales, reveals, laws.at(j), shapes, Exchange(placement)
            return self.update(state, *batch, *how)

        if placement is not None:
            parts = placement.specs(state)
            of_all = parts, WHOLE, *self.batches.specs(plan), *(WHOLE,) * 5
            step = placement.on_each(step, of_all, (parts, WHOLE))
        state, diagnostics = step(
            state, j, data, plan, noise_key, scales, watch.reveals, loss_key, laws
        )
        return state, diagnostics, unflushed(state)


def _run_block(
    step: _Step | _LazyStep,
    state: TrainState | LazyState,
    data: PyTree,
    plan: IndexBlock,
    noise_key: Any,
    scales: Scales,
    watch: Watch,
    loss_key: Any = None,
    laws: BlockLaws | None = None,
) -> tuple[TrainState | LazyState, Diagnostics, Any]:
    def one_step(j, carry):
        state, log, watched = carry
        arguments = data, plan, noise_key, scales, watch, loss_key, laws
        state, diagnostics, shown = step(state, j, *arguments)
        log = jax.tree.map(lambda column, x: column.at[j].set(x), log, diagnostics)
        leaves = zip(jax.tree.leaves(shown), watch.places, strict=True)
        here = [leaf.ravel()[places].astype(jnp.float32) for leaf, places in leaves]
        return state, log, watched.at[j].set(jnp.concatenate(here))

    block_steps = plan.starts.shape[0] - 1
    log = Diagnostics(*(jnp.zeros(block_steps, jnp.float32) for _ in Diagnostics._fields))
    watched = jnp.zeros((block_steps, sum(map(len, watch.places))), jnp.float32)
    # A dynamic trip count: a last, shorter block runs in the same program, without idle steps.
    return jax.lax.fori_loop(0, plan.num_steps, one_step, (state, log, watched))


def train_blocks(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState | LazyState,
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
      flush_every: Of lazy tables, F: a block ends when a multiple of F steps of the run are done,
        and all noise that is due is drawn then, so that `Block.state` is a `TrainState`: part of
        the path that repeats a run. After the run's last step it always is.
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
    check_parameters(unflushed(state))
    _check_noise_state(mechanism, state)
    # Before buffers are given away.
    claims = not run and not root.insecure and mechanism.noise_multiplier > 0
    uses = _uses(generation, mechanism, data, state) if claims else {}
    noise_key, loss_key = _keys(algorithm, mechanism, root, generation)
    scales = mechanism.scales()
    watch = watch or Watch.nothing(unflushed(state))
    tables, num_steps = algorithm.tables, mechanism.sampler.num_steps
    run_laws = tables and RunLaws(tables.of_run(num_steps))
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
    ends = flush_every if tables else None
    inputs = _inputs(source, data, layout, first_step=int(now.step), ends=ends)
    under_way: deque[Diagnostics] = deque()
    program, begun = None, False  # one for all blocks, whatever is set in JAX meanwhile
    with closing(in_background(inputs)) as blocks:
        for steps, rows, plan in blocks:
            laws = run_laws and run_laws.of(steps, layout.block_steps)
            if run_laws and isinstance(now, TrainState):
                now = layout.opened(now)
            arguments = now, rows, plan, noise_key, scales, watch, loss_key, laws
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
            if run_laws and (steps.stop == num_steps or (ends and steps.stop % ends == 0)):
                now = flushed(now, run_laws.after(steps.stop), noise_key, scales, placement)
            yield Block(now, steps, log, watched)


def _uses(
    generation: int, mechanism: Mechanism, data: PyTree, state: TrainState | LazyState
) -> dict[str, str]:
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


def _check_noise_state(mechanism: Mechanism, state: TrainState | LazyState) -> None:
    """Raises ValueError unless `state` has what the mechanism's noise needs from step to step."""
    needed = jax.eval_shape(mechanism.noise.init, unflushed(state))
    if not mechanism.noise_multiplier:
        needed = ()
    if jax.tree.map(jnp.shape, state.noise) != jax.tree.map(jnp.shape, needed):
        raise ValueError(
            f"the state was not made for {mechanism.noise}: make it by algorithm.init(params, "
            "mechanism)"
        )
