"""Models whose steps are timed, on random rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpsgd import with_rows
from experiments.tasks.clicks.model import functional, pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS

PyTree = Any
LossFn = Callable[[PyTree, PyTree], jax.Array]

RESIDENT_ROWS = 2**16
"""Rows of the data, from which batches are drawn."""


def num_params(params: PyTree) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Model(NamedTuple):
    """Loss of an example, function that makes the parameters, and rows to train on."""

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


def model_of(table_rows: int, hidden: Sequence[int], tables: int = 0) -> Model:
    """Returns a model on random rows.

    Args:
      table_rows: Rows of a table: of each, or of the click model's largest ones.
      hidden: Widths of the click model's layers.
      tables: Number of LazyDP's tables; 0 for the click model.
    """
    return dlrm(table_rows, tables) if tables else clicks(table_rows, tuple(hidden))


def clicks(max_buckets: int, hidden: tuple[int, ...]) -> Model:
    """Returns the click model; beyond 2^20 buckets, the largest columns have so many."""
    schema = DISPLAY_ADS
    if max_buckets > 2**20:
        wide = [max_buckets if count == 2**20 else count for count in schema.buckets]
        schema = dataclasses.replace(schema, buckets=tuple(wide))
    config = dataclasses.replace(PRESETS["large"], max_buckets=max_buckets, hidden=hidden)
    dense = functional(dataclasses.replace(config, max_buckets=1), schema, 0)[0]

    def params() -> PyTree:
        # A table in one pass, and in no other array.
        def filled(shape: Any, leaf: Any) -> Any:
            if shape.shape == leaf.shape:
                return leaf
            numbers = lax.broadcasted_iota(jnp.float32, shape.shape, 0)
            return 0.01 * jnp.sin(numbers + lax.broadcasted_iota(jnp.float32, shape.shape, 1))

        return jax.tree.map(filled, shaped(config, schema)[0], dense)

    rng = np.random.default_rng(0)
    rows, integers = np.array(schema.table_sizes(max_buckets)), len(schema.integers)
    columns: dict[str, np.ndarray] = {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=(RESIDENT_ROWS, integers)).astype(np.float32),
        "integers_missing": rng.random((RESIDENT_ROWS, integers)) < 0.1,
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, len(rows))).astype(np.int32),
    }
    return Model(pure_functions(config, schema).loss, params, columns)


DLRM_WIDTH = 128
DLRM_BOTTOM = 13, 512, 256, DLRM_WIDTH
DLRM_TOP = 1024, 1024, 512, 256, 1


def dlrm(rows: int, tables: int) -> Model:
    """Returns the model of LazyDP (arXiv 2404.08847), MLPerf's DLRM, with `tables` of `rows` each.

    An example looks up one row of 128 numbers of each table; its 13 numbers go through 512, 256 and
    128 units, the products of all pairs of the vectors through 1024, 1024, 512 and 256.
    """
    top = tables * (tables + 1) // 2 + DLRM_WIDTH, *DLRM_TOP

    def layers(widths: Sequence[int]) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        return [
            {
                "kernel": (rng.normal(size=(m, n)) * np.sqrt(2 / m)).astype(np.float32),
                "bias": np.zeros(n, np.float32),
            }
            for m, n in itertools.pairwise(widths)
        ]

    def params() -> dict[str, Any]:
        def table(k: int) -> jax.Array:
            along = (lax.broadcasted_iota(jnp.float32, (rows, DLRM_WIDTH), axis) for axis in (0, 1))
            return 0.01 * jnp.sin(sum(along, jnp.float32(k)))

        every = [table(k) for k in range(tables)]
        return {"tables": every, "bottom": layers(DLRM_BOTTOM), "top": layers(top)}

    def through(layers: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ layers[-1]["kernel"] + layers[-1]["bias"]

    pairs = np.tril_indices(tables + 1, -1)

    def lookups(example: dict[str, Any]) -> dict[str, jax.Array]:
        return {f"tables.{k}": example["categories"][k] for k in range(tables)}

    def loss(params: dict[str, Any], rows: dict[str, Any], example: dict[str, Any]) -> jax.Array:
        x = jax.nn.relu(through(params["bottom"], example["integers"]))
        vectors = jnp.stack([x, *(rows[f"tables.{k}"] for k in range(tables))])
        products = (vectors @ vectors.T)[pairs]
        logit = through(params["top"], jnp.concatenate([x, products]))[0]
        label = example["label"].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logit, label)

    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=(RESIDENT_ROWS, DLRM_BOTTOM[0])).astype(np.float32),
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, tables)).astype(np.int32),
    }
    return Model(with_rows(lookups, loss), params, columns)
