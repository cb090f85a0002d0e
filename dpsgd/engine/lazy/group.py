r"""DP-SGD whose tables get their noise late: a step costs what its batch reads, not their size.

A table is a parameter of which the loss only looks up rows. The dense algorithm writes noise into
every row at every step. Here a row gets the noise of the steps in which nobody read it when it is
read next, or at the end, as one Gaussian of the law that it would have by then
(`dpsgd.engine.lazy.gaps`).

**Claim.** What `flushed` returns has, jointly with every gradient, the law of the dense algorithm
with the same optimizer for the tables; so it costs what that does.

*Proof.* Let D_t be the dense state after t steps, and for a row r that no example of steps s, ...,
t - 1 reads, look at D at the times s and t alone. The row's gradient is 0 in these steps, whatever
the parameters are, as which rows an example reads is a function of the example. So the row moves
from D_s to D_t by a linear map and a Gaussian, both functions of (s, t) and the schedule, and
independent of all else, given who takes part: the noise of these coordinates and steps enters
nowhere else, as no forward pass reads the row between. Rows are independent given the batches.
Hence the joint law of all that is read (each row when it is read), and of all rows at the end, is
the same if each such map is drawn when its result is first needed. Gradients are functions of
examples and of rows that are read, up to date. Neighbouring data sets have the same batches in both
algorithms, and the dense one's cost bounds what its parameters after the last step tell, and so
what these tell. QED.

In floats the maps differ in their roundings, so a flush rounds what it returns to one public grid:
`dpsgd.engine.lazy.rows`.

It does *not* bound what a state tells whose noise is due: a row without noise is one that nobody
read, and its steps say when somebody did. Such a state is a `LazyState`, a secret as the root key
is; what `flushed` returns is a `TrainState`. The rows of one that was flushed go on from there: two
draws for one gap would be an average with less noise.

Noise is a function of (key, step, purpose, leaf, coordinate): a row that is read in step t draws
once for its gap, once for the step. A flush after t steps draws for gaps that end at t, as step t
would: who reads a row then finds it up to date and draws nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from dpsgd.core.algorithm import Algorithm, privatize
from dpsgd.core.marks import marked
from dpsgd.core.mechanism import Mechanism, Scales
from dpsgd.core.state import (
    LazyOptState,
    LazyState,
    Table,
    TrainState,
    dense_numbers,
    joined,
    parted,
)
from dpsgd.engine.algorithm import Frozen, copied, updated
from dpsgd.engine.lazy.gaps import Gaps, LinearSgd
from dpsgd.engine.lazy.look_ups import Row, TableLoss, unique_rows
from dpsgd.engine.lazy.rows import LawTables, Rows, flushed_table, packed, read, written
from dpsgd.engine.placement import Exchange, Placement
from dpsgd.engine.programs import compiled, executable, shapes_of_rows
from dpsgd.gradients.clipping import Diagnostics, clipped_grad
from dpsgd.gradients.losses import LossFn, of_row, row_of, rows_of, takes_key
from dpsgd.gradients.taps import Path
from dpsgd.noise.base import Independent
from dpsgd.noise.gaussian import add_row_noise

PyTree = Any


@dataclass(frozen=True)
class LazyTables:
    """How tables are trained: by SGD, which is linear in the noise, so that noise may come late.

    It is `optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate,
    momentum))`, on the leaves of which the loss looks up rows and does nothing else with them.

    Attributes:
      learning_rate: A number >= 0, or an `optax.Schedule`: (step) -> number.
      momentum: In [0, 1).
      weight_decay: >= 0.

    Raises:
      TypeError: if one of them is no number.
      ValueError: if one is out of range; of a schedule `of_run` says so.
    """

    learning_rate: float | Callable[[int], Any]
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "momentum", "weight_decay"):
            value = getattr(self, name)
            if name == "learning_rate" and callable(value):
                continue
            try:
                object.__setattr__(self, name, float(value))
            except (TypeError, ValueError):
                raise TypeError(f"{name} of lazy tables must be a number, got {value!r}") from None
        rate = 0.0 if callable(self.learning_rate) else self.learning_rate
        LinearSgd((rate,), self.momentum, self.weight_decay)  # refuses what is out of range

    def algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation, microbatch_size: int | None
    ) -> Algorithm:
        """Returns what `dpsgd` makes of this and its other arguments."""
        init = LazyInit(loss_fn, optimizer, bool(self.momentum))
        step = LazyStep(loss_fn, optimizer, microbatch_size)
        return Algorithm(init, _no_sum, step, takes_key(loss_fn), self, Frozen(loss_fn))

    def of_run(self, num_steps: int) -> LinearSgd:
        """Returns the optimizer of a run of so many steps."""
        rate = self.learning_rate
        sizes = _step_sizes(rate, num_steps) if callable(rate) else [rate] * num_steps
        return LinearSgd(tuple(sizes), self.momentum, self.weight_decay)


def _step_sizes(schedule: Callable[[Any], Any], num_steps: int) -> list[float]:
    try:  # in one program: a hundred thousand calls of one of JAX's take half a minute
        sizes = np.asarray(jax.lax.map(schedule, jnp.arange(num_steps)), float)
    except (TypeError, ValueError):  # of Python's or NumPy's own numbers
        sizes = np.array([schedule(k) for k in range(num_steps)])
    if sizes.shape != (num_steps,) or sizes.dtype.kind not in "fiu":
        raise ValueError(f"learning_rate must return one number a step, not {schedule(0)!r}")
    return sizes.astype(float).tolist()


def _no_sum(*arguments: Any) -> Any:
    raise TypeError("lazy tables have no sum of whole gradients: `update` is a whole step")


class StepLaws(NamedTuple):
    """What a step knows of its tables' optimizer: float32."""

    step_size: Any
    momentum: Any
    weight_decay: Any
    gaps: LawTables
    """That end there."""


