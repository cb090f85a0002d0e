"""Where JAX is set to 64 bits, what is private is the same program of 32, bit for bit."""

import functools
import warnings

import jax
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd, train
from dpsgd.gradients.clipping import clipped_grad
from samplers import BallsAndBins, Poisson

SAMPLERS = {
    "device": BallsAndBins(40, 8, 2),
    "host": Poisson(40, 8, 2, overflow="accumulate", max_batch_size=3),
}


def data():
    """Columns as NumPy makes them: float64 and int64."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    return {"x": x, "y": x.sum(axis=1), "group": np.arange(40) % 3}


def loss(params, example, key):
    drawn = jax.random.bernoulli(key, 0.9, (3,))
    return ((example["x"] * drawn) @ params["w"] * 2.5 - example["y"]) ** 2 + example["group"]


def trained(data_on, columns, *, audit=False, dtype=np.float32, **law):
    mechanism = Mechanism(SAMPLERS[data_on], 1.0, 1.0, **law)
    start = {"w": np.zeros(3, dtype)}
    # A loss of its own is compiled anew.
    algorithm = dpsgd(functools.partial(loss), optax.adam(optax.cosine_decay_schedule(0.1, 10)))
    how = {"insecure_seed": 1, "data_on": data_on, "audit": audit}
    return train(algorithm, mechanism, start, columns, **how).params["w"]


def a_sum():
    rows = data()["x"].astype(np.float32)
    gradient = jax.jit(clipped_grad(lambda params, x: (x @ params) ** 2, l2_clip_norm=1.0))
    return gradient(rows[0], rows, np.ones(40, np.float32))[0]


WAYS = {
    "device": lambda: trained("device", data()),
    "arrays of JAX": lambda: trained("device", jax.device_put(data())),
    "a sum": a_sum,
    "host": lambda: trained("host", data()),
    "audited": lambda: trained("host", data(), audit=True),
}


def bits(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a seed gives no guarantee
        return np.asarray(WAYS[way]()).tobytes()


@pytest.mark.short("device")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_64_bits_has_the_bits_that_it_has_in_32(way):
    expected = bits(way)
    with jax.enable_x64(True):
        assert jax.numpy.zeros(1).dtype == np.float64
        assert bits(way) == expected


def test_parameters_of_64_bits_are_refused_in_one_line():
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"the parameters.*are float64") as why,
    ):
        trained("device", data(), dtype=np.float64)
    assert "\n" not in str(why.value)
