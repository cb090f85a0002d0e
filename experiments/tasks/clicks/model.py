"""Click model: a stacked embedding table, log integers, interaction, ReLU layers, a logit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpsgd.engine.closures import public
from dpsgd.engine.modules import split_module
from dpsgd.engine.queries import Refinement
from dpsgd.gradients.rows import with_rows
from dpsgd.models.predictions import predictions
from experiments.tasks.clicks.schema import Schema, folded
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.store import Columns

CROSS_LAYERS = 2
"""Number of cross layers."""

CROSS_RANK = 16
"""Rank of a cross layer's matrix."""


class Concatenation(nnx.Module):
    """Features x_0: embeddings e_1 ... e_C and numbers x, side by side.

    Args:
      categories: Number C of embeddings.
      width: Length d of an embedding.
      numbers: Number of entries of x.
      rngs: Random streams of the initial parameters.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        del rngs
        self.features = categories * width + numbers

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, float32[features].

        Args:
          embeddings: Embeddings of its categories, float32[C, d].
          numbers: Encoded numbers, float32[numbers].
        """
        return jnp.concatenate([embeddings.ravel(), numbers])


class DotProducts(Concatenation):
    """Features x_0, and the dot products of all pairs of vectors.

    The vectors are e_1 ... e_C and, if there are numbers, e_{C+1} = P x + p. The products e_i e_j,
    i < j, are in the order of (1, 2), (1, 3), ...

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems" (DLRM), 2019, arXiv:1906.00091.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        super().__init__(categories, width, numbers, rngs)
        self.projection = nnx.Linear(numbers, width, rngs=rngs) if numbers else None
        vectors = categories + (numbers > 0)
        self.features += vectors * (vectors - 1) // 2

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, see `Concatenation`."""
        vectors = embeddings
        if self.projection is not None:
            vectors = jnp.concatenate([embeddings, self.projection(numbers)[None]])
        first, second = public(np.triu_indices(len(vectors), 1))
        products = (vectors @ vectors.T)[first, second]
        return jnp.concatenate([super().__call__(embeddings, numbers), products])


class CrossLayers(Concatenation):
    """Features x_L of L low-rank cross layers.

    x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l, with * entry by entry and V_l of `CROSS_RANK` rows.
    U_l and b_l are 0 initially, so that the layers begin as the identity.

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, arXiv:2008.13535.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        super().__init__(categories, width, numbers, rngs)
        zeros, layers = nnx.initializers.zeros, range(CROSS_LAYERS)
        self.down = nnx.List(
            nnx.Linear(self.features, CROSS_RANK, use_bias=False, rngs=rngs) for _ in layers
        )
        self.up = nnx.List(
            nnx.Linear(CROSS_RANK, self.features, kernel_init=zeros, rngs=rngs) for _ in layers
        )

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, see `Concatenation`."""
        x = start = super().__call__(embeddings, numbers)
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x


INTERACTIONS = {"none": Concatenation, "dot": DotProducts, "cross": CrossLayers}
"""Modules by `ModelConfig.interaction`."""


PyTree = Any


INTEGER_SCALE = 0.2
"""Factor that brings log integers (up to about 12) to the embeddings' magnitude. Unscaled, they
dominate every gradient's norm, and clipping would spend it on a few rows of the first layer.
"""


TABLE = "embedding.embedding"
"""Name of the stacked embedding table among the parameters."""


