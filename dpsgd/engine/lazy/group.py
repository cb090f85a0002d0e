"""Lazy tables: the time of a step grows with its batch, not with the tables.

A row gets the noise of the steps in which no batch read it at its next read, or at a flush, as one
Gaussian. Claim, proof and limits: docs/explanation/deferred-noise-for-embedding-tables.md.
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
from dpsgd.core.noise import Independent
from dpsgd.core.state import Table, TrainState, join_leaves, split_leaves
from dpsgd.engine.lazy.gaps import LinearSgd
from dpsgd.engine.lazy.laws import StepLaws
from dpsgd.engine.lazy.rows import Rows, flushed_table, read, unique_rows, written
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.gradients import norms
from dpsgd.gradients.frozen import frozen_leaves, leaf_names
from dpsgd.gradients.losses import LossFn, loss_row, loss_rows, row_loss, takes_key
from dpsgd.gradients.rows import LocatedExample, declared_rows, traced_places

PyTree = Any


@dataclass(frozen=True)
class LazyTables:
    """Optimizer of tables: SGD, which is linear in the noise, so that noise may be deferred.

    It is `optax.sgd(learning_rate, momentum)` on the leaves that the loss only looks up rows of.

    Attributes:
      learning_rate: Number >= 0, or an `optax.Schedule`: (step) -> number.
      momentum: Factor in [0, 1).

    Raises:
      TypeError: If a setting is not a number.
      ValueError: If a number is out of range; for a schedule `of_run` checks.

    >>> LazyTables(0.5, momentum=0.9).of_run(2)
    LinearSgd(step_sizes=(0.5, 0.5), momentum=0.9)
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
        LinearSgd((rate,), self.momentum)  # refuses values out of range

    def of_run(self, num_steps: int) -> LinearSgd:
        """Returns the optimizer for a run of `num_steps` steps."""
        rate = self.learning_rate
        sizes = _step_sizes(rate, num_steps) if callable(rate) else [rate] * num_steps
        return LinearSgd(tuple(sizes), self.momentum)


def _step_sizes(schedule: Callable[[Any], Any], num_steps: int) -> list[float]:
    try:  # in one program: a hundred thousand calls of a JAX schedule take half a minute
        sizes = np.asarray(jax.lax.map(schedule, jnp.arange(num_steps)), float)
    except (TypeError, ValueError):  # of Python's or NumPy's own numbers
        sizes = np.array([schedule(k) for k in range(num_steps)])
    if sizes.shape != (num_steps,) or sizes.dtype.kind not in "fiu":
        raise ValueError(f"learning_rate must return one number a step, not {schedule(0)!r}")
    return sizes.astype(float).tolist()


_CHUNK = 2**16
"""Number of rows that are flushed together."""


def worthwhile(num_rows: int, looked_up: int) -> bool:
    """Returns True if deferred noise saves a step work.

    On a CPU a lazy step costs 35 ns more per looked-up coordinate than a step without privacy, a
    dense one 4 ns per table coordinate with SGD and 6 ns with Adam: they break even at 8, or 6,
    rows per look-up (`docs/explanation/results/tables.md`, 85M parameters, batch 1,024).

    Args:
      num_rows: Number of rows of all tables.
      looked_up: Number of rows that a batch looks up, with repetitions.

    >>> worthwhile(1_000_000, 4_096)
    True
    """
    return num_rows >= 8 * looked_up


def find_tables(loss_fn: LossFn, params: PyTree, example: PyTree) -> dict[int, int]:
    """Returns numbers of looked-up rows by leaf index of tables.

    A table's look-ups are declared by `with_rows`, and its rows reach the loss.

    Args:
      loss_fn: (params, example) -> scalar, or (params, example, key) -> scalar.
      params: Parameters, or their shapes.
      example: One example, or its shapes.

    Raises:
      ValueError: If the loss has no table, or one that is not float32.
    """
    declared, names = declared_rows(loss_fn), leaf_names(params)
    if declared is None:
        raise ValueError(
            "the loss declares no look-ups, so its tables cannot be lazy; define it by "
            "with_rows(lookups, loss), or leave out tables="
        )
    row_places = traced_places(declared, loss_fn, params, example)
    places = jax.eval_shape(lambda row: row_places(row), loss_row(loss_fn, example))
    frozen = frozen_leaves(row_loss(loss_fn), params, loss_row(loss_fn, example))
    counts = {names.index(name): math.prod(x.shape) for name, x in places.items()}
    tables = {k: count for k, count in sorted(counts.items()) if k not in frozen}
    if not tables:
        listed = ", ".join(places) or "none"
        raise ValueError(
            f"no derivative of the loss reaches a declared table ({listed}); train it, or leave "
            "out tables="
        )
    leaves = jax.tree.leaves(params)
    for k in tables:
        if (dtype := jnp.result_type(leaves[k])) != jnp.float32:
            raise ValueError(
                f"the table {names[k]} is {dtype}, and lazy tables are float32; make it float32, "
                "or leave out tables="
            )
    return tables