class BlockLaws(NamedTuple):
    """What the steps of a block know of gaps: float32 arrays."""

    step_sizes: Any
    """[steps]."""
    momentum: Any
    weight_decay: Any
    to_multiple: Any
    """[N + 1, 2 d^2], of the whole run, see `LawTables`."""
    from_multiples: Any
    """[steps, N / K + 1, 2 d^2]."""
    from_recent: Any
    """[steps, K, 2 d^2]."""

    def at(self, j: Any) -> StepLaws:
        """Returns what step `j` of the block knows."""
        gaps = LawTables(self.to_multiple, self.from_multiples[j], self.from_recent[j])
        return StepLaws(self.step_sizes[j], self.momentum, self.weight_decay, gaps)


class RunLaws:
    """Gives each block of a run the laws of its gaps.

    Args:
      optimizer: Of the tables, of the whole run.
    """

    def __init__(self, optimizer: LinearSgd) -> None:
        self._optimizer = optimizer
        self._gaps = Gaps(optimizer)
        self._to_multiple = jax.device_put(packed(self._gaps.to_next_multiple))

    def of(self, steps: range, room: int) -> BlockLaws:
        """Returns the laws of consecutive steps, in arrays with room for `room` of them."""
        found = [self._gaps.at(step) for step in steps]
        sizes = np.zeros(room, np.float32)
        sizes[: len(steps)] = self._optimizer.step_sizes[steps.start : steps.stop]
        gaps = []
        for name in ("from_multiples", "from_recent"):
            rows = np.stack([packed(getattr(at, name)) for at in found])
            gaps.append(np.pad(rows, [(0, room - len(steps)), (0, 0), (0, 0)]))
        numbers = np.float32(self._optimizer.momentum), np.float32(self._optimizer.weight_decay)
        return BlockLaws(sizes, *numbers, self._to_multiple, *gaps)

    def after(self, steps: int) -> LawTables:
        """Returns the laws of gaps that end after so many steps of the run."""
        at = self._gaps.at(steps)
        return LawTables(self._to_multiple, packed(at.from_multiples), packed(at.from_recent))


