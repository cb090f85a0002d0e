"""Noisy sums over all rows after training: `Refinement`, and the run of its full-batch queries.

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

from dpsgd.core.algorithm import Algorithm, nothing_frozen
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import dpsgd
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import columns_of, train_blocks
from dpsgd.engine.placement import Placement, hosted
from dpsgd.engine.programs import arrays_digest, compiled, digest, in_32_bits, put
from dpsgd.gradients.isolation import isolated
from dpsgd.noise.keys import RootKey
from samplers import UnitData

PyTree = Any

_READ_BYTES = 2**28
"""What the rows that are read together may take, by an estimate from shapes alone."""

_READ_ROWS = 65_536
"""Most of them."""


class Refinement(abc.ABC):
    """What is made of noisy sums over all rows, after training: a calibration, a mean.

    Subclasses are frozen dataclasses, equal where they are made of equal parts: what is compiled is
    shared by equal ones. They hold no private data, which would go around clipping and noise.
    """

    @property
    def kind(self) -> str:
        """The calibration of `RunSpec` that it is, by which a run chooses its sums."""
        return "platt"

    @abc.abstractmethod
    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns what the sums read of one row, given the released parameters; once for each."""

    @abc.abstractmethod
    def start(self) -> PyTree:
        """Returns the state before the first sum, float32 leaves: a constant."""

    @abc.abstractmethod
    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the vector of a row, float32[d], which is clipped as one to the L2 norm C.

        A vector with NaN or infinity counts as zero.

        Args:
          state: As the sums so far have left it.
          row: What `reads` returned of it.
        """

    @abc.abstractmethod
    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns the state after a release, of the types and shapes of the one before.

        It is kept to float32's rounding of how far it moved.

        Args:
          state: Before it.
          mean: (sum of clipped vectors + sigma C z) / n, z standard normal: float32[d].
        """

    @abc.abstractmethod
    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns what is released: the parameters, refined by the last state."""

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns what a report says of the last state: scalars by name; nothing by default."""
        del state
        return {}


class Refined(NamedTuple):
    """What noisy sums over all rows made."""

    params: PyTree
    """As `Refinement.apply` returned them."""
    summary: Mapping[str, Any]
    """As `Refinement.summary` returned it."""


class SumsRun(NamedTuple):
    """The run that releases the sums, as `train_blocks` and an audit take it."""

    algorithm: Algorithm
    mechanism: Mechanism
    state: TrainState
    rows: PyTree
    """What is read of them."""
    placement: Placement | None = None
    """Which devices compute."""

    @property
    def layout(self) -> Layout:
        """How its blocks are laid out."""
        n = self.mechanism.sampler.num_examples
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), self.rows)
        return Layout.of(self.mechanism.sampler, rows, placement=self.placement)

    def program(self) -> jax.stages.Compiled:
        """Returns the executable that releases them, or raises as `train_blocks` does."""
        return self.layout.program(self.algorithm, self.mechanism, self.state, self.rows)


def sums_run(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree,
    placement: Placement | None = None,
) -> SumsRun:
    """Returns the run whose steps are the releases of sums over all rows.

    Args:
      refinement: What is summed.
      mechanism: Of the sums, as `Mechanism.sums_mechanism` has it.
      params: Released parameters.
      data: Arrays of rows, of any number.
      placement: Which devices compute; by default one.

    Raises:
      ValueError: if what is read of a row, or its statistic, could see other rows, the statistic is
        no vector, or the refinement has no hash.
    """
    try:
        hash(refinement)
    except TypeError as error:
        raise ValueError(
            f"{type(refinement).__name__} must be a frozen dataclass of parts that have a hash, "
            f"such as functions and numbers: {error}"
        ) from None
    rows = read_rows(refinement, params, data)
    with in_32_bits():
        start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), refinement.start())
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        vector = jax.eval_shape(refinement.statistic, start, row)
        if not isinstance(vector, jax.ShapeDtypeStruct) or len(vector.shape) != 1:
            raise ValueError(f"a row's statistic must be a vector, float32[d], and it is {vector}")
        # "state" has no path to the loss, and is what the update folds.
        folds = optax.GradientTransformation(_nothing, _Fold(refinement))
        algorithm = dpsgd(_Product(refinement), folds)
        algorithm = algorithm._replace(frozen=nothing_frozen)
        both = {"state": start, "sum": jnp.zeros(vector.shape, jnp.float32)}
        return SumsRun(algorithm, mechanism, algorithm.init(both, mechanism), rows, placement)


