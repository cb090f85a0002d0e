"""The program that trains, as an audit calls it: its executable, on rows that are nobody's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit.tables import TableSnapshot, put_rows
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Table, TrainState, joined
from dpsgd.engine.feed import Layout, schedules_of
from dpsgd.engine.loop import Block, train_blocks
from dpsgd.engine.placement import hosted, unlike
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.step import Watch, flushed
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.noise.keys import RootKey
from samplers import IndexBlock
from samplers.batches import zeros

PyTree = Any

_UNITS = 16
"""Most generated examples (blocks of rows, where these are clipped as one) among the data."""

_SMALL = 2**26
"""Most bytes of a column that is filled with generated rows throughout, and not with zeros."""

_CUT = 7, 8, 15, 16, 24, 30
"""Copies of an example lie so that whoever reads their numbers in so many bits reads others."""

_NEAR = 128
"""Blocks of rows among the first of which huge examples find a place."""

_MARKED = 2**14
"""Draws of the rows that are marked."""

_HUGE = 2.0**50, -(2.0**50), 2.0**100, -(2.0**100), 2.0**127
"""Times example 0: gradients overflow, or the squares of finite ones do.

Not infinity: a loop of the loss might never come to its end.
"""

_ALIKE = 1
"""Number of the example whose whole numbers are all alike, as where an id comes several times."""


class Probe:
    """The executable of a run, and all that the run calls it with but rows and keys.

    The data have as many rows as the run's, and none is private. Examples are taken from the first
    row to the last; where rows are very many, those between are zeros. The floats of one are
    NaN: it is *poison* if its gradient is. The keys derive from a root of the audit's own.

    In what it returns, a release is the private mean gradient of a step, times the public b: the
    noised sum. Two releases of one step and generation have the same noise. Of a table whose noise
    comes late it holds rows alone that some example reads, see `TableSnapshot`: those that the step
    reads have its noise, and the others are 0.

    Attributes:
      algorithm: The run's.
      mechanism: The run's: sampler, sigma and C.
      layout: The run's: shapes of the blocks.
      state: Where the run goes on, on the host: its step, parameters and optimizer state; the
        noise's state is one that has seen nothing.
      lent: Those tables whose noise comes late, if there are any.
      frozen: Numbers of the leaves of the parameters that stay as they are.
      columns: The data, where the layout has them.
      root: The audit's.
      units: Examples that are nobody's, by number 0, ..., units - 1.
      nan: Number of the example whose floats are NaN, or None where rows hold no floats, or there
        is one row.
      copies: Numbers of examples that are like example 0, and lie in other rows of the data.
      huge: Numbers of examples whose floats are those of example 0 times 2^50 and more, of both
        signs; none where rows hold no floats, or there is no room.
      marked: Rows that no example lies in, and whose floats are NaN: they show in which batches of
        whole blocks they are. bool[n].
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
          state: The run's first, or that where it goes on; it is not written to. Never of tables
            whose noise is due: what an audit says is shown.
          rows: Generated examples, [rows, ...] each leaf; some of the first are used.
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
        self.state = hosted(state._replace(noise=()))
        self.block = math.prod(sampler.clipped_shape)
        self.units, self.nan, self.copies, self.huge, self._starts, columns = _columns(
            rows, sampler.num_examples, self.block
        )
        self.marked = np.zeros(sampler.num_examples, bool)
        if self.nan is not None:
            self._mark(columns)
        self.layout = layout or Layout.of(sampler, columns)
        self._transport = self.layout.transport(sampler)
        self.columns = self._transport.hold(columns)
        self._passes = min(2, self.layout.passes) if sampler.accumulates else 1
        self.places = self._passes * sampler.padded_batch_size // self.block
        noise = jax.eval_shape(mechanism.noise.init, self.state.params)
        like = self.state._replace(noise=noise)
        self.program = self.layout.program(algorithm, mechanism, like, columns)
        example = shapes_of_rows(columns, *sampler.clipped_shape)
        self.frozen = algorithm.frozen(self.state.params, example)
        self._spent: Any = None
        self._schedules = schedules_of(algorithm, sampler.num_steps)
        self._known: dict[range, tuple[Any, ...]] = {}
        self.snapshot: TableSnapshot | None = None
        if self.state.tables:
            self.snapshot = TableSnapshot(self.state)
            self.table_optimizer = algorithm.tables.of_run(sampler.num_steps)
            self._probe(self.snapshot)

    def _probe(self, lent: TableSnapshot) -> None:
        """Finds out which rows of tables the examples read."""
        for start in range(0, len(self._starts), self.places):
            some = np.arange(start, min(start + self.places, len(self._starts)))
            plan = self._plan(some, np.arange(some.size))
            after, *_ = self._called(self._begun(), plan, self.mechanism, 0, reveals=True)
            lent.probe(after.lazy_tables, self.first_step)

    def _mark(self, columns: PyTree) -> None:
        n = len(self.marked)
        self.marked[np.random.default_rng(0).integers(0, n, min(n // 2, _MARKED))] = True
        for start in self._starts:
            self.marked[start : start + self.block] = False
        for leaf in filter(_is_float, jax.tree.leaves(columns)):
            leaf[self.marked] = np.nan

    @functools.cached_property
    def poison(self) -> int | None:
        """Number of the example whose gradient is NaN and so counts as 0; None if there is none.

        A loss that does not read a row's floats, or takes NaN for a missing value, has none.
        """
        if self.nan is None:
            return None
        counts = self.counted(np.full(self.places, self.nan))
        return self.nan if int(counts.nonfinite_count) == self.places else None

    @property
    def why_no_poison(self) -> str:
        """Why no example has a gradient of NaN."""
        return "rows have no floats" if self.nan is None else "NaN in a row gives a finite gradient"

    @property
    def first_step(self) -> int:
        """The step with which the run begins, or goes on."""
        return int(self.state.step)

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the leaves of the parameters."""
        paths = jax.tree_util.tree_leaves_with_path(self.state.params)
        return [f"leaf {jax.tree_util.keystr(path)}" for path, _ in paths]

    @property
    def dtypes(self) -> list[np.dtype]:
        """Of the leaves of the parameters."""
        return [leaf.dtype for leaf in jax.tree.leaves(self.state.params)]

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of the leaves that are tables whose noise comes late."""
        return () if self.snapshot is None else tuple(self.snapshot.rows)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the leaves of a release."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(self.state.params)]
        for k, rows in self.snapshot.rows.items() if self.snapshot else ():
            shapes[k] = (rows.size, *shapes[k][1:])
        return shapes

    @property
    def sizes(self) -> list[int]:
        """Coordinates of the leaves of a release."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def watched_places(self) -> list[np.ndarray]:
        """The first coordinates of each leaf of the parameters, as many as are watched."""
        return [np.asarray(x) for x in Watch.nothing(self.state.params).places]

    def release(
        self,
        members: Sequence[int] | np.ndarray = (),
        mechanism: Mechanism | None = None,
        *,
        at: Sequence[int] | np.ndarray | None = None,
        padding: int | np.ndarray = 0,
        step: int | None = None,
        generation: int = 0,
    ) -> list[np.ndarray]:
        """Returns the release of one step, a block of its own: float32[size] for each leaf.

        Args:
          members: Numbers of the examples that take part; one may do so several times.
          mechanism: Another sigma or C, or both, of the same sampler and law of noise.
          at: Places of the batch where they lie; by default strewn.
          padding: Number of the example that lies under weight 0 in the other places, or of that in
            each place.
          step: Which names the noise; by default the run's first.
          generation: Which does, too.
        """
        mechanism = mechanism or self.mechanism
        state = self._begun(step, spent=True)
        plan = self._plan(members, at, padding)
        number = int(state.step)
        after, *_ = self._called(state, plan, mechanism, generation, reveals=True)
        self._spent = after.opt_state  # given away in the next call: no release depends on it
        return _sums(self._shown(after, number), mechanism)

    def _shown(self, after: Any, step: int) -> PyTree:
        """Returns what a release shows of the state after it, and takes tables back."""
        if self.snapshot is None:
            return after.raw_params
        rows = self.snapshot.take_back(after.lazy_tables, step)
        shown = {}
        for k, table in rows.items():
            read = np.equal(table.steps, step + 1).reshape(-1, *[1] * (table.values.ndim - 1))
            shown[k] = np.where(read, table.values, np.float32(0))
        return joined(after.dense_params, shown)

    def advanced(
        self,
        members: Sequence[int] | np.ndarray = (),
        mechanism: Mechanism | None = None,
        *,
        reveals: bool,
        step: int | None = None,
        rows: dict[int, Table] | None = None,
    ) -> Any:
        """Returns the state after one step from `state`, on the device: what training goes on with.

        Of tables whose noise comes late it has those rows alone that examples read, on the host.

        Args:
          members: Numbers of the examples that take part, strewn.
          mechanism: As for `release`.
          reveals: Whether the release itself, the private mean gradient, stands in the place of the
            parameters.
          step: Another number of the step; by default the run's first.
          rows: What those rows hold before it; by default what they hold in `state`.
        """
        mechanism, self._spent = mechanism or self.mechanism, None
        state = self._begun(step)
        if rows is not None:
            assert self.snapshot is not None
            state = state.with_tables(put_rows(state.lazy_tables, self.snapshot.rows, rows))
        number = int(state.step)
        after, *_ = self._called(state, self._plan(members), mechanism, 0, reveals=reveals)
        if self.snapshot is None:
            return after
        return after.with_tables(self.snapshot.take_back(after.lazy_tables, number))

    def differing(self, members: Sequence[int] | np.ndarray) -> str | None:
        """Returns the path of what is not the same on all devices after a step, see `unlike`."""
        self._spent = None
        state = self._begun()
        after, *_ = self._called(state, self._plan(members), self.mechanism, 0, reveals=False)
        path = unlike(after)
        if self.snapshot is not None:
            self.snapshot.take_back(after.lazy_tables, self.first_step)
        return path

    def begun(self, step: int) -> TrainState:
        """Returns `state` at a step, all rows of its tables up to date, to be given away."""
        return self._begun(step)

    def called(
        self,
        state: TrainState,
        members: Sequence[int] | np.ndarray,
        mechanism: Mechanism,
        generation: int,
        *,
        reveals: bool,
    ) -> TrainState:
        """Returns the state after the next step from one that is given away, see `advanced`."""
        after, *_ = self._called(state, self._plan(members), mechanism, generation, reveals=reveals)
        return after

    def flushed(self, state: TrainState, mechanism: Mechanism, generation: int) -> TrainState:
        """Returns a state, which is given away, with all noise that is due."""
        state = self.layout.put_state(state)
        known = tuple(one and one.after(int(state.step)) for one in self._schedules)
        how = known, self._noise_key(generation), mechanism.scales(), self.layout.placement
        return flushed(self.algorithm, state, *how)

    def dense(self, state: TrainState) -> TrainState:
        """Returns a state without lazy tables."""
        return state._replace(raw_params=state.dense_params, tables={})

    def of_one_batch(
        self,
        members: Sequence[int] | np.ndarray,
        steps: range,
        mechanism: Mechanism | None = None,
        *,
        coordinates: Sequence[np.ndarray],
        generation: int,
    ) -> list[np.ndarray]:
        """Returns coordinates of the releases of steps that have one batch, as one block.

        Steps that may take several passes take none where that batch is of nobody: they cost next
        to nothing.

        Args:
          members: As for `release`.
          steps: At most as many as a block has.
          mechanism: As for `release`.
          coordinates: Of each leaf of a release, at most `WATCHED`: int32, row-major.
          generation: Which names the noise.

        Returns:
          Of each leaf float32[steps, coordinates].
        """
        mechanism = mechanism or self.mechanism
        plan = self._plan(members, steps=len(steps))
        after, _, shown = self._called(
            self._begun(steps.start, spent=True),
            plan,
            mechanism,
            generation,
            reveals=True,
            coordinates=self._in_leaves(coordinates),
        )
        self._spent = after.opt_state
        if self.snapshot is not None:
            self.snapshot.take_back(after.lazy_tables, steps.stop - 1)
        b = np.float32(mechanism.sampler.expected_batch_size)
        borders = np.cumsum([len(x) for x in self.watched_places])[:-1]
        leaves = np.split(np.asarray(shown)[: len(steps)] * b, borders, axis=1)
        return [x[:, : len(at)] for x, at in zip(leaves, coordinates, strict=True)]

    def _in_leaves(self, coordinates: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns coordinates of releases as those of leaves, as many of each as are watched."""
        found = []
        for k, (at, first) in enumerate(zip(coordinates, self.watched_places, strict=True)):
            if self.snapshot and k in self.snapshot.rows:
                width = math.prod(self.shapes[k][1:])
                at = self.snapshot.rows[k][at // width].astype(np.int64) * width + at % width
            found.append(np.resize(at, first.size).astype(np.int32) if len(at) else first)
        return found

    def watched(
        self,
        first_step: int,
        steps: int,
        mechanism: Mechanism | None = None,
        *,
        coordinates: Sequence[np.ndarray],
        generation: int = 0,
    ) -> tuple[range, list[np.ndarray]]:
        """Returns coordinates of the releases of whole blocks, which `train_blocks` itself runs.

        From the second step on, gradients are taken at the release before.

        Args:
          first_step: Of the first block.
          steps: How many are wanted; as many more are taken as there are in the last block begun.
          mechanism: As for `release`.
          coordinates: Of each leaf, as many as `Watch.places` has: int32, row-major.
          generation: Which names batches and noise.

        Returns:
          The steps, and of each leaf float64[steps, coordinates].
        """
        mechanism = mechanism or self.mechanism
        blocks = self.blocks(first_step, mechanism, coordinates=coordinates, generation=generation)
        seen, stop = [], first_step
        with closing(blocks):
            for block in blocks:
                seen.append(np.asarray(block.watched, np.float64)[: len(block.steps)])
                stop = block.steps.stop
                if stop - first_step >= steps:
                    break
        shown = np.concatenate(seen) * mechanism.sampler.expected_batch_size
        borders = np.cumsum([len(c) for c in coordinates])[:-1]
        return range(first_step, stop), np.split(shown, borders, axis=1)

    def blocks(
        self,
        first_step: int,
        mechanism: Mechanism,
        *,
        coordinates: Sequence[np.ndarray],
        generation: int = 0,
        declare: Callable[[range], None] = lambda steps: None,
    ) -> Generator[Block]:
        """Yields the blocks that `train_blocks` runs from `first_step` on, revealing releases."""
        watch = Watch(np.bool_(True), tuple(np.asarray(c, np.int32) for c in coordinates))
        state = self._begun(first_step)
        return self.trained(state, mechanism, generation=generation, declare=declare, watch=watch)

    def trained(
        self, state: TrainState, mechanism: Mechanism, *, generation: int, **how: Any
    ) -> Generator[Block]:
        """Yields the blocks that `train_blocks` runs from a state on, which is given away."""
        return train_blocks(
            self.algorithm,
            mechanism,
            self.layout.put_state(state),
            self.columns,
            root=self.root,
            generation=generation,
            layout=self.layout,
            donate=True,
            run="audit",
            **how,
        )

    def counted(self, members: Sequence[int] | np.ndarray) -> Diagnostics:
        """Returns what a step says of a batch of these examples: float32 numbers."""
        state = self._begun()
        _, log, _ = self._called(state, self._plan(members), self.mechanism, 0, reveals=True)
        return jax.tree.map(lambda column: np.asarray(column)[0], log)

    def _begun(self, step: int | None = None, *, spent: bool = False) -> Any:
        """Returns a state to be given away, at `step`; the optimizer's may be one left over."""
        kept, left_over = self.dense(self.state), self._spent if spent else None
        if left_over is not None:
            kept, self._spent = kept._replace(opt_state=()), None
        state = jax.tree.map(jnp.array, kept)
        if left_over is not None:
            state = state._replace(opt_state=left_over)
        noise = jax.tree.map(jnp.array, self.mechanism.noise.init(self.state.params))
        number = self.first_step if step is None else step
        state = state._replace(step=jnp.int32(number), noise=noise)
        if self.snapshot is not None:
            state = state.with_tables(self.snapshot.lend(number))
        return self.layout.put_state(state)

    def _called(
        self,
        state: TrainState,
        plan: IndexBlock,
        mechanism: Mechanism,
        generation: int,
        *,
        reveals: bool,
        coordinates: Sequence[np.ndarray] | None = None,
    ) -> Any:
        """Returns what the executable makes of a block."""
        state = self.layout.put_state(state)
        data, plan = self._transport.put(self.columns, plan)
        noise_key = self._noise_key(generation)
        loss_key = None
        if self.algorithm.takes_key:
            loss_key = jnp.asarray(self.root.loss_key(0))  # one sum whatever the noise
        watch = Watch.nothing(state.raw_params)._replace(return_gradient=np.bool_(reveals))
        if coordinates is not None:
            watch = watch._replace(places=tuple(coordinates))
        first = int(state.step)
        known = self._known_of(range(first, first + int(plan.num_steps)))
        arguments = noise_key, mechanism.scales(), watch, loss_key, known
        return self.program(state, data, plan, *arguments)

    def _noise_key(self, generation: int) -> jax.Array:
        return jnp.asarray(self.mechanism.noise_key(self.root, generation))

    def _known_of(self, steps: range) -> tuple[Any, ...]:
        if steps not in self._known:
            room = self.layout.block_steps
            self._known[steps] = tuple(one and one.of(steps, room) for one in self._schedules)
        return self._known[steps]

    def _plan(
        self, members: Any, at: Any = None, padding: int | np.ndarray = 0, *, steps: int = 1
    ) -> IndexBlock:
        """Returns the plan of a block of steps, all of one batch."""
        members = np.asarray(members, np.int64)
        if at is None:
            at = np.random.default_rng(0).permutation(self.places)[: members.size]
        numbers = np.broadcast_to(padding, self.places).copy()
        weights = np.zeros((self.places, self.block), np.float32)
        numbers[at], weights[at] = members, 1.0
        rows = self._starts[numbers][:, None] + np.arange(self.block)
        shape = self.layout.passes, self.mechanism.sampler.padded_batch_size
        indices, taking = zeros(shape, np.int32), zeros(shape, np.float32)
        passes = self._passes if members.size or steps == 1 else 0
        for step in range(steps if passes else 0):
            here = slice(step * passes, (step + 1) * passes)
            indices[here] = rows.reshape(passes, -1)
            taking[here] = weights.reshape(passes, -1)
        starts = np.minimum(np.arange(self.layout.block_steps + 1), steps) * passes
        return self._in_shards(
            IndexBlock(indices, taking, starts.astype(np.int32), np.int32(steps))
        )

    def _in_shards(self, plan: IndexBlock) -> IndexBlock:
        """Returns a plan of rows of the data as one of a sampler of several shards has them.

        All shards are held: which of them a column is of decides about its key alone.
        """
        sampler = self.mechanism.sampler
        if sampler.num_shards == 1:
            return plan
        shards = np.repeat(np.arange(sampler.num_shards, dtype=np.int32), sampler.shard_batch_size)
        return plan._replace(places=plan.indices, shards=shards)


def _sums(releases: PyTree, mechanism: Mechanism) -> list[np.ndarray]:
    b = np.float32(mechanism.sampler.expected_batch_size)
    leaves = [np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(releases)]
    return [leaf.astype(np.float32, copy=False) * b for leaf in leaves]


def _columns(
    rows: PyTree, n: int, block: int
) -> tuple[int, int | None, range, range, np.ndarray, PyTree]:
    """Returns how many examples there are, which is NaN, copies of one, huge, and all n rows.

    With them, before the last: where each example begins.
    """
    counts = {len(leaf) for leaf in jax.tree.leaves(rows)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"the audit needs data with equally many rows, got {sorted(counts)}")
    count, room = counts.pop(), n // block
    poisoned = room > 1 and any(map(_is_float, jax.tree.leaves(rows)))
    units = max(1, min(_UNITS, count // block, room - poisoned))
    starts = np.linspace(0, n - block, units + poisoned).astype(np.int64)
    if poisoned:  # somewhere in the middle: first and last are examples like others
        starts = np.append(np.delete(starts, units // 2), starts[units // 2])
    strewn = len(starts)
    for start in (n // 3, *(2**bits + bits for bits in _CUT)):
        if units > 1 and start + block <= n and np.abs(starts - start).min() >= block:
            starts = np.append(starts, start)
    copies = range(strewn, len(starts))
    free = (
        start
        for start in range(0, min(n - block + 1, _NEAR * block), block)
        if np.abs(starts - start).min() >= block
    )
    if poisoned:
        starts = np.append(starts, list(itertools.islice(free, len(_HUGE)))).astype(np.int64)

    def column(leaf):
        leaf = np.asarray(leaf)
        made = zeros((n, *leaf.shape[1:]), leaf.dtype)
        if made.nbytes <= _SMALL:
            made[:] = leaf[np.arange(n) % count]
        for number, start in enumerate(starts):
            one = number if number < strewn else 0
            unit = leaf[(one * block + np.arange(block)) % count]
            if poisoned and number == units and _is_float(leaf):
                unit[:] = np.nan
            elif number >= copies.stop and _is_float(leaf):
                most = min(float(jnp.finfo(t).max) for t in (leaf.dtype, np.float32))
                scaled = unit.astype(np.float64) * _HUGE[number - copies.stop]
                unit[:] = np.clip(scaled, -most, most).astype(leaf.dtype)
            elif number == _ALIKE and unit.ndim > 1 and np.issubdtype(leaf.dtype, np.integer):
                unit[:] = unit.min(initial=np.iinfo(leaf.dtype).max)  # a column may have no width
            made[start : start + block] = unit
        return made

    nan = units if poisoned else None
    huge = range(copies.stop, len(starts))
    return units, nan, copies, huge, starts, jax.tree.map(column, rows)


def _is_float(leaf: Any) -> bool:
    """Whether a column holds floats: one of no width, as of a table without numbers, holds none."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and math.prod(leaf.shape[1:]) > 0
