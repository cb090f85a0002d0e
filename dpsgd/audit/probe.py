"""Runs the training executable on synthetic rows, for an audit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit.synthetic import probe_columns, varied_rows
from dpsgd.audit.tables import TableSnapshot, put_rows
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Diagnostics, Table, TrainState, join_leaves
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.copies import host_copy, placement_mismatch
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.step import BlockInputs, Watch, flush_noise
from dpsgd.gradients.frozen import leaf_names
from dpsgd.gradients.losses import example_keys
from dpsgd.gradients.rows import declared_rows, index_ranges, lookups_read_keys
from dpsgd.noise.keys import Keys, RootKey
from samplers import BatchSource
from samplers.batches import IndexBlock, zeros

PyTree = Any


class Probe:
    """Executable of a run, with synthetic rows and keys of the audit.

    The data have the run's number of rows, and none is private (`synthetic.probe_columns`). Two
    releases of one step and attempt have the same noise. A release of a table with deferred noise
    contains only the rows that some example of the audit looks up (`TableSnapshot`): the rows that
    the step looks up have its noise, and the others are 0.

    Attributes:
      algorithm, mechanism, layout: Algorithm, mechanism and layout of the run.
      state: State with which the run begins or resumes, on the host, without the state of its
        noise.
      snapshot: Snapshot of the tables with deferred noise; None without such tables.
      frozen: Indices of the parameter leaves that stay constant; a release has none of their
        coordinates.
      columns: Synthetic data, where the layout holds data.
      examples: Rows of each example on the host, each leaf [examples, block, ...].
      root: Root key of the audit.
      block: Number of rows that are clipped as one.
      units, nan, huge, marked, starts: Properties of the synthetic rows, see `ProbeColumns`.
      places: Number of examples in the padded batch of a pass; of two where a step takes several.
      program: Compiled executable.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        state: TrainState,
        rows: PyTree,
        *,
        layout: Layout | None = None,
        root: RootKey | None = None,
    ):
        """Compiles the program of a run, unless it is compiled already.

        Args:
          algorithm: Algorithm of the run.
          mechanism: Mechanism of the run.
          state: State with which the run begins or resumes; it is not overwritten. Its tables must
            not have pending noise, because the results of an audit are public.
          rows: Generated examples, each leaf [rows, ...]. With lazy tables, every other example
            looks up other rows of the tables (`varied_rows`).
          layout: Layout of the run's blocks; by default the one that `train_blocks` chooses.
          root: Root key of the audit, by default fresh entropy. Never the run's root: an audit
            makes two releases with equal noise, and their difference has no noise.

        Raises:
          ValueError: If the mechanism has no noise, or there are no rows.
        """
        if mechanism.noise_multiplier == 0:
            raise ValueError("noise_multiplier is 0: a run without noise has no guarantee to audit")
        sampler = mechanism.sampler
        self.algorithm, self.mechanism = algorithm, mechanism
        self.root = root or RootKey.from_entropy()
        self.state = host_copy(state)
        self.block = math.prod(sampler.clipped_shape)
        if algorithm.tables is not None:
            example = shapes_of_rows(rows, *sampler.clipped_shape)
            ranges = index_ranges(algorithm.loss_fn, state.params, example)
            rows = varied_rows(rows, ranges, block=self.block)
        synthetic = probe_columns(rows, sampler.num_examples, self.block)
        self.units, self.nan, self.huge = synthetic.units, synthetic.nan, synthetic.huge
        self.marked, self.starts = synthetic.marked, synthetic.starts
        rows_of_examples = self.starts[:, None] + np.arange(self.block)
        self.examples = jax.tree.map(lambda x: x[rows_of_examples], synthetic.columns)
        self.layout = layout or Layout.choose(sampler, synthetic.columns)
        self.columns = self.layout.hold(synthetic.columns)
        self._passes = min(2, self.layout.passes) if sampler.accumulates else 1
        self.places = self._passes * sampler.padded_batch_size // self.block
        self.frozen = frozenset(state.frozen)
        noise = jax.eval_shape(mechanism.noise.init, self.state.dense_params)
        like = self.state._replace(noise=noise)
        self.program = self.layout.program(algorithm, mechanism, like, synthetic.columns)
        self._laws = algorithm.gap_laws(sampler.num_steps)
        self._known: dict[range, Any] = {}
        self.snapshot: TableSnapshot | None = None
        if self.state.tables:
            self.table_optimizer = algorithm.tables.of_run(sampler.num_steps)
            keyed = lookups_read_keys(algorithm.loss_fn, state.params, example)
            self.snapshot = TableSnapshot(self.state, self._rows_of_examples(keyed))

    def _rows_of_examples(self, keyed: bool) -> dict[int, np.ndarray]:
        """Returns the row indices that synthetic examples look up, by table.

        They are int32 and ascending.

        Args:
          keyed: True if look-ups depend on keys, so that an example may look up any row.
        """
        tables = self.state.lazy_tables
        if keyed:
            return {k: np.arange(len(x.values), dtype=np.int32) for k, x in tables.items()}
        rows = {k: np.zeros(0, np.int32) for k in tables}
        for start in range(0, len(self.starts), self.places):
            examples = np.arange(start, min(start + self.places, len(self.starts)))
            read = self.looked_up(self._plan(examples), self.first_step)
            rows = {k: np.union1d(indices, read[k]) for k, indices in rows.items()}
        return rows

    def looked_up(self, plan: IndexBlock, step: int, attempt: int = 0) -> dict[int, np.ndarray]:
        """Returns the looked-up row indices of each lazy table.

        Args:
          plan: Plan of one step.
          step: Number of the step, which determines the keys of a loss that takes one.
          attempt: Number of the attempt, which determines these keys, too.

        Returns:
          Row indices of each lazy table: int32, ascending.
        """
        shape = -1, *self.mechanism.sampler.clipped_shape
        indices, places = (
            np.asarray(plan.indices if x is None else x)[0].reshape(shape)
            for x in (plan.indices, plan.places)
        )
        real = plan.weights[0].reshape(len(indices), -1).max(axis=1) > 0
        batch: tuple[Any, ...] = (jax.tree.map(lambda x: _rows_at(x, places), self.columns),)
        if self.algorithm.takes_key:
            first = jnp.asarray(indices.reshape(len(indices), -1)[:, 0])
            key = jnp.asarray(self.root.loss_key(attempt))
            batch += (example_keys(key, step, first, plan.shards),)
        lookups = self._looked_up_at(batch)
        names = leaf_names(self.state.raw_params)
        return {k: np.unique(np.asarray(lookups[names[k]])[real]) for k in self.state.tables}

    @functools.cached_property
    def _looked_up_at(self) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
        declared = declared_rows(self.algorithm.loss_fn)
        assert declared is not None, "or it had no lazy tables"
        shapes = jax.eval_shape(lambda: self.state.raw_params)
        return jax.jit(jax.vmap(lambda batch: declared.places(shapes, *batch)))

    def drawn_plan(self, step: int, attempt: int) -> IndexBlock:
        """Draws a one-step block's plan with the run's sampler."""
        source = BatchSource(self.mechanism.sampler, self.root.sampling_seed(attempt))
        room = {"steps": self.layout.block_steps, "passes": self.layout.passes}
        return source.fill(step, step + 1, **room)

    @functools.cached_property
    def poison(self) -> int | None:
        """Index of an example with a NaN gradient, or None.

        The gradient counts as 0. The index is None if the loss ignores a row's floats, or takes
        NaN for a missing value.
        """
        if self.nan is None:
            return None
        members = np.full(self.places, self.nan)
        next_state, log = self.called(self.begun(), members, return_gradient=True)
        self._taken_back(next_state, self.first_step)
        return self.nan if int(np.asarray(log.nonfinite_count)[0]) == self.places else None

    @property
    def first_step(self) -> int:
        """Step with which the run begins or resumes."""
        return int(self.state.step)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the parameter leaves."""
        paths = jax.tree_util.tree_leaves_with_path(self.state.raw_params)
        return [f"leaf {jax.tree_util.keystr(path)}" for path, _ in paths]

    @property
    def dtypes(self) -> list[np.dtype]:
        """Dtypes of the parameter leaves."""
        return [leaf.dtype for leaf in jax.tree.leaves(self.state.raw_params)]

    @property
    def tables(self) -> tuple[int, ...]:
        """Indices of the leaves that are tables with deferred noise."""
        return () if self.snapshot is None else tuple(self.snapshot.rows)

    def table_places(self, leaf: int, places: np.ndarray) -> np.ndarray:
        """Converts flat indices in a release to flat table indices."""
        assert self.snapshot is not None
        width = math.prod(self.shapes[leaf][1:])
        return self.snapshot.rows[leaf][places // width].astype(np.int64) * width + places % width

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the leaves of a release."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(self.state.raw_params)]
        for k, rows in self.snapshot.rows.items() if self.snapshot else ():
            shapes[k] = (rows.size, *shapes[k][1:])
        return [(0,) if k in self.frozen else shape for k, shape in enumerate(shapes)]

    @property
    def sizes(self) -> list[int]:
        """Numbers of coordinates of the leaves of a release."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def full_batch(self) -> np.ndarray:
        """Example indices of a full batch, in turn: int[places]."""
        return np.arange(self.places) % self.units

    def release(
        self,
        members: Sequence[int] | np.ndarray = (),
        mechanism: Mechanism | None = None,
        *,
        at: Sequence[int] | np.ndarray | None = None,
        padding: int | np.ndarray = 0,
        step: int | None = None,
        attempt: int = 0,
        rows: dict[int, Table] | None = None,
    ) -> list[np.ndarray]:
        """Returns the private mean gradient of a one-step block.

        Args:
          members: Indices of the examples in the batch, possibly repeated.
          mechanism: Mechanism with another sigma or C, or both, and the run's sampler and noise; by
            default the run's.
          at: Places of the examples in the batch; by default shuffled ones.
          padding: Index of the example with weight 0 in all other places, or one index for each
            place.
          step: Number of the step, which determines the noise; by default the run's first.
          attempt: Number of the attempt, whose key determines the noise, too.
          rows: Rows of the tables in `snapshot` before the step; by default those in `state`.

        Returns:
          The noised sum over the expected batch size, float32[size] for each leaf.
        """
        state, plan = self.begun(step), self._plan(members, at, padding)
        if rows is not None and self.snapshot is not None:
            state = state.with_tables(put_rows(state.lazy_tables, self.snapshot.rows, rows))
        number = int(state.step)
        next_state, _ = self.called(state, plan, mechanism, attempt, return_gradient=True)
        released = next_state.raw_params
        if self.snapshot is not None:
            read_rows = {}
            for k, table in self._taken_back(next_state, number).items():
                read = np.equal(table.steps, number + 1).reshape(-1, *[1] * (table.values.ndim - 1))
                read_rows[k] = np.where(read, table.values, np.float32(0))
            released = join_leaves(next_state.params_without_tables, read_rows)
        leaves = [
            np.ravel(np.zeros(0) if k in self.frozen else np.asarray(leaf))
            for k, leaf in enumerate(jax.tree.leaves(released))
        ]
        return [leaf.astype(np.float32, copy=False) for leaf in leaves]

    def _taken_back(self, after: TrainState, step: int) -> dict[int, Table]:
        """Returns the looked-up rows after a step, and restores them."""
        return {} if self.snapshot is None else self.snapshot.take_back(after.lazy_tables, step)

    def placement_mismatch(self) -> str | None:
        """Returns the path of a leaf that differs between devices.

        The leaves are the state after a full batch; the path is None if all agree.
        """
        next_state, _ = self.called(self.begun(), self.full_batch, return_gradient=False)
        path = placement_mismatch(next_state)
        self._taken_back(next_state, self.first_step)
        return path

    def flush(self, state: TrainState, mechanism: Mechanism, attempt: int) -> TrainState:
        """Adds all deferred noise to a state, which is donated."""
        state = self.layout.put_state(state)
        laws = self._laws.flush_arrays(int(state.step))
        arguments = state, laws, jnp.asarray(self.root.noise_key(attempt)), mechanism.scales()
        return flush_noise(self.algorithm, arguments, self.layout.placement)

    def blocks(
        self,
        state: TrainState,
        mechanism: Mechanism,
        *,
        attempt: int,
        places: Sequence[np.ndarray],
        return_gradient: bool = False,
        flush_every: int | None = None,
        declare: Callable[[range], None] = lambda steps: None,
    ) -> Generator[Block]:
        """Yields the blocks that `train_blocks` runs from a state.

        Args:
          state: State before the first step; its buffers are donated.
          mechanism: Mechanism of the run, or with another sigma or C.
          attempt: Number of the attempt, which determines batches and noise.
          places: Flat indices recorded after every step, of the sizes that `Watch.nothing` has.
          return_gradient: True to record the private mean gradient in place of the parameters.
          flush_every: Period of flushes in steps, see `train_blocks`.
          declare: Function of the steps of each block, called before the block runs.
        """
        recorded = tuple(np.asarray(indices, np.int32) for indices in places)
        return train_blocks(
            self.algorithm,
            mechanism,
            self.layout.put_state(state),
            self.columns,
            keys=Keys(self.root, attempt),
            layout=self.layout,
            donate=True,
            flush_every=flush_every,
            declare=declare,
            watch=Watch(np.bool_(return_gradient), recorded),
        )

    def begun(self, step: int | None = None) -> Any:
        """Returns a copy of `state` at a step, by default the run's first.

        Its buffers may be donated, and all rows of its tables are up to date.
        """
        dense_state = self.state._replace(raw_params=self.state.params_without_tables, tables={})
        state = jax.tree.map(jnp.array, dense_state)
        noise = jax.tree.map(jnp.array, self.mechanism.noise.init(self.state.dense_params))
        number = self.first_step if step is None else step
        state = state._replace(step=jnp.int32(number), noise=noise)
        if self.snapshot is not None:
            state = state.with_tables(self.snapshot.borrow(number))
        return state

    def called(
        self,
        state: Any,
        members: IndexBlock | Sequence[int] | np.ndarray,
        mechanism: Mechanism | None = None,
        attempt: int = 0,
        *,
        loss_attempt: int = 0,
        return_gradient: bool,
    ) -> tuple[Any, Diagnostics]:
        """Runs the executable on a state, for one step.

        Args:
          state: State from `begun`, or from an earlier call; its buffers are donated.
          members: Indices of the examples in the batch, in shuffled places, or the plan of a block.
          mechanism: Mechanism with another sigma or C; by default the run's.
          attempt: Number of the attempt, whose key determines the noise.
          loss_attempt: Number of the attempt whose key the losses take; by default one for every
            `attempt`, so that the noise alone differs.
          return_gradient: True to return the private mean gradient in place of the parameters.

        Returns:
          The state after the step, and diagnostics.
        """
        plan = members if isinstance(members, IndexBlock) else self._plan(members)
        state, mechanism = self.layout.put_state(state), mechanism or self.mechanism
        data, plan = self.layout.put_block(self.mechanism.sampler, self.columns, plan)
        takes_key = self.algorithm.takes_key
        loss_key = jnp.asarray(self.root.loss_key(loss_attempt)) if takes_key else None
        watch = Watch.nothing(state.raw_params)._replace(return_gradient=np.bool_(return_gradient))
        steps = range(int(state.step), int(state.step) + 1)
        if steps not in self._known:
            laws = self._laws and self._laws.block_arrays(steps, self.layout.block_steps)
            self._known[steps] = laws
        key, scales = jnp.asarray(self.root.noise_key(attempt)), mechanism.scales()
        inputs = BlockInputs(data, plan, key, scales, watch, loss_key, self._known[steps])
        next_state, log, _ = self.program(state, inputs)
        return next_state, log

    def _plan(
        self, members: Any, positions: Any = None, padding: int | np.ndarray = 0
    ) -> IndexBlock:
        """Returns the plan of a block of one step.

        The process holds all shards: a column's shard decides only about the keys of its losses.
        """
        members, sampler = np.asarray(members, np.int64), self.mechanism.sampler
        if positions is None:
            positions = np.random.default_rng(0).permutation(self.places)[: members.size]
        numbers = np.broadcast_to(padding, self.places).copy()
        weights = np.zeros((self.places, self.block), np.float32)
        numbers[positions], weights[positions] = members, 1.0
        rows = self.starts[numbers][:, None] + np.arange(self.block)
        shape = self.layout.passes, sampler.padded_batch_size
        indices, taking = zeros(shape, np.int32), zeros(shape, np.float32)
        indices[: self._passes] = rows.reshape(self._passes, -1)
        taking[: self._passes] = weights.reshape(self._passes, -1)
        starts = np.minimum(np.arange(self.layout.block_steps + 1), 1) * self._passes
        plan = IndexBlock(indices, taking, starts.astype(np.int32), np.int32(1))
        if sampler.num_shards == 1:
            return plan
        shards = np.repeat(np.arange(sampler.num_shards, dtype=np.int32), sampler.shard_batch_size)
        return plan._replace(places=plan.indices, shards=shards)


def _rows_at(column: Any, places: np.ndarray) -> Any:
    """Returns rows of a column on the host or on the devices."""
    return _gathered(column, places) if isinstance(column, jax.Array) else column[places]


@jax.jit
def _gathered(column: Any, places: Any) -> jax.Array:
    return column[places]
