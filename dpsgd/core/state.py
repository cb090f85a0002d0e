"""The states of training: one that the guarantee covers, and one with deferred noise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class TrainState(NamedTuple):
    """What the guarantee covers: everything here depends on the data through noised sums alone."""

    step: Any  # int32 scalar: updates done
    params: PyTree
    opt_state: optax.OptState
    noise: PyTree = ()
    """What the noise needs from step to step. It is no part of that, but a secret: whoever has it
    can subtract noise."""


class Table(NamedTuple):
    """A table between two steps, with deferred noise. NOT covered by the guarantee."""

    values: jax.Array
    """theta: float [R, ...]."""
    momentum: jax.Array | None
    """m, of the same shape; None without momentum."""
    steps: jax.Array
    """Steps that are in each row: int32 [R]."""


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


def parted(params: PyTree, tables: Sequence[int] | dict[int, Any]) -> tuple[PyTree, dict[int, Any]]:
    """Returns the parameters without tables, and the tables by their numbers."""
    leaves, structure = jax.tree.flatten(params)
    dense = [optax.MaskedNode() if k in tables else leaf for k, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, dense), {k: leaves[k] for k in tables}


def dense_numbers(leaves: Collection[int], tables: Collection[int]) -> frozenset[int]:
    """Returns the numbers, among the parameters without tables, of leaves that are none."""
    return frozenset(k - sum(table < k for table in tables) for k in leaves)


def joined(dense: PyTree, tables: dict[int, Any]) -> PyTree:
    """Returns the parameters whose parts `parted` returns."""
    slots, structure = jax.tree.flatten(dense, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return jax.tree.unflatten(structure, [tables.get(k, leaf) for k, leaf in enumerate(slots)])
