"""Noisy sums over all rows after training: `Refinement`, and the run that releases them.

Claim, proof and the key of the noise: docs/explanation/full-batch-queries.md.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm, dpsgd
from dpsgd.engine.closures import held_arrays, reachable_arrays, refuse_rows
from dpsgd.engine.copies import hosted, on_one_device
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import columns_of, train_blocks
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import compiled, in_32_bits, put_on_device, shapes_of_rows
from dpsgd.engine.sources import take_rows
from dpsgd.gradients.isolation import isolated
from dpsgd.noise.keys import Keys
from samplers import UnitData

PyTree = Any

_READ_BYTES = 2**28
"""Memory of the rows that are read together, bytes estimated from shapes."""

_READ_ROWS = 65_536
"""Most rows that are read together."""


class Refinement(abc.ABC):
    """Refinement of a trained model by noisy sums over all rows: a calibration, a mean.

    Subclasses are frozen dataclasses; the calls with one object share compiled programs. They hold
    no private data, which would bypass clipping and noise.
    """

    @property
    def kind(self) -> str:
        """Kind of calibration in `RunSpec`; it chooses the run's sums."""
        return "platt"

    @abc.abstractmethod
    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns the inputs of the sums from one row.

        Args:
          params: Released parameters.
          example: One row of the data.
        """

    @abc.abstractmethod
    def start(self) -> PyTree:
        """Returns the state before the first sum, constant float32 leaves."""

    @abc.abstractmethod
    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns a row's vector, float32[d].

        It is clipped to L2 norm C. A vector with NaN or infinity counts as zero.

        Args:
          state: State after the previous sums.
          row: Inputs that `reads` returned for the row.
        """

    @abc.abstractmethod
    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns the state after a release, of equal shapes.

        The state moves by a float32 difference.

        Args:
          state: State before the release.
          mean: (sum of clipped vectors + sigma C z) / n, z standard normal: float32[d].
        """

    @abc.abstractmethod
    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the refined parameters, which are released.

        Args:
          params: Parameters that training released.
          state: State after the last sum.
        """

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns the last state's scalars for a report."""
        del state
        return {}


class Refined(NamedTuple):
    """Result of noisy sums over all rows."""

    params: PyTree
    """Parameters from `Refinement.apply`."""
    summary: Mapping[str, Any]
    """Scalars from `Refinement.summary`."""


class SumsRun(NamedTuple):
    """Run that releases the sums, for `train_blocks` and an audit."""

    algorithm: Algorithm
    mechanism: Mechanism
    state: TrainState
    rows: PyTree
    """Inputs of the sums, from `Refinement.reads`."""
    placement: Placement | None = None
    """Devices that compute; None for one."""

    @property
    def layout(self) -> Layout:
        """Layout of the run's blocks."""
        n = self.mechanism.sampler.num_examples
        rows = shapes_of_rows(self.rows, n)
        return Layout.choose(self.mechanism.sampler, rows, placement=self.placement)

    def program(self) -> jax.stages.Compiled:
        """Returns the executable; raises as `train_blocks` does."""
        return self.layout.program(self.algorithm, self.mechanism, self.state, self.rows)


def sums_run(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree,
    placement: Placement | None = None,
) -> SumsRun:
    """Returns the run that releases the sums over all rows.

    Args:
      refinement: Refinement that defines the sums.
      mechanism: Mechanism of the sums, from `Mechanism.sums_mechanism`.
      params: Released parameters.
      data: Arrays of rows, of any number.
      placement: Devices that compute; by default one.

    Raises:
      ValueError: If a row's inputs or statistic could depend on other rows, the statistic is not a
        vector, the refinement has no hash, or it holds an array that may be rows.
    """
    try:  # arrays have none
        hash(refinement)
    except TypeError as error:
        raise ValueError(
            f"{type(refinement).__name__} must be a frozen dataclass of parts that have a hash, "
            f"such as functions and numbers: {error}"
        ) from None
    with in_32_bits():
        start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), refinement.start())
    _require_closed(refinement, mechanism, params, start, data)
    rows = read_rows(refinement, params, data)
    with in_32_bits():
        vector = jax.eval_shape(refinement.statistic, start, shapes_of_rows(rows))
        if not isinstance(vector, jax.ShapeDtypeStruct) or len(vector.shape) != 1:
            raise ValueError(f"a row's statistic must be a vector, float32[d], got {vector}")
        # "state" has no path to the loss; the update folds into it.
        folds = optax.GradientTransformation(_nothing, _Fold(refinement))
        algorithm = dpsgd(_Product(refinement), folds)
        algorithm = algorithm._replace(freezes=False)
        leaves = {"state": start, "sum": jnp.zeros(vector.shape, jnp.float32)}
        return SumsRun(algorithm, mechanism, algorithm.init(leaves, mechanism), rows, placement)


