"""The parameter group of lazy tables: a step costs what its batch reads, not the tables' size.

A row gets the noise of the steps in which no batch read it when it is read next, or at a flush, as
one Gaussian. Claim, proof and limits: docs/explanation/deferred-noise-for-embedding-tables.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.algorithm import Context, View, privatize
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Table, TrainState, join_leaves, split_leaves
from dpsgd.engine.lazy.gaps import LinearSgd
from dpsgd.engine.lazy.laws import LawTables, RunLaws, StepLaws
from dpsgd.engine.lazy.look_ups import Row, TableLoss, unique_rows
from dpsgd.engine.lazy.rows import Rows, flushed_table, read, written
from dpsgd.engine.placement import Exchange
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.gradients.frozen import RunLoss
from dpsgd.gradients.isolation import ForeignCalls
from dpsgd.gradients.losses import LossFn, loss_row, loss_rows, row_loss, takes_key
from dpsgd.gradients.taps import Path
from dpsgd.noise.base import Independent

PyTree = Any


@dataclass(frozen=True)
class LazyTables:
    """How tables are trained: by SGD, which is linear in the noise, so that noise may be deferred.

    It is `optax.sgd(learning_rate, momentum)` on the leaves of which the loss looks up rows and
    does nothing else with them.

    Attributes:
      learning_rate: A number >= 0, or an `optax.Schedule`: (step) -> number.
      momentum: In [0, 1).

    Raises:
      TypeError: if one of them is no number.
      ValueError: if one is out of range; of a schedule `of_run` says so.
    """

    learning_rate: float | Callable[[int], Any]
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "momentum"):
            value = getattr(self, name)
            if name == "learning_rate" and callable(value):
                continue
            try:
                object.__setattr__(self, name, float(value))
            except (TypeError, ValueError):
                raise TypeError(f"{name} of lazy tables must be a number, got {value!r}") from None
        rate = 0.0 if callable(self.learning_rate) else self.learning_rate
        LinearSgd((rate,), self.momentum)  # refuses what is out of range

    def group(self, loss_fn: LossFn) -> LazyRows:
        """Returns the parameter group of the tables of a loss."""
        if isinstance(loss_fn, ForeignCalls):
            raise ValueError("foreign_calls=True is not for lazy tables: leave out tables=")
        return LazyRows(self, loss_fn)

    def of_run(self, num_steps: int) -> LinearSgd:
        """Returns the optimizer of a run of so many steps."""
        rate = self.learning_rate
        sizes = _step_sizes(rate, num_steps) if callable(rate) else [rate] * num_steps
        return LinearSgd(tuple(sizes), self.momentum)


def _step_sizes(schedule: Callable[[Any], Any], num_steps: int) -> list[float]:
    try:  # in one program: a hundred thousand calls of one of JAX's take half a minute
        sizes = np.asarray(jax.lax.map(schedule, jnp.arange(num_steps)), float)
    except (TypeError, ValueError):  # of Python's or NumPy's own numbers
        sizes = np.array([schedule(k) for k in range(num_steps)])
    if sizes.shape != (num_steps,) or sizes.dtype.kind not in "fiu":
        raise ValueError(f"learning_rate must return one number a step, not {schedule(0)!r}")
    return sizes.astype(float).tolist()


_CHUNK = 2**16
"""Rows that are flushed together."""

_COUNTED = 2**32
"""Coordinates of a table that noise tells apart (`dpsgd.noise.gaussian.normal_at`)."""


def worthwhile(num_rows: int, looked_up: int) -> bool:
    """Returns whether deferred noise saves a step work.

    On a CPU each look-up costs a lazy step 35 ns a coordinate more than a step without privacy, and
    each row a dense one 4 ns with SGD, 6 with Adam: they are even at 8 rows a look-up, or at 6
    (`docs/explanation/results/tables.md`, 85M parameters, batch 1,024).

    Args:
      num_rows: Rows of all tables.
      looked_up: Rows that a batch looks up, with repetitions.
    """
    return num_rows >= 8 * looked_up


def found_tables(loss_fn: LossFn, params: PyTree, example: PyTree) -> TableLoss:
    """Returns the loss taken apart, see `TableLoss`.

    Raises:
      ValueError: if it has no table, or one that is not float32, or too large.
    """
    taken_apart = TableLoss(row_loss(loss_fn), params, loss_row(loss_fn, example))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not taken_apart.tables:
        largest = max(range(len(leaves)), key=lambda k: math.prod(jnp.shape(leaves[k][1])))
        name, others = jax.tree_util.keystr(leaves[largest][0]), ""
        if isinstance(loss_fn, RunLoss) and loss_fn.pattern is not None:
            others = f"; train, {loss_fn.pattern!r}, is for other parameters"
        raise ValueError(
            "the loss has no tables, of which it only looks up rows: params"
            f"{name}, the largest parameter, is none, as {taken_apart.why_not[largest]}{others}"
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
        """Returns the rows that all devices read, and their places for this device's examples."""
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
    """Number of the first row on the device."""
    places: jax.Array | None
    """In `numbers`, of the rows on the device, then U: int32 [U or more]. None if all rows are."""
    count: Any
    """Number of the rows on the device."""
    size: int
    """Rows that are worked on at a time: as many as each device has, if all have as many."""

    @classmethod
    def of(cls, numbers: jax.Array, here: int, num_rows: int, exchange: Exchange) -> Share:
        """Returns the share of a device that has `here` of the rows of a table."""
        if here == num_rows:
            return cls(numbers, 0, None, len(numbers), len(numbers))
        first, size = exchange.first_row(here, num_rows), -(-len(numbers) * here // num_rows)
        mine = (numbers >= first) & (numbers < first + here)
        room = -(-len(numbers) // size) * size
        (places,) = jnp.nonzero(mine, size=room, fill_value=len(numbers))
        return cls(numbers, first, places, jnp.sum(mine), size)

    @property
    def sharded(self) -> bool:
        """Whether other devices have other rows of the table."""
        return self.places is not None

    def read(self, table: Table, **how: Any) -> Rows:
        """Returns the rows of `numbers`, up to date; zeros where they are on other devices."""
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
        """Returns the table with `step(rows, totals)` in its rows, of sums of their gradients."""
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
        def some(i: jax.Array, carry: Any) -> Any:
            assert self.places is not None
            return body(jax.lax.dynamic_slice_in_dim(self.places, i * self.size, self.size), carry)

        return jax.lax.fori_loop(0, -(-self.count // self.size), some, carry)


class Viewed(NamedTuple):
    """The rows that a step reads, by the number of the table."""

    shares: dict[int, Share]
    rows: dict[int, Rows]


@dataclass(frozen=True)
class LazyRows:
    """The `ParamGroup` of lazy tables: a step catches up, updates and writes the rows it reads."""

    tables: LazyTables
    loss_fn: LossFn

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        if mechanism is None or rows is None:
            raise ValueError("lazy tables need all of init(params, mechanism, rows)")
        if mechanism.noise_multiplier and mechanism.noise != Independent():
            raise ValueError(
                f"lazy tables take Independent() noise, not {mechanism.noise}: deferred noise is "
                "the sum of the noise of many steps, which has another law"
            )
        if mechanism.sampler.accumulates:
            raise ValueError(
                'lazy tables read the rows of a step once: take overflow="truncate", or another '
                "sampler, in place of a step of several passes"
            )
        example = shapes_of_rows(rows, *mechanism.sampler.clipped_shape)
        return found_tables(self.loss_fn, params, example).tables

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        _, values = split_leaves(state.raw_params, leaves)
        tables = {
            k: Table(None, jnp.zeros_like(x) if self.tables.momentum else None)
            for k, x in values.items()
        }
        return state._replace(tables=tables)

    def schedule(self, num_steps: int) -> RunLaws:
        return RunLaws(self.tables.of_run(num_steps))

    def view(self, state: TrainState, view: View, context: Context) -> tuple[View, Viewed]:
        shapes, exchange, tables = context.shapes, context.exchange, state.lazy_tables
        leaves = jax.tree.leaves(shapes)
        examples = loss_rows(view.batch, next(iter(view.keys), None), takes_key(self.loss_fn))
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
        loss = TableLoss(row_loss(self.loss_fn), shapes, example)
        assert set(loss.tables) == set(tables), "as the state was made"
        num_rows = {k: len(leaves[k]) for k in loss.tables}
        look_ups = LookUps.of(loss, num_rows, examples, view.weights, exchange)

        pending = _pending(context.schedule.at(context.place).gaps, state.step, context)
        shares = {
            k: Share.of(look_ups.numbers[k], len(table.steps), num_rows[k], exchange)
            for k, table in tables.items()
        }
        rows = {k: shares[k].read(table, leaf=k, **pending) for k, table in tables.items()}
        small = {k: x.values for k, x in rows.items()}
        # Of a row that lies elsewhere there are zeros here.
        small |= exchange.total({k: small[k] for k, share in shares.items() if share.sharded})
        params = join_leaves(state.params_without_tables, small)
        batch = Row(examples, look_ups.places)
        return View(params, batch, view.weights, (), {"loss_fn": loss.loss}), Viewed(shares, rows)

    def update(
        self, state: TrainState, total: PyTree, viewed: Viewed, context: Context
    ) -> tuple[TrainState, None]:
        laws = context.schedule.at(context.place)
        _, totals = split_leaves(total, state.tables)
        tables = {}
        for k, table in state.lazy_tables.items():

            def step(old: Rows, total: jax.Array, k: int = k) -> Rows:
                key, scales = context.noise_key, context.scales
                gradient, _ = privatize(total, (), key, state.step, scales, (k, old.numbers))
                return _updated_rows(old, gradient, laws, context.return_gradient)

            tables[k] = viewed.shares[k].written(table, viewed.rows[k], totals[k], step)
        return state.with_tables(tables), None

    def flush(self, state: TrainState, context: Context) -> TrainState:
        leaves = jax.tree.leaves(context.shapes)
        pending = _pending(context.schedule, state.step, context)
        tables = {}
        for k, table in state.lazy_tables.items():
            first = context.exchange.first_row(len(table.steps), len(leaves[k]))
            tables[k] = flushed_table(table, _CHUNK, first, leaf=k, **pending)
        return state.with_tables(tables)


def _pending(laws: LawTables, step: Any, context: Context) -> dict[str, Any]:
    """Returns what says which noise is pending at a step, see `caught_up`."""
    scales = context.scales
    stddev = None if scales.noise is None else scales.noise_stddev / scales.expected_batch_size
    return {"laws": laws, "step": step, "noise_key": context.noise_key, "stddev": stddev}


def _updated_rows(rows: Rows, gradient: jax.Array, laws: StepLaws, return_gradient: Any) -> Rows:
    """Returns rows of a table after a step of SGD, see `dpsgd.engine.lazy.gaps`."""
    momentum = None if rows.momentum is None else laws.momentum * rows.momentum + gradient
    theta = rows.values - laws.step_size * (gradient if momentum is None else momentum)
    values = jnp.where(return_gradient, gradient, theta)
    return Rows(rows.numbers, values, momentum, rows.steps + 1)
