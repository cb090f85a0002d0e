"""Interactions of embeddings: clipped gradients by definition, and initial features."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpsgd import LazyTables, Mechanism, dpsgd, train
from experiments.tasks.clicks.model import INTERACTIONS, pure_functions
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.task import ClickModels
from samplers import Deterministic

SIZES = ModelConfig(embedding_dim=3, max_buckets=8, hidden=(5,), wide=True)
ROWS, NORM, RATE = 12, 0.7, 0.5


def of_interaction(kind):
    """Pure functions, drawn parameters and rows of a model."""
    sizes, rng = dataclasses.replace(SIZES, interaction=kind), np.random.default_rng(0)
    task = ClickModels(sizes, DISPLAY_ADS, hash_seed=0)
    shapes = jax.eval_shape(lambda: task.init(0))
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype("f4"), shapes)
    return pure_functions(sizes, DISPLAY_ADS), params, task.generated(ROWS)


@pytest.mark.short("dot-dense")
@pytest.mark.parametrize("tables", [None, LazyTables(RATE)], ids=["dense", "lazy"])
@pytest.mark.parametrize("kind", ["dot", "cross"])
def test_step_subtracts_the_mean_of_clipped_gradients(kind, tables):
    functions, params, rows = of_interaction(kind)
    gradients = jax.jit(jax.vmap(jax.grad(functions.loss), (None, 0)))(params, rows)
    flat = [np.asarray(x, np.float64).reshape(ROWS, -1) for x in jax.tree.leaves(gradients)]
    norms = np.linalg.norm(np.concatenate(flat, axis=1), axis=1)
    factors = np.minimum(1, NORM / norms)
    assert 0 < np.sum(factors < 1) < ROWS  # some are clipped
    algorithm = dpsgd(functions.loss, optax.sgd(RATE), tables=tables)
    mechanism = Mechanism(Deterministic(ROWS, ROWS, epochs=1), 0.0, NORM)
    how = {"insecure_seed": 3, "delta": 1e-3, "audit": False}
    found = train(algorithm, mechanism, params, rows, **how).params
    for before, after, g in zip(*map(jax.tree.leaves, (params, found)), flat, strict=True):
        expected = before.ravel() - RATE * factors @ g / ROWS
        np.testing.assert_allclose(np.ravel(after), expected, rtol=1e-5, atol=1e-6)
        assert np.any(g)


def test_cross_layers_begin_as_the_identity():
    plain, crossed = (INTERACTIONS[kind](26, 3, 26, nnx.Rngs(0)) for kind in ("none", "cross"))
    rng = np.random.default_rng(0)
    vectors = [jnp.array(rng.normal(size=shape)) for shape in ((26, 3), 26)]
    np.testing.assert_array_equal(plain(*vectors), crossed(*vectors))
    assert plain.features == crossed.features == 26 * 3 + 26
