"""The click model: a stacked embedding table, log integers, ReLU layers, a logit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dpsgd.engine.modules import split_module
from dpsgd.engine.platt import Platt
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import ModelConfig

PyTree = Any


INTEGER_SCALE = 0.2
"""Brings the log integers (up to about 12) to the embeddings' order of magnitude. Unscaled, they
dominate every gradient's norm, and clipping would spend it on a few rows of the first layer."""

INITIAL_LOGIT = -1.0
"""Clicks are rarer than their absence: the data set's publishers state about one in four."""


def table_rows(rows: int) -> int:
    """Returns the rows of a stacked table of so many: a large one's divide by up to 64 devices.

    The added rows are never looked up.

    >>> table_rows(1_000), table_rows(6_023_194)
    (1000, 6023232)
    """
    return rows if rows < 2**16 else -(-rows // 64) * 64


class ClickModel(nnx.Module):
    """Maps one example to the logit of its click probability."""

    def __init__(self, config: ModelConfig, schema: Schema, rngs: nnx.Rngs):
        self.schema = schema
        self.max_buckets = config.max_buckets
        schema.table_offsets(config.max_buckets)  # refused before a table is made
        self.embedding = nnx.Embed(
            table_rows(sum(schema.table_sizes(config.max_buckets))),
            config.embedding_dim,
            embedding_init=nnx.initializers.normal(0.01),
            rngs=rngs,
        )
        features = len(schema.categories) * config.embedding_dim + 2 * len(schema.integers)
        widths = [features, *config.hidden]
        self.hidden = nnx.List(
            nnx.Linear(m, n, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
            for m, n in itertools.pairwise(widths)
        )
        self.logit = nnx.Linear(
            widths[-1],
            1,
            kernel_init=nnx.initializers.normal(0.1),
            bias_init=nnx.initializers.constant(INITIAL_LOGIT),
            rngs=rngs,
        )

    def __call__(self, example: dict[str, jax.Array]) -> jax.Array:
        """Returns the logit, a float32 scalar, of one example: a row of the store's columns."""
        ids = self.schema.fold(example["categories"], self.max_buckets)
        rows = ids + self.schema.table_offsets(self.max_buckets)
        x = jnp.concatenate(
            [
                self.embedding(rows).ravel(),
                INTEGER_SCALE * example["integers"],
                example["integers_missing"].astype(jnp.float32),
            ]
        )
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.logit(x)[0]


def _initialised(config: ModelConfig, schema: Schema, key: jax.Array) -> ClickModel:
    return _initialiser(config, schema)(key)


@functools.lru_cache(maxsize=8)  # a program each, which JAX would keep forever
def _initialiser(config: ModelConfig, schema: Schema) -> Callable[[jax.Array], ClickModel]:
    # Half the time of drawing layer by layer.
    return nnx.jit(lambda key: ClickModel(config, schema, nnx.Rngs(key)))


def shaped(
    config: ModelConfig, schema: Schema
) -> tuple[PyTree, Callable[[PyTree, PyTree], jax.Array]]:
    """Returns (params, logit_fn) with the shapes of the parameters alone: they are to be read."""
    return split_module(nnx.eval_shape(lambda: ClickModel(config, schema, nnx.Rngs(0))))


class PureFunctions(NamedTuple):
    """A click model as functions of its parameters."""

    loss: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> cross entropy, in nats."""
    logit: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> logit."""
    predict: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> probability of the label 1 of each row."""
    calibration: Platt
    """Scale and shift of the logit, fitted after training: they go into its layer."""


@functools.lru_cache(maxsize=64)
def pure_functions(config: ModelConfig, schema: Schema) -> PureFunctions:
    """Returns the same functions for the same model, so that programs are compiled once."""
    _, logit = shaped(config, schema)

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        label = example["label"].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logit(params, example), label)

    def predict(params: PyTree, rows: PyTree) -> jax.Array:
        return jax.nn.sigmoid(jax.vmap(logit, in_axes=(None, 0))(params, rows))

    return PureFunctions(loss, logit, predict, Platt(logit, _label, _rescaled))


def _label(example: PyTree) -> jax.Array:
    return example["label"]


def _rescaled(params: PyTree, scale: Any, shift: Any) -> PyTree:
    """Returns parameters whose logit is scale * logit + shift: those of its layer are changed."""

    def leaf(at, x):
        layer, name = (key.key for key in at[:2])
        if layer != "logit":
            return x
        return scale * x + (shift if name == "bias" else 0.0)

    return jax.tree_util.tree_map_with_path(leaf, params)


def functional(
    config: ModelConfig, schema: Schema, seed: int
) -> tuple[PyTree, Callable[[PyTree, PyTree], jax.Array], Callable[[PyTree, PyTree], jax.Array]]:
    """Returns (params, logit_fn, loss_fn): a freshly initialised model as pure functions of params.

    Args:
      config: Sizes of the model.
      schema: Columns of the data.
      seed: Of the initialisation, which is public: it does not depend on the data.
    """
    params, logit_fn = split_module(_initialised(config, schema, jax.random.key(seed)))
    return params, logit_fn, pure_functions(config, schema).loss
