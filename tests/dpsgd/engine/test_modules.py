"""Modules with state beside their parameters are refused, in one clear line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpsgd import Mechanism, dpsgd, train
from dpsgd.engine.modules import split_module
from samplers import Deterministic


class Normalised(nnx.Module):
    def __init__(self, norm, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = norm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Counting(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x


class Dropped(nnx.Module):
    """Two layers of dropout, each with a stream of its own or both with those of the call."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.first(x, rngs=rngs), self.second(x, rngs=rngs)


@pytest.mark.parametrize("norm", [nnx.LayerNorm, nnx.RMSNorm])
def test_apply_is_the_module_as_a_function_of_its_parameters(norm):
    module = Normalised(norm, nnx.Rngs(0))
    params, apply = split_module(module)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(apply(params, x), module(x))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    assert not np.array_equal(apply(doubled, x), module(x))


def test_updated_batch_statistics_are_refused_by_name():
    params, apply = split_module(Normalised(nnx.BatchNorm, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"batch statistics \(.*mean.*var.*LayerNorm"):
        apply(params, jnp.ones(3))


def test_batch_statistics_that_are_only_read_stay_as_they_are():
    module = Normalised(nnx.BatchNorm, nnx.Rngs(0))
    module.norm.mean[...] = jnp.array([1.0, 2.0])
    module.set_attributes(use_running_average=True)
    params, apply = split_module(module)
    x, shapes = jnp.arange(3.0), [leaf.shape for leaf in jax.tree.leaves(params)]
    assert shapes == [(2,), (3, 2), (2,), (2,)]  # statistics are no parameters
    for _ in range(2):
        np.testing.assert_array_equal(apply(params, x), module(x))
    np.testing.assert_array_equal(module.norm.mean[...], [1.0, 2.0])

    def loss(params, x):
        return jnp.sum(jnp.square(apply(params, x)))

    mechanism = Mechanism(Deterministic(8, 4), 1.0, 1.0)
    done = train(dpsgd(loss, optax.sgd(0.1)), mechanism, params, jnp.ones((8, 3)), audit=False)
    assert not np.array_equal(jax.tree.leaves(done.params)[0], jax.tree.leaves(params)[0])


def test_other_state_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no parameter \(.*calls.*: Variable"):
        split_module(Counting())


@pytest.mark.parametrize("own", [True, False], ids=["streams of its own", "streams of the call"])
def test_dropout_follows_the_key_and_differs_between_layers(own):
    _, apply = split_module(Dropped(nnx.Rngs(0) if own else None))

    def dropped(seed):
        key = jax.random.key(seed)
        masks = apply({}, np.ones(200), **({"key": key} if own else {"rngs": nnx.Rngs(key)}))
        return np.array(masks)

    (first, second), again, other = dropped(1), dropped(1), dropped(2)
    np.testing.assert_array_equal(again, [first, second])
    for a, b in ((first, second), (first, other[0]), (second, other[1])):
        assert 60 < np.sum(a != b) < 140  # of 200 fair coins: false alarm 1e-8 a pair


def test_numbers_drawn_without_a_key_are_refused_by_the_stream():
    _, apply = split_module(Dropped(nnx.Rngs(0)))
    for call in (apply, jax.jit(apply)):
        with pytest.raises(ValueError, match=r"\(first.rngs, second.rngs\).*key=key"):
            call({}, jnp.ones(3))
    _, sure = split_module(nnx.view(Dropped(nnx.Rngs(0)), deterministic=True))
    np.testing.assert_array_equal(sure({}, jnp.ones(3)), np.ones((2, 3)))


def test_a_key_that_nothing_would_use_is_refused():
    params, apply = split_module(Normalised(nnx.LayerNorm, nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no random stream that a key could seed"):
        apply(params, jnp.ones(3), key=jax.random.key(0))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"params": {"w": jnp.ones(3)}, "batch_stats": {"m": jnp.zeros(3)}}, "batch statistic"),
        (nnx.split(Normalised(nnx.BatchNorm, nnx.Rngs(0)))[1], "batch statistic"),
        (nnx.split(Dropped(nnx.Rngs(0)))[1], "random stream .*rngs.*split_module"),
    ],
    ids=["linen", "nnx", "nnx streams"],
)
def test_training_refuses_parameters_with_other_state(params, message):
    algorithm = dpsgd(lambda params, example: 0.0, optax.sgd(0.1))
    mechanism, data = Mechanism(Deterministic(4, 2), 1.0, 1.0), {"x": np.zeros((4, 3), np.float32)}
    with pytest.raises(ValueError, match=message):
        train(algorithm, mechanism, params, data)