def table_rows(rows: int) -> int:
    """Returns the padded row count of a stacked table.

    From 2^16 rows on it is a multiple of 64; the added rows are never looked up.

    >>> table_rows(1_000), table_rows(6_023_194)
    (1000, 6023232)
    """
    return rows if rows < 2**16 else -(-rows // 64) * 64


class ClickModel(nnx.Module):
    """Network from one example to its logits, see `Schema.target`."""

    def __init__(self, config: ModelConfig, schema: Schema, rngs: nnx.Rngs):
        self.schema, self.config, outputs = schema, config, schema.target.outputs
        schema.table_offsets(config.max_buckets)  # refused before a table is made
        self.embedding = nnx.Embed(
            table_rows(sum(schema.table_sizes(config.max_buckets))),
            config.embedding_dim + outputs * config.wide,
            embedding_init=_with_zeros(nnx.initializers.normal(0.01), None, config.embedding_dim),
            rngs=rngs,
        )
        numbers = number_features(schema, config.bins)
        self.interaction = INTERACTIONS[config.interaction](
            len(schema.categories), config.embedding_dim, numbers * (not config.linear), rngs
        )
        widths = [self.interaction.features, *config.hidden]
        self.hidden = nnx.List(
            nnx.Linear(m, n, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
            for m, n in itertools.pairwise(widths)
        )
        self.logit = nnx.Linear(
            widths[-1] + numbers * config.wide,
            outputs,
            kernel_init=_with_zeros(nnx.initializers.normal(0.1), widths[-1], None),
            bias_init=nnx.initializers.constant(schema.target.initial),
            rngs=rngs,
        )

    def __call__(self, rows: dict[str, jax.Array], example: dict[str, jax.Array]) -> jax.Array:
        """Returns the logits of one example, see `Target`."""
        config, schema = self.config, self.schema
        looked_up = rows[TABLE]
        numbers = encoded_numbers(schema, config.bins, example)
        embeddings = looked_up[:, : config.embedding_dim]
        x = self.interaction(embeddings, numbers[:0] if config.linear else numbers)
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        if config.wide:
            x = jnp.concatenate([x, numbers])
        logits = self.logit(x)
        if config.wide:
            logits += jnp.sum(looked_up[:, config.embedding_dim :], axis=0)
        return logits if logits.size > 1 else logits[0]


def table_lookups(
    config: ModelConfig, schema: Schema, example: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the indices of the table rows that an example reads.

    They are int32[categories], by the table's name.
    """
    buckets = config.max_buckets
    masks, offsets = public((schema.fold_masks(buckets), schema.table_offsets(buckets)))
    return {TABLE: folded(example["categories"], masks) + offsets}


def _with_zeros(draw: nnx.Initializer, *drawn: int | None) -> nnx.Initializer:
    """Returns an initializer that draws part of each axis, None for all, and zeros."""

    def padded(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        inner = [size if n is None else n for size, n in zip(shape, drawn, strict=True)]
        padding = [(0, size - n) for size, n in zip(shape, inner, strict=True)]
        return jnp.pad(draw(key, inner, dtype), padding)

    return padded


def number_features(schema: Schema, bins: int) -> int:
    """Returns the number of `encoded_numbers` of an example.

    Args:
      schema: Columns of the example.
      bins: Number of pieces of a curve; 0 for plain numbers.
    """
    if not bins:
        return 2 * len(schema.integers)
    scales, pieces = _curves(schema, bins)
    return 2 * len(schema.integers) + (scales * (pieces + 1) - 1) * len(schema.bounded)


def _curves(schema: Schema, bins: int) -> tuple[int, int]:
    """Returns the number of curves of a bounded number, and of pieces per curve."""
    scales = len(schema.scales(np.zeros(1)))
    return scales, max(1, bins // scales)


def encoded_numbers(schema: Schema, bins: int, example: dict[str, jax.Array]) -> jax.Array:
    """Returns the features of one example's numbers, float32[number_features].

    For a number x in [low, high], transformed like the store's, with u = B (x - low) / (high - low)
    in [0, B] and B = `bins`, they are max(0, 1 - |u - k|), k = 0 ... B: at most two are not 0, and
    they add up to 1. A weighted sum of them is any function that is linear in each of B pieces of
    the range, and constant beyond. All are 0 for a missing number, which has one more feature. A
    number without bounds is one feature. With the transform "both" the features, with half of B,
    exist for the logarithm and for the number.
    """
    x, missing = example["integers"], example["integers_missing"].astype(jnp.float32)
    binned = [j for j, name in enumerate(schema.integers) if bins and name in schema.bounded]
    if not binned:
        return jnp.concatenate([INTEGER_SCALE * x, missing])
    unbounded = public(np.setdiff1d(np.arange(x.size), binned))
    scales, pieces = _curves(schema, bins)
    places = public(np.array(binned))
    x_bounded = x[places]
    plain = jnp.copysign(jnp.expm1(jnp.abs(x_bounded)), x_bounded)
    limits = schema.scales(np.array(list(schema.bounded.values())))  # [scales, numbers, 2]
    low, width = public((limits[..., 0], limits[..., 1] - limits[..., 0]))
    u = jnp.clip((jnp.stack([x_bounded, plain][:scales]) - low) / width * pieces, 0, pieces)
    hats = jnp.maximum(0.0, 1.0 - jnp.abs(u[..., None] - jnp.arange(pieces + 1)))
    hats *= (1 - missing[places])[:, None]
    return jnp.concatenate([INTEGER_SCALE * x[unbounded], missing, hats.ravel()])


@functools.lru_cache(maxsize=8)  # a program each, which JAX would keep forever
def _initialiser(config: ModelConfig, schema: Schema) -> Callable[[jax.Array], ClickModel]:
    # Half the time of drawing layer by layer.
    return nnx.jit(lambda key: ClickModel(config, schema, nnx.Rngs(key)))


def shaped(
    config: ModelConfig, schema: Schema
) -> tuple[PyTree, Callable[[PyTree, dict[str, jax.Array], PyTree], jax.Array]]:
    """Returns the parameters' shapes, and (params, rows, example) -> logits."""
    return split_module(nnx.eval_shape(lambda: ClickModel(config, schema, nnx.Rngs(0))))


class PureFunctions(NamedTuple):
    """Click model as functions of its parameters."""

    init: Callable[[int], PyTree]
    """(seed) -> new parameters, drawn by a public seed."""
    loss: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> loss."""
    logit: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> logits."""
    predict: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> prediction of each row."""
    calibration: Refinement
    """Calibration after training, applied to the last layer."""


@functools.lru_cache(maxsize=64)
def pure_functions(config: ModelConfig, schema: Schema) -> PureFunctions:
    """Returns the model's functions, cached so that programs compile once."""
    target, (_, apply) = schema.target.robust(config.huber), shaped(config, schema)
    lookups = functools.partial(table_lookups, config, schema)

    def logits(params: PyTree, rows: dict[str, jax.Array], example: PyTree) -> jax.Array:
        return apply(params, rows, example)

    logit = with_rows(lookups, logits)

    def loss(params: PyTree, rows: dict[str, jax.Array], example: PyTree) -> jax.Array:
        return target.loss(logits(params, rows, example), example["label"])

    def predict(params: PyTree, rows: PyTree) -> jax.Array:
        return target.predict(jax.vmap(logit, in_axes=(None, 0))(params, rows))

    def init(seed: int) -> PyTree:
        return split_module(_initialiser(config, schema)(jax.random.key(seed)))[0]

    rescaled = functools.partial(_rescaled, config.embedding_dim)
    calibration = target.calibration(logit, rescaled)
    return PureFunctions(init, with_rows(lookups, loss), logit, predict, calibration)


def _rescaled(vectors: int, params: PyTree, scale: Any, shift: Any) -> PyTree:
    """Returns parameters with the logit scale * logit + shift.

    The last layer changes, and the weights beside the vectors in the table.
    """

    def leaf(at, x):
        layer, name = (key.key for key in at[:2])
        if layer == "embedding" and x.shape[1] > vectors:
            return jnp.asarray(x).at[:, vectors:].multiply(scale)
        if layer != "logit":
            return x
        return scale * x + (shift if name == "bias" else 0.0)

    return jax.tree_util.tree_map_with_path(leaf, params)


class Scores(NamedTuple):
    """Logits of a model for labelled rows."""

    logits: np.ndarray
    """float32[rows], or float32[rows, outputs]."""
    labels: np.ndarray
    """Labels in the store's dtype, [rows]."""
    ids: np.ndarray
    """Hashed values of one categorical column, int32[rows]; or empty."""


def score(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    blocks: Iterable[Columns],
    category: int | None = None,
) -> Scores:
    """Computes the logits of labelled rows, block by block.

    Args:
      logit_fn: (params, example) -> logits.
      params: Parameters of the model.
      blocks: Columns of labelled rows.
      category: Index of a categorical column to return, if any.

    Raises:
      ValueError: If there are no rows.
    """
    params, compiled = jax.device_put(params), _map_rows(logit_fn)
    logits, labels, ids = [], [], [np.zeros(0, np.int32)]
    for block in blocks:
        features = {name: column for name, column in block.items() if name != "label"}
        logits.append(predictions(compiled, params, features))
        labels.append(np.asarray(block["label"]))
        if category is not None:
            ids.append(np.asarray(block["categories"][:, category]))
    if not labels:
        raise ValueError("there are no rows to evaluate the model on")
    return Scores(np.concatenate(logits), np.concatenate(labels), np.concatenate(ids))


@functools.lru_cache(maxsize=8)
def _map_rows(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
) -> Callable[[PyTree, PyTree], jax.Array]:
    """Returns (params, rows) -> logits, one function so that its program compiles once."""
    return jax.vmap(logit_fn, in_axes=(None, 0))
