"""The training loop: blocks of steps as one compiled program, fed by background threads."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.algorithm import Algorithm, Schedules
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import owned
from dpsgd.engine.batch_files import BatchFiles
from dpsgd.engine.blocks import in_background
from dpsgd.engine.feed import BLOCK_STEPS, Layout, keys_of
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import arrays_digest, digest, text_digest
from dpsgd.engine.step import Watch, compiled_block, flushed
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, UnitData

PyTree = Any


class Block(NamedTuple):
    """The outcome of a block of steps, which may still be computing: reading it waits.

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
    """Returns whether a program of the same inputs gives the same bits again, as on CPUs.

    On a GPU, sums by atomic operations and kernels picked by timing may differ in the last bits; a
    step that a resumed run repeats would then release those bits without noise.
    """
    return jax.default_backend() == "cpu"


def train_blocks(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    data: PyTree | UnitData,
    *,
    root: RootKey,
    attempt: int = 0,
    block_steps: int = BLOCK_STEPS,
    data_on: Literal["device", "host"] | None = None,
    declare: Callable[[range], None] = lambda steps: None,
    donate: bool = False,
    watch: Watch | None = None,
    placement: Placement | None = None,
    layout: Layout | None = None,
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
      attempt: Which continuation of the run this is; another one means other randomness. The
        same root and attempt may repeat a run, or resume it, and serve no other: two runs
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
      watch: What blocks return to an audit; by default nothing.
      placement: Which devices compute; by default one. On others the same steps have other bits, as
        sums are added up in another order: a run that resumes on others is another attempt.
      layout: All of the last three, where it is known; see `Layout.of`.
      batches: Opens, by the sampling seed, files of the batches that are drawn otherwise: then no
        row of `data` is read.
      flush_every: F: a block ends when a multiple of F steps of the run are done, and all noise of
        lazy tables that is pending is drawn then, so that the guarantee covers `Block.state`: part
        of the path that repeats a run. After the run's last step it always does.
      run: Names the run that claims the root, see `RootKey.begin_run`, and whose data, parameters
        and program the caller compares. By default they are claimed here: for one attempt of a
        root, data, mechanism and program must be those of the first call, which is another program
        in other blocks; and so must the state, if a call began with its step.

    Raises:
      ValueError: if another run has claimed `root`, or it was used otherwise; the data have not
        exactly the sampler's number of examples, or not the units that it draws, the parameters
        hold batch statistics, the loss could see other examples than its own, or `flush_every` is
        below one.
    """
    if flush_every is not None and flush_every < 1:
        raise ValueError(f"flush_every must be at least 1, got {flush_every}")
    RootKey.require(root)
    data = columns_of(mechanism.sampler, data)
    check_parameters(state.raw_params)
    _check_state(algorithm, mechanism, state)
    # Before buffers are given away.
    claims = not run and not root.insecure and mechanism.noise_multiplier > 0
    uses = _uses(attempt, mechanism, data, state) if claims else {}
    noise_key, loss_key = keys_of(algorithm, root, attempt)
    scales = mechanism.scales()
    watch = watch or Watch.nothing(state.raw_params)
    num_steps = mechanism.sampler.num_steps
    schedules = Schedules(algorithm.groups, num_steps)
    if layout is None:
        how: Any = {"block_steps": block_steps, "data_on": data_on, "placement": placement}
        layout = Layout.of(mechanism.sampler, data, **how)
    now: Any = layout.put_state(state if donate else owned(state))
    feed = layout.feed(mechanism.sampler, data, root.sampling_seed(attempt), batches)
    inputs = feed.blocks(int(now.step), flush_every)
    under_way: deque[Diagnostics] = deque()
    program, begun = None, False  # one for all blocks, whatever is set in JAX meanwhile
    with closing(in_background(inputs)) as blocks:
        for steps, rows, plan in blocks:
            now = layout.defer_noise(now)
            known = schedules.block_arrays(steps, layout.block_steps)
            arguments = now, rows, plan, noise_key, scales, watch, loss_key, known
            # The first time, this may refuse the loss.
            program = program or compiled_block(algorithm, mechanism.sampler, arguments, layout)
            if not begun:  # what is refused before has not begun
                if uses:
                    uses[f"{attempt}:program"] = digest(program)
                root.begin_run(run or "train_blocks", uses)
                begun = True
            declare(steps)
            if len(under_way) == 2:
                jax.block_until_ready(under_way.popleft())
            now, log, watched = program(*arguments)
            under_way.append(log)
            ends = steps.stop == num_steps or (flush_every and steps.stop % flush_every == 0)
            if now.pending and ends:
                known = schedules.flush_arrays(steps.stop)
                now = flushed(algorithm, now, known, noise_key, scales, layout.placement)
            yield Block(now, steps, log, watched)


def _uses(attempt: int, mechanism: Mechanism, data: PyTree, state: TrainState) -> dict[str, str]:
    return {
        f"{attempt}:mechanism": text_digest(_described(mechanism)),
        f"{attempt}:data": arrays_digest(data),
        f"{attempt}:{int(state.step)}:parameters": arrays_digest(state),
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
        # By attributes: NumPy would read a sequence to its end, which it may not have.
        if not getattr(column, "shape", ()) or not hasattr(column, "dtype"):
            raise ValueError(
                f"{name} is {type(column).__name__} and no array with one row for each example; "
                "pass arrays, such as np.stack([example for example in data])"
            )
        if not jnp.issubdtype(column.dtype, np.number) and column.dtype != np.bool_:
            raise ValueError(f"{name} holds {column.dtype}, of which nothing can be computed")
        if column.shape[0] != sampler.num_examples:
            raise ValueError(
                f"{name} has {column.shape[0]} rows, but the sampler was built for "
                f"num_examples={sampler.num_examples}: its guarantee is for those"
            )
    return data


def check_parameters(params: PyTree) -> None:
    """Raises ValueError if `params` hold modules, batch statistics, random streams or float64."""
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
                f"the parameters hold the batch statistic {name}, which is no parameter: it mixes "
                "examples without clipping or noise; use LayerNorm or GroupNorm in place of "
                "BatchNorm"
            )
        if isinstance(leaf, stream):
            raise ValueError(
                f"the parameters hold the random stream {name}, which is no parameter: take them "
                "from split_module, and a loss_fn(params, example, key)"
            )
        if jax.config.values["jax_enable_x64"] and getattr(leaf, "dtype", None) == np.float64:
            raise ValueError(
                f"the parameters{name} are float64, and what clips and adds noise is proved for "
                "float32: make them float32, or leave jax_enable_x64 out"
            )


def _check_state(algorithm: Algorithm, mechanism: Mechanism, state: TrainState) -> None:
    """Raises ValueError unless `state` has what parameter groups and noise need."""
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
