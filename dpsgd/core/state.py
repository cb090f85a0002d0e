"""The state of training between two steps, with tables whose noise may be deferred."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class TableState(NamedTuple):
    """What a lazy table needs from step to step, beside its values."""

    momentum: Any
    """m, of the shape of the values; None without momentum."""
    steps: Any = None
    """Steps that are in each row: int32 [R]; None where all noise is in all rows."""


class Table(NamedTuple):
    """A lazy table, or some of its rows. NOT covered by the guarantee."""

    values: Any
    """theta: float [R, ...]."""
    momentum: Any
    """m, of the same shape; None without momentum."""
    steps: Any
    """Steps that are in each row: int32 [R]; None where all noise is in all rows."""


class TrainState(NamedTuple):
    """A training state between two steps.

    Without pending noise, the guarantee covers it: all of it depends on the data through noised
    sums alone. With pending noise, keep it as secret as the root key: rows without noise tell who
    took part.
    """

    step: Any
    """int32 scalar: updates done."""
    raw_params: PyTree
    """The parameters as they stand. The guarantee covers them where no noise is pending."""
    opt_state: optax.OptState
    """The optimizer's state, of all parameters but lazy tables."""
    noise: PyTree = ()
    """What the noise needs from step to step. It is a secret in any case: it subtracts noise."""
    tables: dict[int, TableState] = {}  # noqa: RUF012
    """Of each lazy table, by the number of its leaf."""

    @property
    def pending(self) -> bool:
        """Whether noise of lazy tables is pending."""
        return any(table.steps is not None for table in self.tables.values())

    @property
    def params(self) -> PyTree:
        """The parameters, which the guarantee covers.

        Raises:
          ValueError: if noise of lazy tables is pending.
        """
        if self.pending:
            raise ValueError(
                "noise of lazy tables is pending in these parameters, so no guarantee covers them: "
                "take a state after a flush, see flush_every"
            )
        return self.raw_params

    @property
    def dense_params(self) -> PyTree:
        """The parameters, with `optax.MaskedNode` in the place of each lazy table."""
        return parted(self.raw_params, self.tables)[0]

    @property
    def lazy_tables(self) -> dict[int, Table]:
        """The lazy tables with their values, by the numbers of their leaves."""
        values = parted(self.raw_params, self.tables)[1]
        return {k: Table(values[k], *table) for k, table in self.tables.items()}

    def with_tables(self, tables: Mapping[int, Table], dense: PyTree | None = None) -> TrainState:
        """Returns the state with other lazy tables, and with other dense parameters if given."""
        dense = self.dense_params if dense is None else dense
        params = joined(dense, {k: table.values for k, table in tables.items()})
        states = {k: TableState(table.momentum, table.steps) for k, table in tables.items()}
        return self._replace(raw_params=params, tables=states)


def opened(state: TrainState) -> TrainState:
    """Returns a state without pending noise as one whose tables may defer it from here on."""
    tables = {
        k: table._replace(steps=jnp.full(len(table.values), state.step, jnp.int32))
        for k, table in state.lazy_tables.items()
    }
    return state.with_tables(tables)


def parted(params: PyTree, tables: Collection[int]) -> tuple[PyTree, dict[int, Any]]:
    """Returns the parameters without tables, and the tables by their numbers."""
    leaves, structure = jax.tree.flatten(params)
    dense = [optax.MaskedNode() if k in tables else leaf for k, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, dense), {k: leaves[k] for k in tables}


def dense_numbers(leaves: Collection[int], tables: Collection[int]) -> frozenset[int]:
    """Returns the numbers, among the parameters without tables, of leaves that are none."""
    return frozenset(k - sum(table < k for table in tables) for k in leaves)


def joined(dense: PyTree, tables: Mapping[int, Any]) -> PyTree:
    """Returns the parameters whose parts `parted` returns."""
    slots, structure = jax.tree.flatten(dense, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return jax.tree.unflatten(structure, [tables.get(k, leaf) for k, leaf in enumerate(slots)])
