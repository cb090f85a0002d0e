"""Values of a step: its scales, its diagnostics, and the training state before and after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scales:
    """Noise scales of a mechanism, traced float32 scalars.

    One compiled program serves all values. Only `noise` is static: each law of noise, and its
    absence, compiles to a separate program.
    """

    l2_clip_norm: Any
    """Clip norm C."""
    noise_stddev: Any
    """Standard deviation sigma C of the noise; None without noise."""
    expected_batch_size: Any
    """Divisor b of the noised sum."""
    noise: Any = field(default=None, metadata={"static": True})
    """Law `Noise` of the noise; None without noise."""


class Diagnostics(NamedTuple):
    """Sums over a batch's real (weight > 0) examples. NOT private: never release them.

    Diagnostics of several batches add up: `jax.tree.map(operator.add, a, b)`.

    Attributes:
      loss_sum: float32, sum of the finite losses.
      clipped_count: float32, number of examples shortened by clipping, in any group of parameters.
      nonfinite_count: float32, number of examples that contributed zero for a NaN or infinite
        gradient.
      batch_size: float32, number of real examples.
    """

    loss_sum: jax.Array
    clipped_count: jax.Array
    nonfinite_count: jax.Array
    batch_size: jax.Array


class Table(NamedTuple):
    """Lazy table, or some of its rows. NOT covered by the guarantee."""

    values: Any
    """theta, float [R, ...]; None in `TrainState.tables`, as the parameters hold it."""
    momentum: Any
    """Momentum m, of the same shape; None without momentum."""
    steps: Any = None
    """Number of steps whose noise each row has, int32 [R]; None if no noise is pending."""


class TrainState(NamedTuple):
    """Training state between two steps.

    Without pending noise the guarantee covers all of it: it depends on the data through noised sums
    alone. With pending noise keep it as secret as the root key: rows without noise reveal
    participants.
    """

    step: Any
    """int32 scalar, number of updates done."""
    raw_params: PyTree
    """Stored parameters; the guarantee covers them only if no noise is pending."""
    opt_state: optax.OptState
    """State of the optimizer for `dense_params`."""
    noise: PyTree = ()
    """State of the noise, always secret: with it noise can be subtracted."""
    tables: dict[int, Table] = {}  # noqa: RUF012
    """Lazy tables by leaf index."""
    frozen: dict[int, tuple[()]] = {}  # noqa: RUF012
    """Leaf indices of constant parameters, which no derivative of the loss reaches."""

    @property
    def pending(self) -> bool:
        """True if noise of lazy tables is pending."""
        return any(table.steps is not None for table in self.tables.values())

    @property
    def params(self) -> PyTree:
        """Parameters of the model, which the guarantee covers.

        Raises:
          ValueError: If noise of lazy tables is pending.
        """
        if self.pending:
            raise ValueError(
                "noise of lazy tables is pending in these parameters, so no guarantee covers them: "
                "take a state after a flush, see flush_every"
            )
        return self.raw_params

    @property
    def dense_params(self) -> PyTree:
        """Parameters with `optax.MaskedNode` for each lazy or frozen leaf."""
        return split_leaves(self.raw_params, {*self.tables, *self.frozen})[0]

    @property
    def params_without_tables(self) -> PyTree:
        """Parameters, frozen ones included, with `optax.MaskedNode` for lazy tables."""
        return split_leaves(self.raw_params, self.tables)[0]

    @property
    def lazy_tables(self) -> dict[int, Table]:
        """Lazy tables with their values, by leaf index."""
        values = split_leaves(self.raw_params, self.tables)[1]
        return {k: table._replace(values=values[k]) for k, table in self.tables.items()}

    def with_tables(self, tables: Mapping[int, Table], dense: PyTree | None = None) -> TrainState:
        """Returns the state with other lazy tables.

        Args:
          tables: Tables with values, by leaf index.
          dense: Other parameters without the tables; by default unchanged.
        """
        dense = self.dense_params if dense is None else dense
        apart = split_leaves(self.raw_params, self.frozen)[1]
        params = join_leaves(dense, apart | {k: table.values for k, table in tables.items()})
        states = {k: table._replace(values=None) for k, table in tables.items()}
        return self._replace(raw_params=params, tables=states)


def defer_noise(state: TrainState) -> TrainState:
    """Returns the state, ready to defer noise from here on.

    No noise of `state` may be pending.
    """
    tables = {
        k: table._replace(steps=jnp.full(len(table.values), state.step, jnp.int32))
        for k, table in state.lazy_tables.items()
    }
    return state.with_tables(tables)


def split_leaves(params: PyTree, apart: Collection[int]) -> tuple[PyTree, dict[int, Any]]:
    """Returns the parameters without some leaves, and these leaves.

    A leaf that is already `optax.MaskedNode` keeps its index.

    >>> split_leaves({"a": 1.0, "b": 2.0}, [1])
    ({'a': 1.0, 'b': MaskedNode()}, {1: 2.0})
    """
    slots, structure = _slots(params)
    dense = [optax.MaskedNode() if k in apart else leaf for k, leaf in enumerate(slots)]
    return jax.tree.unflatten(structure, dense), {k: slots[k] for k in apart}


def join_leaves(dense: PyTree, apart: Mapping[int, Any]) -> PyTree:
    """Returns the parameters that `split_leaves` took apart."""
    slots, structure = _slots(dense)
    return jax.tree.unflatten(structure, [apart.get(k, leaf) for k, leaf in enumerate(slots)])


def _slots(params: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
