"""Modules with state beside their parameters are refused, in one clear line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpsgd import Mechanism, RootKey, dpsgd, train
from dpsgd.modules import split_module
from samplers import Deterministic


class Normalised(nnx.Module):
    def __init__(self, norm, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = norm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("norm", [nnx.LayerNorm, nnx.RMSNorm])
def test_apply_is_the_module_as_a_function_of_its_parameters(norm):
    module = Normalised(norm, nnx.Rngs(0))
    params, apply = split_module(module)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(apply(params, x), module(x))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    assert not np.array_equal(apply(doubled, x), module(x))


def test_batch_statistics_are_refused_by_name():
    with pytest.raises(ValueError, match=r"batch statistics \(.*mean.*var.*LayerNorm"):
        split_module(Normalised(nnx.BatchNorm, nnx.Rngs(0)))


def test_other_state_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no parameter \(.*dropout"):
        split_module(Dropped(nnx.Rngs(0)))


@pytest.mark.parametrize(
    "params",
    [
        {"params": {"w": jnp.ones(3)}, "batch_stats": {"mean": jnp.zeros(3)}},
        nnx.split(Normalised(nnx.BatchNorm, nnx.Rngs(0)))[1],
    ],
    ids=["linen", "nnx"],
)
def test_training_refuses_parameters_with_batch_statistics(params):
    algorithm = dpsgd(
        lambda params, example: 0.0, optax.sgd(0.1), Mechanism(Deterministic(4, 2), 1.0, 1.0)
    )
    with pytest.raises(ValueError, match="batch statistic"):
        train(algorithm, params, {"x": np.zeros((4, 3), np.float32)}, root=RootKey.from_entropy())
