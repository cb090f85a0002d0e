"""The state of training between two steps, with tables whose noise may be deferred."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class Table(NamedTuple):
    """A lazy table, or some of its rows. NOT covered by the guarantee."""

    values: Any
    """theta: float [R, ...]; None in `TrainState.tables`, where the parameters have it."""
    momentum: Any
    """m, of the same shape; None without momentum."""
    steps: Any = None
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
    """The parameters as they stand; the guarantee covers them where no noise is pending."""
    opt_state: optax.OptState
    """The optimizer's state, of `dense_params`."""
    noise: PyTree = ()
    """What the noise needs from step to step. It is a secret in any case: it subtracts noise."""
    tables: dict[int, Table] = {}  # noqa: RUF012
    """Of each lazy table, by the number of its leaf."""
    frozen: dict[int, tuple[()]] = {}  # noqa: RUF012
    """The numbers of the leaves that no derivative of the loss reaches, and that stay as they are:
    nothing is kept for them."""

    @property
    def pending(self) -> bool:
        """Whether noise of lazy tables is pending."""
        return any(table.steps is not None for table in self.tables.values())

    @property
    def params(self) -> PyTree:
        """The parameters of the model, which the guarantee covers.

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
        """The parameters, with `optax.MaskedNode` in the place of each lazy or frozen leaf."""
        return parted(self.raw_params, {*self.tables, *self.frozen})[0]

    @property
    def params_without_tables(self) -> PyTree:
        """The parameters, frozen ones too, with `optax.MaskedNode` in the place of lazy tables."""
        return parted(self.raw_params, self.tables)[0]

    @property
    def lazy_tables(self) -> dict[int, Table]:
        """The lazy tables with their values, by the numbers of their leaves."""
        values = parted(self.raw_params, self.tables)[1]
        return {k: table._replace(values=values[k]) for k, table in self.tables.items()}

    def with_tables(self, tables: Mapping[int, Table], dense: PyTree | None = None) -> TrainState:
        """Returns the state with other lazy tables, and with other dense parameters if given."""
        dense = self.dense_params if dense is None else dense
        apart = parted(self.raw_params, self.frozen)[1]
        params = joined(dense, apart | {k: table.values for k, table in tables.items()})
        states = {k: table._replace(values=None) for k, table in tables.items()}
        return self._replace(raw_params=params, tables=states)


def opened(state: TrainState) -> TrainState:
    """Returns a state without pending noise as one whose tables may defer it from here on."""
    tables = {
        k: table._replace(steps=jnp.full(len(table.values), state.step, jnp.int32))
        for k, table in state.lazy_tables.items()
    }
    return state.with_tables(tables)


def parted(params: PyTree, apart: Collection[int]) -> tuple[PyTree, dict[int, Any]]:
    """Returns the parameters without some leaves, and these by their numbers.

    A leaf that was taken out before, `optax.MaskedNode`, keeps its number.
    """
    slots, structure = _slots(params)
    dense = [optax.MaskedNode() if k in apart else leaf for k, leaf in enumerate(slots)]
    return jax.tree.unflatten(structure, dense), {k: slots[k] for k in apart}


def joined(dense: PyTree, apart: Mapping[int, Any]) -> PyTree:
    """Returns the parameters whose parts `parted` returns."""
    slots, structure = _slots(dense)
    return jax.tree.unflatten(structure, [apart.get(k, leaf) for k, leaf in enumerate(slots)])


def _slots(params: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
