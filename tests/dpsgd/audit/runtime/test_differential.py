"""Compiled steps equal the definition of DP-SGD, and faulty ones are seen to differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.differential import step_check
from dpsgd.gradients.rules import AutomaticClipping, PerLayerClipping
from samplers import BallsAndBins, Deterministic, Poisson
from tests.dpsgd.audit.runtime.test_sums import BUGS, CLIP, KINDS, ROWS, B, N, loss_fn, mixed, of

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]


def found(algorithm, sampler=None, *, dtype=jnp.float32, seed=0, **of_mechanism):
    params = {"w": jnp.full(ROWS["x"].shape[1], 0.1, dtype), "b": jnp.zeros((), dtype)}
    mechanism = Mechanism(sampler or Deterministic(N, B), 1.0, CLIP, **of_mechanism)
    state = algorithm.init(params, mechanism, ROWS)
    root = RootKey.from_insecure_seed(seed)
    return step_check(Probe(algorithm, mechanism, state, ROWS, root=root))


@pytest.mark.short("none", "one row*", "padding is*", "a norm that*", "rows that*")
@pytest.mark.parametrize(("check", "change"), BUGS.values(), ids=BUGS)
def test_faulty_sums_differ_from_the_definition(check, change):
    result = found(of(change))
    assert result.made
    assert result.passed == (check is None), result


@pytest.mark.short("one example a batch")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_sound_steps_of_every_shape_equal_the_definition(kind):
    result = found(dpsgd(mixed, optax.sgd(0.1), microbatch_size=700), **kind)
    assert result.made, result
    assert result.passed, result


def test_padding_that_counts_unless_it_is_row_0_is_seen():
    sound = dpsgd(loss_fn, optax.sgd(0.1))

    def clipped_sum(params, batch, weights, scales):
        counted = jnp.any(batch["x"] != ROWS["x"][0], axis=1)
        return sound.clipped_sum(params, batch, jnp.where(counted, 1.0, weights), scales)

    assert not found(sound._replace(clipped_sum=clipped_sum)).passed


def keyed(params, example, key):
    kept = jax.random.bernoulli(key, 0.5, example["x"].shape)
    return loss_fn(params, example | {"x": example["x"] * kept})


def frozen(params, example):
    return loss_fn(params | {"b": jax.lax.stop_gradient(params["b"])}, example)


def rectified(params, example):
    return jax.nn.relu(loss_fn(params, example) - 0.7)


CYCLE = BallsAndBins(48, 4, 2, cycle_length=3, overflow="accumulate")
SOUND = {
    "loss key": (dpsgd(keyed, optax.sgd(0.1)), {}),
    "frozen leaf": (dpsgd(frozen, optax.sgd(0.1)), {}),
    "rectifier": (dpsgd(rectified, optax.sgd(0.1)), {}),
    "per-layer": (dpsgd(loss_fn, optax.sgd(0.1), clipping=PerLayerClipping(("w", "b"))), {}),
    "automatic": (dpsgd(loss_fn, optax.sgd(0.1), clipping=AutomaticClipping()), {}),
    "bands": (
        dpsgd(loss_fn, optax.sgd(0.1)),
        {"sampler": CYCLE, "noise": BandedToeplitz((1.0, 0.5))},
    ),
}


@pytest.mark.parametrize(("algorithm", "of_mechanism"), SOUND.values(), ids=SOUND)
def test_sound_steps_of_every_rule_equal_the_definition(algorithm, of_mechanism):
    result = found(algorithm, **of_mechanism)
    assert result.made, result
    assert result.passed, result


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_sound_networks_of_random_weights_are_never_refused(seed):
    rng = np.random.default_rng(seed)
    dtype = [jnp.float32, jnp.bfloat16][seed % 2]
    rows = {"x": rng.normal(size=(32, 8, 8)).astype(np.float32)}
    params = {
        "a": jnp.asarray(rng.normal(size=(64, 50)) / 8, dtype),
        "c": jnp.asarray(rng.normal(size=50) / 7, dtype),
    }

    def loss(params, example):
        hidden = jax.nn.relu(example["x"].ravel().astype(dtype) @ params["a"])
        return jnp.square(hidden @ params["c"] - 1).astype(jnp.float32)

    algorithm = dpsgd(loss, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(N, 20), 1.0, 10.0 ** rng.uniform(-3, 3))
    state = algorithm.init(params, mechanism, rows)
    result = step_check(Probe(algorithm, mechanism, state, rows))
    assert result.made, result
    assert result.passed, result
