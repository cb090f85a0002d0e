r"""DP-SGD whose tables get their noise late: a step costs what its batch reads, not their size.

A table is a parameter of which the loss only looks up rows. The dense algorithm writes noise into
every row at every step. Here a row gets the noise of the steps in which nobody read it when it is
read next, or at the end, as one Gaussian of the law that it would have by then
(`dpsgd.tables.gaps`).

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
`dpsgd.tables.rows`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.gradients.clipping import Diagnostics, clipped_grad
from dpsgd.gradients.losses import LossFn, of_row, row_of, rows_of, takes_key
from dpsgd.noise.base import Independent
from dpsgd.noise.gaussian import add_row_noise
from dpsgd.tables.gaps import Gaps, LinearSgd
from dpsgd.tables.look_ups import Row, TableLoss
from dpsgd.tables.rows import LawTables, Rows, Table, flushed_table, packed, read, written
from dpsgd.training.algorithm import Algorithm, TrainState, copied, privatize
from dpsgd.training.mechanism import Mechanism, Scales
from dpsgd.training.programs import compiled

PyTree = Any


@dataclass(frozen=True)
class LazyTables:
    """How tables are trained: by SGD, which is linear in the noise, so that noise may come late.

    It is `optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate,
    momentum))`, on the leaves of which the loss looks up rows and does nothing else with them.

    Attributes:
      learning_rate: A number, or an `optax.Schedule`: (step) -> number.
      momentum: In [0, 1).
      weight_decay: >= 0.
    """

    learning_rate: float | Callable[[int], Any]
    momentum: float = 0.0
    weight_decay: float = 0.0

    def algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation, microbatch_size: int | None
    ) -> Algorithm:
        """Returns what `dpsgd` makes of this and its other arguments."""
        init = LazyInit(loss_fn, optimizer, bool(self.momentum))
        step = LazyStep(loss_fn, optimizer, microbatch_size)
        return Algorithm(init, _no_sum, step, takes_key(loss_fn), self)

    def of_run(self, num_steps: int) -> LinearSgd:
        """Returns the optimizer of a run of so many steps."""
        rate = self.learning_rate
        sizes = [float(rate(k)) if callable(rate) else float(rate) for k in range(num_steps)]
        return LinearSgd(tuple(sizes), self.momentum, self.weight_decay)


def _no_sum(*arguments: Any) -> Any:
    raise TypeError("lazy tables have no sum of whole gradients: `update` is a whole step")


class LazyOptState(NamedTuple):
    """The optimizer's state of a `TrainState` with lazy tables."""

    dense: optax.OptState
    momenta: dict[int, jax.Array | None]
    """Of each table, by the number of its leaf."""


class LazyState(NamedTuple):
    """A training state between two steps, with rows whose noise is due.

    NOT covered by the guarantee: rows without noise tell who took part. Keep it as the root key.
    """

    step: Any
    dense: PyTree
    """The parameters; of a table, `optax.MaskedNode`."""
    tables: dict[int, Table]
    """By the number of the leaf."""
    opt_state: optax.OptState
    noise: PyTree = ()


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

    def at(self, j: Any) -> LawTables:
        """Returns the laws of gaps that end at step `j` of the block."""
        return LawTables(self.to_multiple, self.from_multiples[j], self.from_recent[j])


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


def opened(state: TrainState) -> LazyState:
    """Returns a state, all of whose rows are up to date, as one whose noise may come late."""
    momenta = state.opt_state.momenta
    dense, values = parted(state.params, momenta)
    rows = {k: jnp.full(len(x), state.step, jnp.int32) for k, x in values.items()}
    tables = {k: Table(values[k], momenta[k], rows[k]) for k in values}
    return LazyState(state.step, dense, tables, state.opt_state.dense, state.noise)


def unflushed(state: TrainState | LazyState) -> PyTree:
    """Returns the parameters as they stand, NOT covered where noise is due: for shapes, audits."""
    if isinstance(state, TrainState):
        return state.params
    return joined(state.dense, {k: table.values for k, table in state.tables.items()})


_CHUNK = 2**16
"""Rows that are flushed together."""

_COUNTED = 2**32
"""Coordinates of a table that noise tells apart (`dpsgd.noise.gaussian.normal_at`)."""


def flushed(state: LazyState, laws: LawTables, noise_key: Any, scales: Scales) -> TrainState:
    """Returns the state with all noise that is due: what the guarantee covers.

    Args:
      state: Its buffers are given away, as no other draw may follow from it.
      laws: Of gaps that end after its steps.
      noise_key: Of the run.
      scales: Of its mechanism.
    """
    arguments = state, laws, noise_key, scales
    return compiled(_flushed, (), arguments, donate_argnums=(0,))(*arguments)


def _flushed(state, laws, noise_key, scales):
    how = {"laws": laws, "step": state.step, "noise_key": noise_key, "stddev": _stddev(scales)}
    tables = {k: flushed_table(t, _CHUNK, leaf=k, **how) for k, t in state.tables.items()}
    params = joined(state.dense, {k: t.values for k, t in tables.items()})
    opt_state = LazyOptState(state.opt_state, {k: t.momentum for k, t in tables.items()})
    return TrainState(state.step, params, opt_state, state.noise)