class Share(NamedTuple):
    """Rows of a table that a device catches up and writes, among those that a step reads."""

    numbers: jax.Array
    """Indices of all rows that are read, int32 [U], padded with R."""
    first: Any
    """Index of the first row on the device."""
    places: jax.Array | None
    """Places in `numbers` of the rows on the device, padded with U, int32 [U or more]. None if the
    device has all rows."""
    count: Any
    """Number of read rows on the device."""
    size: int
    """Number of rows processed at a time: a device's even share."""

    @classmethod
    def select(cls, numbers: jax.Array, here: int, num_rows: int, placement: Placement) -> Share:
        """Returns the share of one device.

        Args:
          numbers: Indices of all rows that are read, int32 [U], padded with R.
          here: Number of the table's rows on the device.
          num_rows: Number R of rows of the table.
          placement: Devices that compute.
        """
        if here == num_rows:
            return cls(numbers, 0, None, len(numbers), len(numbers))
        first, size = placement.first_row(here, num_rows), -(-len(numbers) * here // num_rows)
        is_here = (numbers >= first) & (numbers < first + here)
        room = -(-len(numbers) // size) * size
        (places,) = jnp.nonzero(is_here, size=room, fill_value=len(numbers))
        return cls(numbers, first, places, jnp.sum(is_here), size)

    @property
    def sharded(self) -> bool:
        """True if other devices have other rows of the table."""
        return self.places is not None

    def read(self, table: Table, **how: Any) -> Rows:
        """Returns the rows of `numbers`, up to date.

        Rows of other devices are zeros. Keyword arguments go to `caught_up`.
        """
        if self.places is None:
            return read(table, self.numbers, **how)

        def caught_up(at: jax.Array, old: Table) -> Table:
            """Returns the rows so far, with those at places `at` up to date."""
            rows = read(table, self._numbers(at), self.first, **how)
            return written(old, Rows(at, rows.table))

        zeros = jax.tree.map(lambda x: jnp.zeros((len(self.numbers), *x.shape[1:]), x.dtype), table)
        return Rows(self.numbers, self._each(caught_up, zeros))

    def written(
        self,
        table: Table,
        rows: Rows,
        totals: jax.Array,
        step: Callable[[Rows, jax.Array], Rows],
    ) -> Table:
        """Returns the table with its rows replaced by `step(rows, totals)`.

        Args:
          table: Table, or the device's part of it.
          rows: Rows of `numbers`, up to date.
          totals: Sums of the rows' clipped gradients, float32 [U, ...].
          step: Function of rows and totals that returns updated rows.
        """
        if self.places is None:
            return written(table, step(rows, totals))

        def stepped(at: jax.Array, table: Table) -> Table:
            """Returns the table with the rows at places `at` replaced."""
            old, chunk_totals = jax.tree.map(
                lambda x: x.at[at].get(mode="fill", fill_value=0), (rows.table, totals)
            )
            return written(table, step(Rows(self._numbers(at), old), chunk_totals), self.first)

        return self._each(stepped, table)

    def _numbers(self, at: jax.Array) -> jax.Array:
        return self.numbers.at[at].get(mode="fill", fill_value=np.iinfo(np.int32).max)

    def _each(self, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        def process_chunk(i: jax.Array, carry: Any) -> Any:
            """Applies `body` to chunk `i` of the places."""
            assert self.places is not None
            return body(jax.lax.dynamic_slice_in_dim(self.places, i * self.size, self.size), carry)

        return jax.lax.fori_loop(0, -(-self.count // self.size), process_chunk, carry)


class Viewed(NamedTuple):
    """Rows that a step reads, by leaf index of the table."""

    shares: dict[int, Share]
    rows: dict[int, Rows]


@dataclass(frozen=True)
class LazyRows:
    """Tables of a loss: a step catches up, updates and writes the rows it reads."""

    tables: LazyTables
    loss_fn: LossFn

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        """Returns the leaf indices of the tables.

        Raises:
          ValueError: If these parameters cannot be trained under this mechanism.
        """
        if mechanism is None or rows is None:
            raise ValueError("lazy tables need all of init(params, mechanism, rows)")
        if mechanism.noise_multiplier and mechanism.noise != Independent():
            raise ValueError(
                f"lazy tables take Independent() noise, not {mechanism.noise}: deferred noise is "
                "the sum of the noise of many steps, which has another law"
            )
        if mechanism.sampler.accumulates:
            raise ValueError(
                "lazy tables allow one pass per step, and this sampler may take several: use "
                'overflow="truncate", or another sampler'
            )
        example = shapes_of_rows(rows, *mechanism.sampler.clipped_shape)
        return tuple(find_tables(self.loss_fn, params, example))

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        """Returns the first state with some leaves as tables."""
        _, values = split_leaves(state.raw_params, leaves)
        tables = {
            k: Table(None, jnp.zeros_like(x) if self.tables.momentum else None)
            for k, x in values.items()
        }
        return state._replace(tables=tables)

    def view(self, state: TrainState, view: View, context: Context) -> tuple[View, Viewed]:
        """Returns the view of a batch's caught-up rows.

        Returns:
          (view with the rows in place of tables, data for `update`).
        """
        shapes, placement, tables = context.shapes, context.placement, state.lazy_tables
        places = self._places(view, shapes)
        names, leaves = leaf_names(shapes), jax.tree.leaves(shapes)
        read_here = []
        for k in tables:
            rows_of_examples = places[names[k]].reshape(len(view.weights), -1)
            read_here.append(jnp.where(view.weights[:, None] > 0, rows_of_examples, len(leaves[k])))
        pending = _pending(state.step, context)
        shares, rows = {}, {}
        for k, read_rows in zip(tables, placement.gathered(read_here), strict=True):
            numbers, place_of = unique_rows(read_rows.ravel(), len(leaves[k]))
            places[names[k]] = place_of(places[names[k]])
            local_rows = len(tables[k].steps)
            shares[k] = Share.select(numbers, local_rows, len(leaves[k]), placement)
            rows[k] = shares[k].read(tables[k], leaf=k, **pending)
        small = {k: x.table.values for k, x in rows.items()}
        # Rows on other devices are zeros here.
        small |= placement.total({k: small[k] for k, share in shares.items() if share.sharded})
        params = join_leaves(state.params_without_tables, small)
        located = view._replace(params=params, batch=LocatedExample(view.batch, places))
        return located, Viewed(shares, rows)

    def _places(self, view: View, shapes: PyTree) -> dict[str, jax.Array]:
        """Returns the rows that each example reads, int32 [B, ...] by table name."""
        examples = loss_rows(view.batch, next(iter(view.keys), None), takes_key(self.loss_fn))
        declared = declared_rows(self.loss_fn)
        assert declared is not None
        example = shapes_of_rows(view.batch)
        mapped = traced_places(declared, self.loss_fn, shapes, example).map_rows
        # Once: rounded otherwise, a float could give another row index.
        return norms.once(lambda examples: dict(mapped(examples)), examples)

    def update(
        self, state: TrainState, total: PyTree, viewed: Viewed, context: Context
    ) -> TrainState:
        """Returns the state with a batch's rows updated.

        Its step count stays. `total` is a tree like the differentiated parameters.
        """
        _, totals = split_leaves(total, state.tables)
        tables = {}
        for k, table in state.lazy_tables.items():

            def step(old: Rows, total: jax.Array, k: int = k) -> Rows:
                """Returns rows after a noisy update by their gradient sums."""
                key, scales = context.noise_key, context.scales
                gradient, _ = privatize(total, (), key, state.step, scales, (k, old.numbers))
                return _updated_rows(old, gradient, context.laws, context.return_gradient)

            tables[k] = viewed.shares[k].written(table, viewed.rows[k], totals[k], step)
        return state.with_tables(tables)

    def flush(self, state: TrainState, context: Context) -> TrainState:
        """Returns the state with all rows' noise added; `pending` fields stay."""
        leaves = jax.tree.leaves(context.shapes)
        pending = _pending(state.step, context)
        tables = {}
        for k, table in state.lazy_tables.items():
            first = context.placement.first_row(len(table.steps), len(leaves[k]))
            tables[k] = flushed_table(table, _CHUNK, first, leaf=k, **pending)
        return state.with_tables(tables)


def _pending(step: Any, context: Context) -> dict[str, Any]:
    """Returns the arguments of `caught_up` that define the pending noise at a step."""
    scales = context.scales
    stddev = None if scales.noise is None else scales.noise_stddev / scales.expected_batch_size
    key = context.noise_key
    return {"laws": context.laws, "step": step, "noise_key": key, "stddev": stddev}


def _updated_rows(rows: Rows, gradient: jax.Array, laws: StepLaws, return_gradient: Any) -> Rows:
    """Returns rows of a table after a step of SGD, see `dpsgd.engine.lazy.gaps`."""
    old, momentum = rows.table, None
    if old.momentum is not None:
        momentum = laws.momentum * old.momentum + gradient
    theta = old.values - laws.step_size * (gradient if momentum is None else momentum)
    values = jnp.where(return_gradient, gradient, theta)
    return Rows(rows.numbers, Table(values, momentum, old.steps + 1))
