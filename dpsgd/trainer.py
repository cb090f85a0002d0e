"""`train`: a private run without a directory, its parameters and guarantee."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import default_delta
from dpsgd.audit.synthetic import Generated, generated_rows
from dpsgd.core.cost import cost
from dpsgd.core.guarantee import FOREIGN_CALLS, Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.engine.algorithm import Algorithm, copy_buffers
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.loop import Block, check_parameters, columns_of
from dpsgd.engine.placement import Placement, check_placement
from dpsgd.engine.queries import Refinement
from dpsgd.engine.sources import RowSource, SourceColumn
from dpsgd.noise.keys import Keys
from dpsgd.runs.job import Journal, Training
from dpsgd.runs.log import MetricWriter, TrainingLog, writer_of
from samplers import Population, UnitData

PyTree = Any

_READ_BYTES = 2**24
"""Size of the parts in which rows are read before training, bytes."""


class Trained(NamedTuple):
    """Result of a run: parameters, and the guarantee of the steps that ran."""

    params: PyTree
    guarantee: Guarantee


def train(
    algorithm: Algorithm,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree | UnitData | RowSource,
    *,
    delta: float | None = None,
    insecure_seed: int | None = None,
    audit: bool = True,
    generated: Generated | None = None,
    refinement: Refinement | None = None,
    block_steps: int = BLOCK_STEPS,
    data_on: Literal["device", "host"] | None = None,
    placement: Placement | None = None,
    on_block: Callable[[int, PyTree], bool | None] | None = None,
    log: MetricWriter | str | Path | None = None,
) -> Trained:
    """Trains privately from `params` and returns parameters with their guarantee.

    The run takes every step of the sampler unless `on_block` stops it. The guarantee is proved
    before the run begins: a mechanism without one is refused, unless it has no noise or an insecure
    seed, which the guarantee then says. The program and the sampler's draws are
    audited next, and the run is refused unless they do what the proof assumes.

    **The audit tests** the compiled program itself, with the run's own shapes and optimizer, under
    other keys and on synthetic probe rows: clipping, noise, divisor, padding, the update, and whole
    epochs of draws. Refused are a loss, clipping rule or optimizer that holds an array of the shape
    of rows, and an optimizer, or a sum, update or noise of your own, that calls the host. **Not
    found** are held data of another shape, and data that Python code reads for the trace from an
    attribute of another object, a container of a method's object, another module or a file. These
    data bypass clipping and noise, and no epsilon covers them: the loss must be a function of
    parameters and one example, and the optimizer of the private gradient.

    >>> import optax
    >>> from samplers import Poisson
    >>> from dpsgd import dpsgd
    >>> rows = np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float32)
    >>> algorithm = dpsgd(lambda w, x: ((w - x) ** 2).sum(), optax.sgd(0.1))
    >>> mechanism = Mechanism(Poisson(1000, batch_size=50), 2.0, l2_clip_norm=1.0)
    >>> trained = train(algorithm, mechanism, jnp.zeros(2), rows, audit=False)
    >>> trained.params.shape, trained.guarantee.epsilon.upper < 2
    ((2,), True)

    Args:
      algorithm: Training algorithm, from `dpsgd`.
      mechanism: Sampler, sigma and C.
      params: Initial parameters; they must not depend on the private data. Or an `nnx.Module`,
        for a loss (module, example): the trained parameters are put into it after the last step,
        and the result has the module in place of parameters.
      data: Pytree of arrays with one leading row per example; or `UnitData`, whose population
        defines the protected unit. NaN or infinity gives a warning, which looks at private rows
        without a guarantee; it tells neither their number nor their places. Or a `RowSource`, of
        which a background thread reads the rows of the next block.
      delta: Probability delta of the guarantee, in (0, 0.1); by default `accounting.default_delta`.
      insecure_seed: Seed in [0, 2**64) of reproducible sampling and noise, for debugging. It gives
        a warning, and no guarantee. None: fresh secrets from the operating system.
      audit: False to skip the audit, which takes seconds; the guarantee then says so. Runs without
        noise are not audited.
      generated: Synthetic probe rows for the audit: a pytree like `data` of a few rows, or a
        function of their number. By default they have the shapes and types of the data: floats are
        standard normal, or their absolute values, and integers 0 or 1. Pass rows if the guarantee
        says that the default ones have no gradient.
      refinement: Refinement by the mechanism's sums over all rows (`Mechanism.full_sums`) after the
        last step, such as `Platt`; the guarantee covers both. A stopped run releases no sums.
      block_steps: Number of steps per dispatch.
      data_on: Location of the data, see `train_blocks`.
      placement: Devices that compute, such as `Placement.default()`, all; by default one.
      on_block: Function of the number of steps done and a copy of the parameters, or of the module
        if `params` is one, called after each block of at most `block_steps` steps (fewer if rows
        stream from the host, or batches take several passes). The run stops if it returns True.
        The guarantee covers these parameters and functions of them and of public rows, not of
        private rows. A stopped run has the cost of the whole run, see `cost`, which also states the
        cost so far. An exception is passed on, with a note of the run's cost.
      log: Log of steps, epsilon so far and throughput, at most twice a minute and after the last
        step: path of a new CSV file; "tensorboard", or a path that ends so, for a folder of events;
        "wandb", or NAME/wandb for a run of that name; or a `dpsgd.MetricWriter`. It reads no rows.

    Raises:
      TypeError: If the algorithm or the mechanism has another type, or `log` is neither a path nor
        a writer.
      OSError: If the file `log` exists, or its folder does not.
      ValueError: If the data do not have the sampler's units, the cost is not proved, the audit
        fails, the loss could see other examples, only one of refinement and full sums is given, and
        as from `train_blocks`.
    """
    for value, kind in ((algorithm, Algorithm), (mechanism, Mechanism)):
        if not isinstance(value, kind):
            raise TypeError(
                "train takes an Algorithm, from dpsgd(loss_fn, optimizer), and then a Mechanism, "
                f"got a {type(value).__name__} in place of the {kind.__name__}"
            )
    if (refinement is None) != (mechanism.full_sums is None):
        raise ValueError(
            "refinement needs mechanism.full_sums, got None; pass Mechanism(..., full_sums=...)"
            if refinement
            else "mechanism.full_sums needs refinement=, got None; pass both or neither"
        )
    check_placement(placement)
    keys = Keys.of(insecure_seed, (placement or Placement.one()).processes)
    writer = writer_of(log)
    algorithm, params, view, store = _bind(algorithm, params)
    columns, sampler = columns_of(mechanism.sampler, data), mechanism.sampler
    check_parameters(params)
    private = mechanism.noise_multiplier > 0
    rows = data.population if isinstance(data, UnitData) else Population(sampler.num_examples)
    guaranteed = private and insecure_seed is None
    block = math.prod(sampler.clipped_shape)
    job = Training(
        data=columns,
        params=params,
        algorithm=algorithm,
        plan=Segment(
            mechanism,
            unit=sampler.protected_unit(rows) if guaranteed else sampler.unit,
            reproducible_noise=insecure_seed is not None,
            lazy_tables=algorithm.tables is not None,
            not_covered=(FOREIGN_CALLS,) * algorithm.foreign_calls,
        ),
        delta=default_delta(sampler.num_units) if delta is None else delta,
        refinement=refinement,
        placement=placement,
        query_placement=placement,
        synthetic=lambda count: generated_rows(columns, count, generated, block=block),
        audited=audit,
        data_on=data_on,
        block_steps=block_steps,
    )
    guarantee = job.guarantee
    job.programs()
    note = f"audit before training: {job.audit()}"
    guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, note))
    epsilon = None if guarantee.epsilon is None else guarantee.epsilon.upper
    log_of_run = None if writer is None else TrainingLog([writer])
    journal = _Callback(job, on_block, view, log_of_run, epsilon)
    if insecure_seed is not None and private:
        warnings.warn(guarantee.sentence(), stacklevel=2)
    if paths := not_finite(columns):
        warnings.warn(
            f"{', '.join(f'data{path}' for path in paths)}: NaN or infinity; an example "
            "whose gradient is not finite counts as zero (this warning looked at private rows, "
            "which no guarantee covers)",
            stacklevel=2,
        )
    num_steps = mechanism.num_steps
    try:
        last_state = job.train(job.start(), keys, journal)
    except BaseException as error:
        stopped = guarantee.stopped(journal.done, num_steps)
        error.add_note(f"training ended early: {stopped.sentence()}")
        raise
    steps_done = int(last_state.step)
    result = Trained(
        store(last_state.params),
        guarantee if steps_done == num_steps else guarantee.stopped(steps_done, num_steps),
    )
    journal.end()
    return result


@dataclass
class _Callback(Journal):
    """Journal that calls `on_block` after each block, and writes a log."""

    job: Training
    on_block: Callable[[int, PyTree], bool | None] | None
    view: Callable[[PyTree], Any]
    log: TrainingLog | None
    epsilon: float | None
    """Epsilon of the whole run."""
    done: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.flush_every = None if self.on_block is None else self.job.layout.block_steps

    def keep(self, block: Block) -> bool:
        self.done = block.steps.stop
        self._write()
        if self.on_block is None:
            return False
        return bool(self.on_block(self.done, self.view(copy_buffers(block.state.params))))

    def end(self) -> None:
        """Writes the last row of the log; an interrupt skips it, as the model is trained."""
        try:
            self._write(last=True)
        except KeyboardInterrupt:
            warnings.warn(f"log lacks step {self.done}: interrupted", stacklevel=3)

    def _write(self, last: bool = False) -> None:
        """Writes a row if one is due, or the last one; warns of errors."""
        if self.log is None:
            return
        examples = self.done * self.job.mechanism.sampler.expected_batch_size
        rate = examples / max(1e-9, time.perf_counter() - self.started)
        try:
            if last:
                self.log.write(self.done, self._epsilon_so_far(), rate)
            else:
                self.log.offer(self.done, self._epsilon_so_far, rate)
        except Exception as error:  # of a writer or of accounting: no result depends on the log
            warnings.warn(f"log stops at step {self.done}: {error}", stacklevel=4)
            self.log = None

    def _epsilon_so_far(self) -> float | None:
        job = self.job
        if self.epsilon is None or self.done == job.mechanism.num_steps:
            return self.epsilon
        steps = cost([dataclasses.replace(job.plan, steps=range(self.done))], job.delta)
        return None if steps.epsilon is None else steps.epsilon.upper


def _bind(algorithm: Algorithm, params: PyTree) -> tuple[Algorithm, PyTree, Any, Any]:
    """Returns algorithm, parameters, and how users see and get them, see `Binding`."""
    nnx = sys.modules.get("flax.nnx")  # not imported here, see `check_parameters`
    if nnx is None or not isinstance(params, nnx.Module):
        return algorithm, params, _unchanged, _unchanged
    from dpsgd.engine.modules import bind_module

    return bind_module(algorithm, params)


def _unchanged(params: PyTree) -> PyTree:
    return params


def not_finite(tree: PyTree) -> list[str]:
    """Returns the paths of arrays with NaN or infinity.

    Arrays of the host are read in parts; sources are not read.

    >>> not_finite({"x": np.array([1.0, np.nan]), "y": np.array([0, 1])})
    ["['x']"]
    """
    paths = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, SourceColumn) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if isinstance(leaf, jax.Array):
            finite = bool(jnp.isfinite(leaf).all())
        else:
            rows = max(1, _READ_BYTES * len(leaf) // max(1, leaf.nbytes))
            chunks = (leaf[i : i + rows] for i in range(0, len(leaf), rows))
            finite = all(bool(np.isfinite(chunk).all()) for chunk in chunks)
        if not finite:
            paths.append(jax.tree_util.keystr(path))
    return paths
