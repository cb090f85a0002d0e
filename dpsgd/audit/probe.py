"""What an audit sees of the program that trains: its executable, on synthetic rows."""

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
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Diagnostics, Table, TrainState, join_leaves
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.placement import hosted, placement_mismatch
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.step import BlockInputs, Watch, flush_noise
from dpsgd.gradients.frozen import leaf_names
from dpsgd.gradients.losses import example_keys
from dpsgd.gradients.rows import RowLoss, declared_rows, index_ranges, lookups_read_keys
from dpsgd.noise.keys import Keys, RootKey
from samplers import BatchSource
from samplers.batches import IndexBlock, zeros

PyTree = Any


def held(state: TrainState, params: PyTree = None) -> TrainState:
    """Returns a state on the host, as an audit holds it: without the state of the noise.

    Arrays of one value, such as the moments of a first state, take no memory.

    Args:
      state: Of a run.
      params: With which the run begins, if the state is its first: it then has these very arrays.
    """

    def narrow(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not leaf.size or leaf.dtype.itemsize > 8:
            return leaf
        bits = leaf.view(f"u{leaf.dtype.itemsize}")  # 0 and -0 are two
        same = bits.min() == bits.max()
        return (
            np.broadcast_to(leaf.reshape(-1)[:1].copy().reshape(()), leaf.shape) if same else leaf
        )

    def shared(copy: Any, own: Any) -> Any:
        return own if (copy.shape, copy.dtype) == (own.shape, own.dtype) else copy

    found = jax.tree.map(narrow, hosted(state._replace(noise=())))
    if params is None:
        return found
    return found._replace(raw_params=jax.tree.map(shared, found.params, hosted(params)))


class Probe:
    """The executable of a run, and all that the run calls it with but rows and keys.

    The data have as many rows as the run's, and none is private (`synthetic.probe_columns`). The
    keys derive from a root of the audit's own. Two releases of one step and attempt have the
    same noise. Of a table with deferred noise a release holds the rows alone that some example
    reads, see `TableSnapshot`: those that the step reads have its noise, the others are 0.

    Attributes:
      algorithm, mechanism, layout: The run's.
      state: Where the run resumes, on the host: its step, parameters and optimizer state; the
        noise's state is one that has seen nothing.
      snapshot: The tables with deferred noise, if there are any.
      frozen: Numbers of the leaves of the parameters that stay as they are: a release has none of
        their coordinates.
      columns: The data, where the layout has them.
      root: The audit's.
      units, nan, huge, marked, starts: Of the synthetic rows, see `ProbeColumns`.
      places: Of examples in the padded batch of a step; where steps take several passes, of two.
      program: The executable.
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
        """Compiles the program of a run, or finds it compiled.

        Args:
          algorithm: Of the run.
          mechanism: Of the run.
          state: The run's first, or that with which it resumes; it is not written to. Never of
            tables with deferred noise that is pending: what an audit says is shown.
          rows: Generated examples, [rows, ...] each leaf; some of the first are used. Where there
            are lazy tables, every other one looks up other rows of these (`varied_rows`).
          layout: Of the run; by default what `train_blocks` chooses by itself.
          root: By default fresh entropy. Never the run's own: two releases under one noise, as an
            audit makes them, have a noise-free difference.

        Raises:
          ValueError: if the mechanism has no noise, or there are no rows.
        """
        if mechanism.noise_multiplier == 0:
            raise ValueError("there is nothing to audit: noise_multiplier is 0")
        sampler = mechanism.sampler
        self.algorithm, self.mechanism = algorithm, mechanism
        self.root = root or RootKey.from_entropy()
        self.state = held(state)
        self.block = math.prod(sampler.clipped_shape)
        if algorithm.tables is not None:
            example = shapes_of_rows(rows, *sampler.clipped_shape)
            ranges = index_ranges(algorithm.loss_fn, state.params, example)
            rows = varied_rows(rows, ranges, block=self.block)
        synthetic = probe_columns(rows, sampler.num_examples, self.block)
        self.units, self.nan, self.huge = synthetic.units, synthetic.nan, synthetic.huge
        self.marked, self.starts = synthetic.marked, synthetic.starts
        self.layout = layout or Layout.choose(sampler, synthetic.columns)
        self.columns = self.layout.hold(synthetic.columns)
        self._passes = min(2, self.layout.passes) if sampler.accumulates else 1
        self.places = self._passes * sampler.padded_batch_size // self.block
        self.frozen = frozenset(state.frozen)
        noise = jax.eval_shape(mechanism.noise.init, self.state.dense_params)
        like = self.state._replace(noise=noise)
        self.program = self.layout.program(algorithm, mechanism, like, synthetic.columns)
        self._spent: Any = None
        self._laws = algorithm.gap_laws(sampler.num_steps)
        self._known: dict[range, Any] = {}
        self.snapshot: TableSnapshot | None = None
        if self.state.tables:
            self.table_optimizer = algorithm.tables.of_run(sampler.num_steps)
            keyed = lookups_read_keys(algorithm.loss_fn, state.params, example)
            self.snapshot = TableSnapshot(self.state, self._rows_of_examples(keyed))

    def _rows_of_examples(self, keyed: bool) -> dict[int, np.ndarray]:
        """Returns the rows of each lazy table that synthetic examples look up: int32, in order.

        Args:
          keyed: Whether look-ups depend on keys: then examples may look up any row.
        """
        tables = self.state.lazy_tables
        if keyed:
            return {k: np.arange(len(x.values), dtype=np.int32) for k, x in tables.items()}
        rows = {k: np.zeros(0, np.int32) for k in tables}
        for start in range(0, len(self.starts), self.places):
            some = np.arange(start, min(start + self.places, len(self.starts)))
            read = self.looked_up(self._plan(some), self.first_step)
            rows = {k: np.union1d(of, read[k]) for k, of in rows.items()}
        return rows

    def looked_up(self, plan: IndexBlock, step: int, attempt: int = 0) -> dict[int, np.ndarray]:
        """Returns the rows of each lazy table that the batch of a step looks up: int32, in order.

        Args:
          plan: Plan of one step.
          step: Number of the step, which names the keys of a loss that takes one.
          attempt: Number of the attempt, likewise.
        """
        shape = -1, *self.mechanism.sampler.clipped_shape
        indices, places = (
            np.asarray(plan.indices if x is None else x)[0].reshape(shape)
            for x in (plan.indices, plan.places)
        )
        real = plan.weights[0].reshape(len(indices), -1).max(axis=1) > 0
        batch: tuple[Any, ...] = (jax.tree.map(lambda x: np.asarray(x[places]), self.columns),)
        if self.algorithm.takes_key:
            first = jnp.asarray(indices.reshape(len(indices), -1)[:, 0])
            key = jnp.asarray(self.root.loss_key(attempt))
            batch += (example_keys(key, step, first, plan.shards),)
        found = self._looked_up_at(batch)
        names = leaf_names(self.state.raw_params)
        return {k: np.unique(np.asarray(found[names[k]])[real]) for k in self.state.tables}

    @property
    def _declared(self) -> RowLoss:
        declared = declared_rows(self.algorithm.loss_fn)
        assert declared is not None, "or it had no lazy tables"
        return declared

    @functools.cached_property
    def _looked_up_at(self) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
        declared, shapes = self._declared, jax.eval_shape(lambda: self.state.raw_params)
        return jax.jit(jax.vmap(lambda batch: declared.places(shapes, *batch)))

    def drawn_plan(self, step: int, attempt: int) -> IndexBlock:
        """Returns the plan of a block of one step, as the run's sampler draws it."""
        source = BatchSource(self.mechanism.sampler, self.root.sampling_seed(attempt))
        room = {"steps": self.layout.block_steps, "passes": self.layout.passes}
        return source.fill(step, step + 1, **room)

    @functools.cached_property
    def poison(self) -> int | None:
        """Number of the example whose gradient is NaN and so counts as 0; None if there is none.

        A loss that does not read a row's floats, or takes NaN for a missing value, has none.
        """
        if self.nan is None:
            return None
        members = np.full(self.places, self.nan)
        after, log = self.called(self.begun(), members, return_gradient=True)
        self._taken_back(after, self.first_step)
        return self.nan if int(np.asarray(log.nonfinite_count)[0]) == self.places else None

    @property
    def first_step(self) -> int:
        """The step with which the run begins, or resumes."""
        return int(self.state.step)

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the leaves of the parameters."""
        paths = jax.tree_util.tree_leaves_with_path(self.state.raw_params)
        return [f"leaf {jax.tree_util.keystr(path)}" for path, _ in paths]

    @property
    def dtypes(self) -> list[np.dtype]:
        """Of the leaves of the parameters."""
        return [leaf.dtype for leaf in jax.tree.leaves(self.state.raw_params)]

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of the leaves that are tables with deferred noise."""
        return () if self.snapshot is None else tuple(self.snapshot.rows)

    def table_places(self, leaf: int, places: np.ndarray) -> np.ndarray:
        """Returns flat indices into a table with deferred noise, of places among the rows read."""
        assert self.snapshot is not None
        width = math.prod(self.shapes[leaf][1:])
        return self.snapshot.rows[leaf][places // width].astype(np.int64) * width + places % width

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the leaves of a release."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(self.state.raw_params)]
        for k, rows in self.snapshot.rows.items() if self.snapshot else ():
            shapes[k] = (rows.size, *shapes[k][1:])
        return [(0,) if k in self.frozen else shape for k, shape in enumerate(shapes)]

    @property
    def sizes(self) -> list[int]:
        """Coordinates of the leaves of a release."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def full_batch(self) -> np.ndarray:
        """Numbers of the examples of a full batch, each in turn: int[places]."""
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
        """Returns the private mean gradient of one step, a block of its own.

        Args:
          members: Numbers of the examples that take part; one may do so several times.
          mechanism: Another sigma or C, or both, of the same sampler and law of noise.
          at: Places of the batch where they lie; by default strewn.
          padding: Number of the example that lies under weight 0 in the other places, or of that in
            each place.
          step: Which names the noise; by default the run's first.
          attempt: Which does, too.
          rows: What the rows of tables in `snapshot` hold before; by default as in `state`.

        Returns:
          The noised sum over the expected batch size, float32[size] for each leaf.
        """
        state, plan = self.begun(step, spent=True), self._plan(members, at, padding)
        if rows is not None and self.snapshot is not None:
            state = state.with_tables(put_rows(state.lazy_tables, self.snapshot.rows, rows))
        number = int(state.step)
        after, _ = self.called(state, plan, mechanism, attempt, return_gradient=True)
        self._spent = after.opt_state  # given away in the next call: no release depends on it
        shown = after.raw_params
        if self.snapshot is not None:
            read_rows = {}
            for k, table in self._taken_back(after, number).items():
                read = np.equal(table.steps, number + 1).reshape(-1, *[1] * (table.values.ndim - 1))
                read_rows[k] = np.where(read, table.values, np.float32(0))
            shown = join_leaves(after.params_without_tables, read_rows)
        leaves = [
            np.ravel(np.zeros(0) if k in self.frozen else np.asarray(leaf))
            for k, leaf in enumerate(jax.tree.leaves(shown))
        ]
        return [leaf.astype(np.float32, copy=False) for leaf in leaves]

    def _taken_back(self, after: TrainState, step: int) -> dict[int, Table]:
        """Returns what a step left in the rows of tables, which the next call has again."""
        return {} if self.snapshot is None else self.snapshot.take_back(after.lazy_tables, step)

    def placement_mismatch(self) -> str | None:
        """Returns the path of what is not the same on all devices after a full batch, if any is."""
        after, _ = self.called(self.begun(), self.full_batch, return_gradient=False)
        path = placement_mismatch(after)
        self._taken_back(after, self.first_step)
        return path

    def flushed(self, state: TrainState, mechanism: Mechanism, attempt: int) -> TrainState:
        """Returns a state, which is given away, with all deferred noise."""
        state = self.layout.put_state(state)
        laws = self._laws.flush_arrays(int(state.step))
        arguments = state, laws, self._noise_key(attempt), mechanism.scales()
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
        """Yields the blocks that `train_blocks` runs from a state on, which is given away.

        Args:
          state: Its step is the first.
          mechanism: As for `release`.
          attempt: Which names batches and noise.
          places: Coordinates of each leaf that every step shows, as many as `Watch.nothing` has.
          return_gradient: Whether they are those of the private mean gradient.
          flush_every: As for `train_blocks`.
          declare: Likewise.
        """
        some = tuple(np.asarray(at, np.int32) for at in places)
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
            watch=Watch(np.bool_(return_gradient), some),
        )

    def begun(self, step: int | None = None, *, spent: bool = False) -> Any:
        """Returns `state` at a step, to be given away, all rows of its tables up to date.

        The optimizer's part may be one left over from a release.
        """
        left_over, self._spent = self._spent if spent else None, None
        kept = self.state._replace(raw_params=self.state.params_without_tables, tables={})
        if left_over is not None:
            kept = kept._replace(opt_state=())
        state = jax.tree.map(jnp.array, kept)
        if left_over is not None:
            state = state._replace(opt_state=left_over)
        noise = jax.tree.map(jnp.array, self.mechanism.noise.init(self.state.dense_params))
        number = self.first_step if step is None else step
        state = state._replace(step=jnp.int32(number), noise=noise)
        if self.snapshot is not None:
            state = state.with_tables(self.snapshot.borrow(number))
        return self.layout.put_state(state)

    def called(
        self,
        state: Any,
        members: IndexBlock | Sequence[int] | np.ndarray,
        mechanism: Mechanism | None = None,
        attempt: int = 0,
        *,
        return_gradient: bool,
    ) -> tuple[Any, Diagnostics]:
        """Returns what the executable makes of a state, which is given away, in the next step.

        Args:
          state: From `begun`, or from this.
          members: Numbers of the examples that take part, strewn, or the plan of a block.
          mechanism: As for `release`.
          attempt: Likewise.
          return_gradient: True for the private mean gradient in the place of the parameters.
        """
        plan = members if isinstance(members, IndexBlock) else self._plan(members)
        state, mechanism = self.layout.put_state(state), mechanism or self.mechanism
        data, plan = self.layout.put_block(self.mechanism.sampler, self.columns, plan)
        # One sum, whatever the noise.
        loss_key = jnp.asarray(self.root.loss_key(0)) if self.algorithm.takes_key else None
        watch = Watch.nothing(state.raw_params)._replace(return_gradient=np.bool_(return_gradient))
        steps = range(int(state.step), int(state.step) + 1)
        if steps not in self._known:
            laws = self._laws and self._laws.block_arrays(steps, self.layout.block_steps)
            self._known[steps] = laws
        key, scales = self._noise_key(attempt), mechanism.scales()
        inputs = BlockInputs(data, plan, key, scales, watch, loss_key, self._known[steps])
        after, log, _ = self.program(state, inputs)
        return after, log

    def _noise_key(self, attempt: int) -> jax.Array:
        return jnp.asarray(self.root.noise_key(attempt))

    def _plan(self, members: Any, at: Any = None, padding: int | np.ndarray = 0) -> IndexBlock:
        """Returns the plan of a block of one step.

        All shards are held: which of them a column is of decides about its key alone.
        """
        members, sampler = np.asarray(members, np.int64), self.mechanism.sampler
        if at is None:
            at = np.random.default_rng(0).permutation(self.places)[: members.size]
        numbers = np.broadcast_to(padding, self.places).copy()
        weights = np.zeros((self.places, self.block), np.float32)
        numbers[at], weights[at] = members, 1.0
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