_CHUNK = 2**16
"""Rows that are flushed together."""

_COUNTED = 2**32
"""Coordinates of a table that noise tells apart (`dpsgd.noise.gaussian.normal_at`)."""


def flushed(
    state: LazyState,
    laws: LawTables,
    noise_key: Any,
    scales: Scales,
    placement: Placement | None = None,
) -> TrainState:
    """Returns the state with all noise that is due: what the guarantee covers.

    Args:
      state: Its buffers are given away, as no other draw may follow from it.
      laws: Of gaps that end after its steps.
      noise_key: Of the run.
      scales: Of its mechanism.
      placement: Where it lies; None is one device.
    """
    arguments = state, laws, noise_key, scales
    return flush_program(arguments, placement)(*arguments)[0]


def flush_program(
    arguments: tuple[Any, ...],
    placement: Placement | None,
    make: Callable[..., Any] = executable,
) -> Any:
    """Returns the executable of `flushed`, and of the steps of rows, for arguments of these shapes.

    No step is read, but what is given away has something in its place. With `make=traced` it is the
    trace of which that is compiled.
    """
    shardings = None
    if placement is not None:
        state, *rest = arguments
        where, whole = placement.state(state), [placement.replicated] * len(rest)
        end, _ = jax.eval_shape(functools.partial(_flushed, None), *arguments)
        rows = {k: table.steps for k, table in where.tables.items()}
        shardings = (where, *whole), (placement.state(end), rows)
    return make(_flushed, (placement,), arguments, donate_argnums=(0,), shardings=shardings)


def _flushed(placement, state, laws, noise_key, scales):
    num_rows, exchange = {k: len(t.steps) for k, t in state.tables.items()}, Exchange(placement)

    def of_tables(tables, due):  # of each device its own rows, and nobody tells another
        firsts = {k: exchange.first_row(len(t.steps), num_rows[k]) for k, t in tables.items()}
        return {k: flushed_table(t, _CHUNK, firsts[k], leaf=k, **due) for k, t in tables.items()}

    if placement is not None:
        parts = placement.specs(state).tables
        of_tables = placement.on_each(of_tables, (parts, PartitionSpec()), parts)
    tables = of_tables(state.tables, _due(laws, state.step, noise_key, scales))
    params = joined(state.dense, {k: t.values for k, t in tables.items()})
    opt_state = LazyOptState(state.opt_state, {k: t.momentum for k, t in tables.items()})
    end = TrainState(state.step, params, opt_state, state.noise)
    return end, {k: t.steps for k, t in tables.items()}


def _due(laws: LawTables, step: Any, noise_key: Any, scales: Scales) -> dict[str, Any]:
    """Returns what says which noise is due at a step, see `caught_up`."""
    stddev = None if scales.noise is None else scales.noise_stddev / scales.expected_batch_size
    return {"laws": laws, "step": step, "noise_key": noise_key, "stddev": stddev}


@dataclass(frozen=True)
class LazyInit:
    """See `dpsgd.engine.algorithm.Algorithm.init`; from rows it tells which leaves are tables."""

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    momentum: bool

    def __call__(self, params: PyTree, mechanism: Mechanism, rows: PyTree) -> TrainState:
        if mechanism.noise_multiplier and mechanism.noise != Independent():
            raise ValueError(
                f"lazy tables take Independent() noise, not {mechanism.noise}: what comes late is "
                "the sum of the noise of many steps, which has another law"
            )
        if mechanism.sampler.accumulates:
            raise ValueError(
                'lazy tables read the rows of a step once: take overflow="truncate", or another '
                "sampler, in place of a step of several passes"
            )
        example = shapes_of_rows(rows, *mechanism.sampler.clipped_shape)
        tables = found_tables(self.loss_fn, params, example).tables
        parts = self.optimizer, self.momentum, tables
        return compiled(_initial, parts, (params,))(params)


