"""Training loop: blocks of steps as one compiled program, fed by background threads."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Diagnostics, TrainState
from dpsgd.engine.algorithm import Algorithm, copy_buffers
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.blocks import in_background
from dpsgd.engine.feed import BLOCK_STEPS, Layout, keys_of
from dpsgd.engine.placement import Placement
from dpsgd.engine.sources import RowSource, columns_of_source
from dpsgd.engine.step import BlockInputs, Watch, compiled_block, flush_noise
from dpsgd.noise.keys import Keys
from samplers import BatchSampler, UnitData

PyTree = Any


class Block(NamedTuple):
    """Result of a block of steps, perhaps still computing: reading it waits.

    `state` is donated to the next block: copy it before advancing the iteration to keep it.
    """

    state: TrainState
    """State after the block's last step; NOT covered by the guarantee with `pending` noise."""
    steps: range
    log: Diagnostics
    """Diagnostics, float32[block_steps] each, on the device; void after the block's last step."""
    watched: Any
    """Coordinates of `Watch.places`, leaf after leaf: float32[block_steps, places], on the device.
    Coordinates of lazy tables are NOT covered by the guarantee: noise is pending in their rows."""
    flush: Callable[[], TrainState]
    """Draws all pending noise of the latest block, and returns its state in place of `state`."""

    @property
    def diagnostics(self) -> Diagnostics:
        """Diagnostics per step, NumPy float32[steps]. NOT covered by the guarantee."""
        return jax.tree.map(lambda column: np.asarray(column)[: len(self.steps)], self.log)


def train_blocks(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    data: PyTree | UnitData | RowSource,
    *,
    insecure_seed: int | None = None,
    block_steps: int = BLOCK_STEPS,
    data_on: Literal["device", "host"] | None = None,
    declare: Callable[[range], None] = lambda steps: None,
    donate: bool = False,
    watch: Watch | None = None,
    placement: Placement | None = None,
    layout: Layout | None = None,
    batches: BatchFiles | None = None,
    flush_every: int | None = None,
    keys: Keys | None = None,
) -> Generator[Block]:
    """Runs `algorithm` to the sampler's last step, yielding blocks.

    While one block computes, background threads draw the batches of the next block and epoch, and
    the caller may read the previous block. At most two blocks are under way.

    Args:
      algorithm: Training algorithm, from `dpsgd`.
      mechanism: Sampler, sigma and C.
      state: State from `algorithm.init`, or a later one to continue from.
      data: Pytree of arrays with one leading row per example, [num_examples, ...]; `UnitData`; or a
        `RowSource`.
      insecure_seed: Seed in [0, 2**64) of reproducible sampling and noise, for debugging; it voids
        the guarantee. None: fresh secrets from the operating system, so that no two calls share
        noise or draws. A call that continues from a later state then needs the `noise` of
        `algorithm.init`, and its steps count as another attempt, see `dpsgd.cost`.
      block_steps: Number of steps per dispatch.
      data_on: Location of the data. "device": only indices and weights travel. "host": each block's
        rows travel with it, from memory or memory-mapped files, to the same bits. By default "host"
        if the data would take more than half of the device's known free memory, or if several
        processes share the sampler's shards and each reads its own rows.
      declare: Function of the steps of each block, called before any of its noise exists; the block
        runs after it returns.
      donate: True to overwrite the buffers of `state`; by default it is copied.
      watch: Values that blocks return to an audit; by default none.
      placement: Devices that compute; by default one. Other devices add up in another order and
        give other bits.
      layout: Layout in place of the previous three options, see `Layout.choose`.
      batches: Batches drawn ahead, in place of draws and rows of `data`.
      flush_every: Period F in steps of the run: at its multiples a block ends and all pending noise
        of lazy tables is drawn, so that the guarantee covers `Block.state`. The last step of the
        run always flushes.
      keys: Keys of an engine that keeps a run's seeds, in place of `insecure_seed`.

    Raises:
      ValueError: If the data do not have the sampler's number of examples or its units; the
        parameters hold batch statistics; the loss could see other examples; or `flush_every` is
        below one.
    """
    if flush_every is not None and flush_every < 1:
        raise ValueError(f"flush_every must be at least 1, got {flush_every}")
    data = columns_of(mechanism.sampler, data)
    check_parameters(state.raw_params)
    _check_state(algorithm, mechanism, state)
    scales = mechanism.scales()
    watch = watch or Watch.nothing(state.raw_params)
    num_steps = mechanism.sampler.num_steps
    laws = algorithm.gap_laws(num_steps)
    if layout is None:
        options: Any = {"block_steps": block_steps, "data_on": data_on, "placement": placement}
        layout = Layout.choose(mechanism.sampler, data, **options)
    keys = keys or Keys.of(insecure_seed, layout.placement.processes)
    noise_key, loss_key = keys_of(algorithm, keys)
    now: Any = layout.put_state(state if donate else copy_buffers(state))
    feed = layout.feed(mechanism.sampler, data, keys.sampling, batches)
    blocks = feed(int(now.step), flush_every)

    def prepare() -> Iterator[tuple[range, BlockInputs, Any]]:
        """Yields each block's steps, inputs, and laws of a flush after it."""
        for steps, rows, plan in blocks:
            arrays = laws and laws.block_arrays(steps, layout.block_steps)
            flushes = steps.stop == num_steps or (flush_every and steps.stop % flush_every == 0)
            due = laws.flush_arrays(steps.stop) if laws and flushes else None
            yield steps, BlockInputs(rows, plan, noise_key, scales, watch, loss_key, arrays), due

    def flush(due: Any = None) -> TrainState:
        """Returns the latest state, all its pending noise drawn."""
        nonlocal now
        if now.pending:
            due = laws.flush_arrays(int(now.step)) if due is None else due
            now = flush_noise(algorithm, (now, due, noise_key, scales), layout.placement)
        return now

    under_way: deque[Diagnostics] = deque()
    programs: dict[Any, Any] = {}  # by length of the plan, whatever is set in JAX meanwhile
    with closing(in_background(prepare())) as prepared:
        for steps, inputs, due in prepared:
            now = layout.defer_noise(now)
            if (passes := len(inputs.plan.indices)) not in programs:  # may refuse the loss
                arguments = mechanism.sampler, (now, inputs), layout
                programs[passes] = compiled_block(algorithm, *arguments)
            declare(steps)
            if len(under_way) == 2:
                jax.block_until_ready(under_way.popleft())
            now, log, watched = programs[passes](now, inputs)
            under_way.append(log)
            if due is not None:
                flush(due)
            yield Block(now, steps, log, watched, flush)