def _require_closed(
    refinement: Refinement, mechanism: Mechanism, params: PyTree, start: PyTree, data: PyTree
) -> None:
    """Refuses a refinement that holds rows.

    Rows are read, and sums are used, outside the program that adds them up, whose closures
    `train_blocks` scans. Traced by new functions: JAX keeps traces by the equality of functions.
    """
    with in_32_bits():
        traces = (
            jax.make_jaxpr(lambda *of: refinement.reads(*of))(params, shapes_of_rows(data)),
            jax.make_jaxpr(lambda *of: refinement.apply(*of))(params, start),
            jax.make_jaxpr(lambda state: refinement.summary(state))(start),
        )
    own = getattr(refinement, "__dict__", {})
    parts = (own, refinement.reads, refinement.statistic, refinement.fold, refinement.apply)
    arrays = [held_arrays(trace) for trace in traces]
    arrays.append(reachable_arrays((*parts, refinement.summary)))
    refuse_rows([("the refinement", held) for held in arrays], mechanism.sampler)


def refine(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree | UnitData,
    *,
    insecure_seed: int | None = None,
    declare: Callable[[range], None] = lambda steps: None,
    placement: Placement | None = None,
    keys: Keys | None = None,
) -> Refined:
    """Releases the sums over all rows, and refines a model.

    Args:
      refinement: Refinement that defines the sums and their use.
      mechanism: Mechanism of the run, with `full_sums`.
      params: Parameters that training released.
      data: Training rows.
      insecure_seed: Seed of reproducible noise, see `train_blocks`.
      declare: Function of the steps of all sums, T, ..., T + k - 1 for T steps of the sampler,
        called before any of their noise exists.
      placement: Devices that compute; by default one.
      keys: Keys of the run, in place of `insecure_seed`; the sums' own are derived from them.

    Raises:
      ValueError: If the mechanism has no full sums, the data do not have the mechanism's number of
        rows, or a row could see others.
    """
    first, last = mechanism.sampler.num_steps, mechanism.num_steps
    data, mechanism = columns_of(mechanism.sampler, data), mechanism.sums_mechanism()
    params = on_one_device(params)
    sums = sums_run(refinement, mechanism, params, data, placement)
    algorithm, _, state, rows, _ = sums
    blocks = train_blocks(
        algorithm,
        mechanism,
        state,
        rows,
        keys=(keys or Keys.of(insecure_seed, sums.layout.placement.processes)).of_sums,
        declare=lambda steps: None if steps.start else declare(range(first, last)),
        donate=True,
        placement=placement,
    )
    with closing(blocks):
        for block in blocks:
            state = block.state
    arguments = params, hosted(state.params["state"])
    return compiled(_applied, (refinement,), arguments)(*arguments)


def read_rows(refinement: Refinement, params: PyTree, data: PyTree) -> PyTree:
    """Returns the sums' inputs by row, NumPy arrays [n, ...].

    Raises:
      ValueError: If a row's inputs could depend on another row.
    """
    columns = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, data)
    count = len(jax.tree.leaves(columns)[0])
    with in_32_bits():
        read_one = jax.make_jaxpr(refinement.reads, return_shape=True)
        trace, shapes = read_one(params, shapes_of_rows(columns))
    intermediates = [v.aval for equation in trace.jaxpr.eqns for v in equation.outvars]
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in intermediates if hasattr(x, "shape"))
    size = max(1, min(count, _READ_ROWS, _READ_BYTES // max(1, size)))
    read = jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), shapes)
    for start in range(0, count, size):
        start = min(start, count - size)  # the last part overlaps: all are of one program
        rows = put_on_device(take_rows(columns, slice(start, start + size)))
        arguments = params, rows
        values = compiled(_read, (refinement,), arguments)(*arguments)
        for all_values, new_values in zip(*map(jax.tree.leaves, (read, values)), strict=True):
            all_values[start : start + size] = new_values
    return read


def _read(refinement: Refinement, params: PyTree, part: PyTree) -> PyTree:
    reads = isolated(refinement.reads, params, shapes_of_rows(part))
    return reads.map_rows(params, part)


def _applied(refinement: Refinement, params: PyTree, state: PyTree) -> Refined:
    return Refined(refinement.apply(params, state), refinement.summary(state))


@dataclass(frozen=True)
class _Product:
    """Loss whose gradient is a row's statistic in "sum", and 0 in "state"."""

    refinement: Refinement

    def __call__(self, params, row):
        state = jax.lax.stop_gradient(params["state"])
        return jnp.dot(params["sum"], self.refinement.statistic(state, row).astype(jnp.float32))


@dataclass(frozen=True)
class _Fold:
    """Update that folds the state; "sum" stays 0, and noise in "state" is ignored."""

    refinement: Refinement

    def __call__(self, updates, opt_state, params):
        old = params["state"]
        new = self.refinement.fold(old, updates["sum"])
        moved = jax.tree.map(lambda x, y: jnp.asarray(x - y, jnp.float32), new, old)
        return {"state": moved, "sum": jnp.zeros_like(params["sum"])}, opt_state


def _nothing(params: PyTree) -> optax.EmptyState:
    return optax.EmptyState()


def refinement_of(
    offered: Refinement | None, mechanism: Mechanism, kind: str | None
) -> Refinement | None:
    """Returns the calibration by the sums at a run's end.

    Args:
      offered: Calibration that the task offers.
      mechanism: Mechanism of the run; None is returned if it has no sums.
      kind: `RunSpec.calibration`.

    Raises:
      ValueError: if the task offers no calibration, or not the one of `kind`.
    """
    if mechanism.full_sums is None:
        return None
    name = "none" if offered is None else offered.kind
    if name != kind:
        raise ValueError(
            f"calibration={kind} is not possible: calibration() of the task offers {name}; "
            f"use calibration={name}"
        )
    return offered