def worthwhile(num_rows: int, looked_up: int) -> bool:
    """Returns whether noise that comes late saves a step work.

    On a CPU each look-up costs a lazy step 35 ns a coordinate more than a step without privacy, and
    each row a dense one 4 ns with SGD, 6 with Adam: they are even at 8 rows a look-up, or at 6
    (`experiments/tables.md`, 85M parameters, batch 1,024).

    Args:
      num_rows: Rows of all tables.
      looked_up: Rows that a batch looks up, each counted as often as it does.
    """
    return num_rows >= 8 * looked_up


def found_tables(loss_fn: LossFn, params: PyTree, example: PyTree) -> TableLoss:
    """Returns the loss taken apart, see `TableLoss`.

    Raises:
      ValueError: if it has no table, or one that is not float32, or too large.
    """
    taken_apart = TableLoss(of_row(loss_fn), params, row_of(loss_fn, example))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not taken_apart.tables:
        largest = max(range(len(leaves)), key=lambda k: math.prod(jnp.shape(leaves[k][1])))
        name = jax.tree_util.keystr(leaves[largest][0])
        raise ValueError(
            "the loss has no tables, of which it only looks up rows: params"
            f"{name}, the largest parameter, is none, as {taken_apart.why_not[largest]}"
        )
    for k in taken_apart.tables:
        path, leaf = leaves[k]
        if jnp.result_type(leaf) != jnp.float32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a table of {jnp.result_type(leaf)}, and "
                "lazy tables are float32: make it that, or train it without tables="
            )
        if math.prod(leaf.shape) >= _COUNTED:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has shape {leaf.shape}, and a lazy table has "
                "fewer than 2^32 numbers: of more, two would have one noise"
            )
    return taken_apart


def _initial(optimizer, momentum: bool, tables: tuple[int, ...], params: PyTree) -> TrainState:
    params = copied(params)
    dense, values = parted(params, tables)
    momenta = {k: jnp.zeros_like(x) if momentum else None for k, x in values.items()}
    opt_state = LazyOptState(copied(optimizer.init(dense)), momenta)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


class LookUps(NamedTuple):
    """Which rows of tables a batch reads."""

    numbers: dict[int, jax.Array]
    """Of each table the rows that are read, each once: int32 [U], R where there is none."""
    places: dict[Path, jax.Array]
    """Of each look-up, the places of its rows among these: int32 [B, rows], U where there is
    none."""

    @classmethod
    def of(
        cls,
        loss: TableLoss,
        num_rows: dict[int, int],
        examples: PyTree,
        weights: jax.Array,
        exchange: Exchange,
    ) -> LookUps:
        """Returns those of a batch; of several devices the places of one's own examples.

        Args:
          loss: Taken apart.
          num_rows: R of each table.
          examples: Of the batch, or of this device's part: arrays [B, ...].
          weights: [B]; what those of weight 0 would read is left out.
          exchange: Of what all devices read.
        """
        names = jax.vmap(loss.rows)(examples)
        paths = {k: [use.path for use in loss.uses(k)] for k in num_rows}
        read_here = []
        for k, count in num_rows.items():
            together = jnp.concatenate([names[path] for path in paths[k]], axis=1)
            read_here.append(jnp.where(weights[:, None] > 0, together, count))
        numbers: dict[int, jax.Array] = {}
        places: dict[Path, jax.Array] = {}
        for (k, count), every in zip(num_rows.items(), exchange.gathered(read_here), strict=True):
            numbers[k], place_of = unique_rows(every.ravel(), count)
            places |= {path: place_of(names[path]) for path in paths[k]}
        return cls(numbers, places)


