"""Models whose steps are timed, on random rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.tasks.clicks.model import pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS

PyTree = Any
LossFn = Callable[[PyTree, PyTree], jax.Array]

RESIDENT_ROWS = 2**16
"""Number of rows of the data."""


def num_params(params: PyTree) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Model(NamedTuple):
    """Per-example loss, function that makes the parameters, and training rows."""

    loss_fn: LossFn
    params: Callable[[], PyTree]
    columns: dict[str, np.ndarray]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return num_params(jax.eval_shape(self.params))

    def batch(self, size: int) -> PyTree:
        """Returns the first rows, on the device."""
        return jax.device_put({name: column[:size] for name, column in self.columns.items()})


def clicks(
    table_rows: int, hidden: Sequence[int], interaction: Literal["none", "dot", "cross"] = "none"
) -> Model:
    """Returns the click model on random rows.

    Args:
      table_rows: Largest number of rows of a table; above 2^20 it applies to the tables of the
        largest columns only.
      hidden: Widths of the layers.
      interaction: Interaction of the embeddings.
    """
    schema = DISPLAY_ADS
    if table_rows > 2**20:
        wide = [table_rows if count == 2**20 else count for count in schema.buckets]
        schema = dataclasses.replace(schema, buckets=tuple(wide))
    config = dataclasses.replace(
        PRESETS["large"],
        max_buckets=table_rows,
        hidden=tuple(hidden),
        interaction=interaction,
    )
    dense = pure_functions(dataclasses.replace(config, max_buckets=1), schema).init(0)

    def params() -> PyTree:
        """Makes the parameters, each table in one pass without another array."""

        def filled(shape: Any, leaf: Any) -> Any:
            """Returns the initial value of one parameter."""
            if shape.shape == leaf.shape:
                return leaf
            numbers = lax.broadcasted_iota(jnp.float32, shape.shape, 0)
            return 0.01 * jnp.sin(numbers + lax.broadcasted_iota(jnp.float32, shape.shape, 1))

        return jax.tree.map(filled, shaped(config, schema)[0], dense)

    rng = np.random.default_rng(0)
    rows, integers = np.array(schema.table_sizes(table_rows)), len(schema.integers)
    columns: dict[str, np.ndarray] = {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=(RESIDENT_ROWS, integers)).astype(np.float32),
        "integers_missing": rng.random((RESIDENT_ROWS, integers)) < 0.1,
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, len(rows))).astype(np.int32),
    }
    return Model(pure_functions(config, schema).loss, params, columns)