def columns_of(sampler: BatchSampler, data: PyTree | UnitData) -> PyTree:
    """Returns the arrays of `data`, checked against the sampler.

    Args:
      sampler: Sampler of the run.
      data: Columns, or `UnitData` with columns and population.

    Raises:
      ValueError: If a column does not have one row per example of the sampler, or the data's units
        are not those that the sampler protects.
    """
    if isinstance(data, UnitData):
        sampler.protected_unit(data.population)
        data = data.columns
    data = columns_of_source(data)
    if not jax.tree.leaves(data):
        raise ValueError("data holds no arrays")
    for path, column in jax.tree_util.tree_leaves_with_path(data):
        name = f"data{jax.tree_util.keystr(path)}"
        # By attributes: NumPy would read a sequence to its end, which it may not have.
        if not getattr(column, "shape", ()) or not hasattr(column, "dtype"):
            raise ValueError(
                f"{name} is {type(column).__name__}, not an array with one row per example; "
                "pass arrays, such as np.stack([example for example in data])"
            )
        if not jnp.issubdtype(column.dtype, np.number) and column.dtype != np.bool_:
            raise ValueError(f"{name} holds {column.dtype}; pass numbers or booleans")
        if column.shape[0] != sampler.num_examples:
            raise ValueError(
                f"{name} has {column.shape[0]} rows, but the sampler was built for "
                f"num_examples={sampler.num_examples}; both must be equal"
            )
    return data


def check_parameters(params: PyTree) -> None:
    """Refuses leaves of `params` that are no arrays, or that no guarantee allows.

    The latter are modules, batch statistics, random streams and float64.
    """
    nnx = sys.modules.get("flax.nnx")  # not imported here: it takes long, and 50 MB
    kinds: Any = (nnx.Variable, nnx.BatchStat, nnx.RngState, nnx.Module) if nnx else ((),) * 4
    variable, statistic, stream, module = kinds
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, (variable, module))
    )
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, module):
            raise ValueError(
                f"params{name} is the module {type(leaf).__name__}: pass the parameters of params, "
                "apply = split_module(module), and a loss that calls apply(params, ...)"
            )
        if isinstance(leaf, statistic) or "['batch_stats']" in name:
            raise ValueError(
                f"the parameters hold the batch statistic {name}, which mixes examples without "
                "clipping or noise; use LayerNorm or GroupNorm in place of BatchNorm"
            )
        if isinstance(leaf, stream):
            raise ValueError(
                f"the parameters hold the random stream {name}; take parameters from "
                "split_module, and a loss_fn(params, example, key)"
            )
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            raise ValueError(
                f"params{name} is {type(leaf).__name__}, not an array; pass arrays and numbers"
            )
        if jax.config.values["jax_enable_x64"] and getattr(leaf, "dtype", None) == np.float64:
            raise ValueError(
                f"the parameters{name} are float64, but clipping and noise are proved for float32; "
                "make them float32, or leave jax_enable_x64 out"
            )


def _check_state(algorithm: Algorithm, mechanism: Mechanism, state: TrainState) -> None:
    """Raises ValueError unless `state` fits the algorithm and the noise."""
    if bool(state.tables) != (algorithm.tables is not None):
        raise ValueError(
            "the state was made by an algorithm "
            f"{'with' if state.tables else 'without'} lazy tables, and this one is "
            f"{'without' if state.tables else 'with'} them: make it by algorithm.init"
        )
    needed = jax.eval_shape(mechanism.noise.init, state.dense_params)
    if not mechanism.noise_multiplier:
        needed = ()
    if jax.tree.map(jnp.shape, state.noise) != jax.tree.map(jnp.shape, needed):
        raise ValueError(
            f"the state was not made for {mechanism.noise}: make it by algorithm.init(params, "
            "mechanism, rows)"
        )