class Share(NamedTuple):
    """The rows of one table that a device catches up and writes, of those that a step reads."""

    numbers: jax.Array
    """Of all rows that are read: int32 [U], R where there is none."""
    first: Any
    """Number of the first row that lies on the device."""
    places: jax.Array | None
    """Where in `numbers` those are that lie there, first of all: int32 [U or more], U beyond. None
    if all do."""
    count: Any
    """How many lie there."""
    size: int
    """How many are worked on at a time: as many as each device has, if all have as many."""

    @classmethod
    def of(cls, numbers: jax.Array, here: int, num_rows: int, exchange: Exchange) -> Share:
        """Returns that of a table of which `here` of so many rows lie on this device."""
        if here == num_rows:
            return cls(numbers, 0, None, len(numbers), len(numbers))
        first, size = exchange.first_row(here, num_rows), -(-len(numbers) * here // num_rows)
        mine = (numbers >= first) & (numbers < first + here)
        room = -(-len(numbers) // size) * size
        (places,) = jnp.nonzero(mine, size=room, fill_value=len(numbers))
        return cls(numbers, first, places, jnp.sum(mine), size)

    @property
    def dealt(self) -> bool:
        """Whether other devices have other rows."""
        return self.places is not None

    def read(self, table: Table, **how: Any) -> Rows:
        """Returns the rows of `numbers`, up to date; zeros for what lies elsewhere, see `read`."""
        if self.places is None:
            return read(table, self.numbers, **how)

        def put(into: jax.Array | None, at: jax.Array, x: Any) -> Any:
            return None if into is None else into.at[at].set(x, mode="drop", unique_indices=True)

        def caught_up(at: jax.Array, found: Rows) -> Rows:
            rows = read(table, self._numbers(at), self.first, **how)
            return Rows(
                self.numbers, *(put(x, at, y) for x, y in zip(found[1:], rows[1:], strict=True))
            )

        def zeros(x: jax.Array | None) -> Any:
            return None if x is None else jnp.zeros((len(self.numbers), *x.shape[1:]), x.dtype)

        return self._each(caught_up, Rows(self.numbers, *map(zeros, table)))

    def written(
        self,
        table: Table,
        rows: Rows,
        totals: jax.Array,
        step: Callable[[Rows, jax.Array], Rows],
    ) -> Table:
        """Returns the table with what `step` makes of rows and of sums of gradients.

        Args:
          table: In the place of which it comes.
          rows: From `read`.
          totals: Of `numbers`: float32 [U, ...].
          step: (rows, their sums) -> rows.
        """
        if self.places is None:
            return written(table, step(rows, totals))

        def of(x: jax.Array | None, at: jax.Array) -> Any:
            return None if x is None else x.at[at].get(mode="fill", fill_value=0)

        def stepped(at: jax.Array, table: Table) -> Table:
            old = Rows(self._numbers(at), *(of(x, at) for x in rows[1:]))
            return written(table, step(old, of(totals, at)), self.first)

        return self._each(stepped, table)

    def _numbers(self, at: jax.Array) -> jax.Array:
        return self.numbers.at[at].get(mode="fill", fill_value=np.iinfo(np.int32).max)

    def _each(self, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Returns what `body` makes of some places, and of what it has made of those before."""

        def some(i: jax.Array, carry: Any) -> Any:
            assert self.places is not None
            return body(jax.lax.dynamic_slice_in_dim(self.places, i * self.size, self.size), carry)

        return jax.lax.fori_loop(0, -(-self.count // self.size), some, carry)


@dataclass(frozen=True)
class LazyStep:
    """One step: rows are caught up, clipped gradients of these are summed, noised and applied."""

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    microbatch_size: int | None

    def __call__(
        self,
        state: LazyState,
        batch: PyTree,
        weights: jax.Array,
        keys: tuple[Any, ...],
        noise_key: Any,
        scales: Scales,
        reveals: Any,
        laws: StepLaws,
        shapes: PyTree,
        exchange: Exchange,
    ) -> tuple[LazyState, Diagnostics]:
        """Returns the state after the step, and its diagnostics.

        Args:
          state: Before it; of several devices what lies on one.
          batch: Rows of the data, one for each of `weights`: of the part of this device.
          weights: 0 for padding.
          keys: Of the loss, if it takes one.
          noise_key: Of the run.
          scales: Of its mechanism.
          reveals: Whether the private mean gradient takes the place of the updated parameters, of
            a table in the rows that were read.
          laws: Of the step.
          shapes: Of the parameters, whole.
          exchange: Between the devices.
        """
        t, leaves = state.step, jax.tree.leaves(shapes)
        examples = rows_of(batch, keys[0] if keys else None, takes_key(self.loss_fn))
        loss = self._taken_apart(shapes, examples)
        assert set(loss.tables) == set(state.tables), "as the state was made"
        num_rows = {k: len(leaves[k]) for k in loss.tables}
        look_ups = LookUps.of(loss, num_rows, examples, weights, exchange)

        due = _due(laws.gaps, t, noise_key, scales)
        shares = {
            k: Share.of(look_ups.numbers[k], len(table.steps), num_rows[k], exchange)
            for k, table in state.tables.items()
        }
        rows = {k: shares[k].read(table, leaf=k, **due) for k, table in state.tables.items()}
        small = {k: x.values for k, x in rows.items()}
        # Of a row that lies elsewhere there are zeros here.
        small |= exchange.total({k: small[k] for k, share in shares.items() if share.dealt})

        gradient_sum = clipped_grad(
            loss.loss, l2_clip_norm=scales.l2_clip_norm, microbatch_size=self.microbatch_size
        )
        examples = Row(examples, look_ups.places)
        found = gradient_sum(joined(state.dense, small), examples, weights)
        total, diagnostics = exchange.total(found)
        total = jax.tree.map(lambda leaf: marked(leaf, "sum"), total)
        dense_total, table_totals = parted(total, rows)

        gradient, noise = privatize(dense_total, state.noise, noise_key, t, scales)
        dense_state = TrainState(t + 1, state.dense, state.opt_state, noise)
        frozen = dense_numbers(loss.frozen, loss.tables)
        after, gradient = updated(self.optimizer, dense_state, gradient, frozen)
        shown = jax.tree.map(functools.partial(jnp.where, reveals), gradient, after.params)
        tables = {}
        for k, table in state.tables.items():

            def step(old: Rows, total: jax.Array, k: int = k) -> Rows:
                gradient = _private_rows(total, old.numbers, noise_key, t, k, scales)
                return _updated_rows(old, gradient, laws, reveals)

            tables[k] = shares[k].written(table, rows[k], table_totals[k], step)
        return LazyState(t + 1, shown, tables, after.opt_state, noise), diagnostics

    def _taken_apart(self, shapes: PyTree, examples: PyTree) -> TableLoss:
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
        return TableLoss(of_row(self.loss_fn), shapes, example)


def _private_rows(total, numbers, noise_key, step, leaf, scales: Scales) -> jax.Array:
    """Returns what `privatize` does, of some rows of a table."""
    divisor = scales.expected_batch_size
    if scales.noise is None:
        return total / divisor
    return add_row_noise(total, numbers, noise_key, step, leaf, scales.noise_stddev, divisor)


def _updated_rows(rows: Rows, gradient: jax.Array, laws: StepLaws, reveals: Any) -> Rows:
    """Returns rows of a table after a step of SGD, see `dpsgd.engine.lazy.gaps`."""
    m = gradient + laws.weight_decay * rows.values
    if rows.momentum is not None:
        m = laws.momentum * rows.momentum + m
    values = jnp.where(reveals, gradient, rows.values - laws.step_size * m)
    return Rows(rows.numbers, values, None if rows.momentum is None else m, rows.steps + 1)