def refine(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree | UnitData,
    *,
    root: RootKey,
    attempt: int = 0,
    declare: Callable[[range], None] = lambda steps: None,
    placement: Placement | None = None,
    run: str = "train_blocks",
) -> Refined:
    """Releases the sums over all rows of a run that has trained, and returns what they make.

    Args:
      refinement: What is summed, and what becomes of it.
      mechanism: Of the run, with `full_sums`.
      params: As training released them.
      data: The rows that were trained on.
      root: Of the run.
      attempt: Of the run.
      declare: Called with the steps of all sums, T, ..., T + k - 1, before any of their noise
        exists, T being the sampler's number of steps.
      placement: Which devices compute; by default one.
      run: Names the run that claims the root, as in `train_blocks`.

    Raises:
      ValueError: if the mechanism has no such sums, another run has claimed `root`, the data have
        not the mechanism's number of rows, or a row could see others.
    """
    first, last = mechanism.sampler.num_steps, mechanism.num_steps
    data, mechanism = columns_of(mechanism.sampler, data), mechanism.sums_mechanism()
    if placement is not None:
        params = hosted(params)
    sums = sums_run(refinement, mechanism, params, data, placement)
    algorithm, _, state, rows, _ = sums
    program = sums.program()  # refuses what cannot be released
    root.begin_run(run)  # here and in the root's files: the stream below knows of neither
    terms = digest(program), arrays_digest((mechanism.scales(), state.params, rows))
    blocks = train_blocks(
        algorithm,
        mechanism,
        state,
        rows,
        root=root.child(" ".join(("full sums", *terms))),
        attempt=attempt,
        declare=lambda steps: None if steps.start else declare(range(first, last)),
        donate=True,
        placement=placement,
        run=run,
    )
    with closing(blocks):
        for block in blocks:
            state = block.state
    arguments = (
        params,
        state.params["state"] if placement is None else hosted(state.params["state"]),
    )
    return compiled(_applied, (refinement,), arguments)(*arguments)


def read_rows(refinement: Refinement, params: PyTree, data: PyTree) -> PyTree:
    """Returns what the sums read of each row: arrays of the host, [n, ...] each leaf.

    Rows are read in parts of one size, as many together as memory allows.

    Raises:
      ValueError: if what is read of a row could depend on another.
    """
    columns = jax.tree.map(np.asarray, data)
    count = len(jax.tree.leaves(columns)[0])
    examples = put(jax.tree.map(lambda column: column[:1], columns))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
    with in_32_bits():
        trace, shapes = jax.make_jaxpr(refinement.reads, return_shape=True)(params, like)
    made = [v.aval for equation in trace.jaxpr.eqns for v in equation.outvars]
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in made if hasattr(x, "shape"))
    size = max(1, min(count, _READ_ROWS, _READ_BYTES // max(1, size)))
    read = jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), shapes)
    for start in range(0, count, size):
        start = min(start, count - size)  # the last part overlaps: all are of one program
        part = put(jax.tree.map(lambda column: column[start : start + size], columns))  # noqa: B023
        arguments = params, part
        found = compiled(_read, (refinement,), arguments)(*arguments)
        for whole, some in zip(*map(jax.tree.leaves, (read, found)), strict=True):
            whole[start : start + size] = some
    return read


def _read(refinement: Refinement, params: PyTree, part: PyTree) -> PyTree:
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), part)
    return jax.vmap(isolated(refinement.reads, params, example), (None, 0))(params, part)


def _applied(refinement: Refinement, params: PyTree, state: PyTree) -> Refined:
    return Refined(refinement.apply(params, state), refinement.summary(state))


@dataclass(frozen=True)
class _Product:
    """A loss whose gradient is the statistic of a row in "sum", and 0 in "state"."""

    refinement: Refinement

    def __call__(self, params, row):
        state = jax.lax.stop_gradient(params["state"])
        return jnp.dot(params["sum"], self.refinement.statistic(state, row).astype(jnp.float32))


@dataclass(frozen=True)
class _Fold:
    """The update: the state is folded, and "sum" stays 0. What noise "state" got is left."""

    refinement: Refinement

    def __call__(self, updates, opt_state, params):
        old = params["state"]
        new = self.refinement.fold(old, updates["sum"])
        moved = jax.tree.map(lambda x, y: jnp.asarray(x - y, jnp.float32), new, old)
        return {"state": moved, "sum": jnp.zeros_like(params["sum"])}, opt_state


def _nothing(params: PyTree) -> optax.EmptyState:
    return optax.EmptyState()