def _stddev(scales: Scales) -> Any:
    return None if scales.noise is None else scales.noise_stddev / scales.expected_batch_size


@dataclass(frozen=True)
class LazyInit:
    """See `dpsgd.training.algorithm.Algorithm.init`; from rows it tells which leaves are tables."""

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
        tables = found_tables(self.loss_fn, params, example_of(mechanism.sampler, rows)).tables
        parts = self.optimizer, self.momentum, tables
        return compiled(_initial, parts, (params,))(params)


def example_of(sampler: Any, rows: PyTree) -> PyTree:
    """Returns the shapes of what is clipped as one, from those of rows of the data."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (*sampler.clipped_shape, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
        ),
        rows,
    )


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
            f"the loss has no tables: of params{name}, the largest, {taken_apart.why_not[largest]}"
        )
    for k in taken_apart.tables:
        path, leaf = leaves[k]
        if jnp.result_type(leaf) != jnp.float32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a table of {jnp.result_type(leaf)}, and "
                "lazy tables are float32"
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


def parted(params: PyTree, tables: Sequence[int] | dict[int, Any]) -> tuple[PyTree, dict[int, Any]]:
    """Returns the parameters without tables, and the tables by their numbers."""
    leaves, structure = jax.tree.flatten(params)
    dense = [optax.MaskedNode() if k in tables else leaf for k, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, dense), {k: leaves[k] for k in tables}


def joined(dense: PyTree, tables: dict[int, Any]) -> PyTree:
    """Returns the parameters whose parts `parted` returns."""
    slots, structure = jax.tree.flatten(dense, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return jax.tree.unflatten(structure, [tables.get(k, leaf) for k, leaf in enumerate(slots)])


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
        step_size: Any,
        laws: BlockLaws,
        gaps: LawTables,
    ) -> tuple[LazyState, Diagnostics]:
        """Returns the state after the step, and its diagnostics.

        Args:
          state: Before it.
          batch: Rows of the data, one for each of `weights`.
          weights: 0 for padding.
          keys: Of the loss, if it takes one.
          noise_key: Of the run.
          scales: Of its mechanism.
          reveals: Whether the private mean gradient takes the place of the updated parameters, of
            a table in the rows that were read.
          step_size: a_t.
          laws: Of the block.
          gaps: Of gaps that end at this step.
        """
        t, stddev = state.step, _stddev(scales)
        shapes = unflushed(state)
        (keys_of_batch,) = keys or (None,)
        batch = rows_of(batch, keys_of_batch, takes_key(self.loss_fn))
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        taken_apart = TableLoss(of_row(self.loss_fn), shapes, example)
        assert set(taken_apart.tables) == set(state.tables), "as the state was made"

        names = jax.vmap(taken_apart.rows)(batch)
        small, rows, places = {}, {}, {}
        for k, table in state.tables.items():
            uses = [u.path for u in taken_apart.uses(k)]
            numbers = _unique([names[path] for path in uses], weights, len(table.steps))
            how = {"laws": gaps, "step": t, "noise_key": noise_key, "stddev": stddev}
            rows[k] = read(table, numbers, leaf=k, **how)
            small[k] = rows[k].values
            for path in uses:
                place = jnp.searchsorted(numbers, names[path]).astype(jnp.int32)
                missing = names[path] == len(table.steps)
                places[path] = jnp.where(missing, len(numbers), place)

        total, diagnostics = clipped_grad(
            taken_apart.loss, l2_clip_norm=scales.l2_clip_norm, microbatch_size=self.microbatch_size
        )(joined(state.dense, small), Row(batch, places), weights)

        dense_total, table_totals = parted(total, small)
        gradient, noise = privatize(dense_total, state.noise, noise_key, t, scales)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, state.dense)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.dense)
        dense = optax.apply_updates(state.dense, updates)
        shown = functools.partial(jnp.where, reveals)
        dense = jax.tree.map(shown, gradient, dense)

        tables: dict[int, Table] = {}
        for k, table in state.tables.items():
            g, old = table_totals[k], rows[k]
            divisor = scales.expected_batch_size
            if scales.noise is None:
                g = g / divisor
            else:
                g = add_row_noise(g, old.numbers, noise_key, t, k, scales.noise_stddev, divisor)
            m = g + laws.weight_decay * old.values
            if old.momentum is not None:
                m = laws.momentum * old.momentum + m
            values = jnp.where(reveals, g, old.values - step_size * m)
            new = Rows(old.numbers, values, None if old.momentum is None else m)
            tables[k] = written(table, new, jnp.full(old.numbers.shape, t + 1, jnp.int32))
        return LazyState(t + 1, dense, tables, opt_state, noise), diagnostics


def _unique(names: list[jax.Array], weights: jax.Array, num_rows: int) -> jax.Array:
    """Returns the rows that a batch reads, each once and in order: int32 [U], `num_rows` beyond."""
    real = [jnp.where(weights[:, None] > 0, rows, num_rows).ravel() for rows in names]
    every = jnp.concatenate(real)
    return jnp.unique(every, size=min(every.size, num_rows + 1), fill_value=num_rows)
