"""Where JAX is set to 64 bits, what is private is the same program of 32, bit for bit."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, RootKey, dpsgd, train
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


ALGORITHM = dpsgd(loss, optax.adam(optax.cosine_decay_schedule(0.1, 10)))


def trained(data_on, columns, *, audit=False, dtype=np.float32, **law):
    mechanism = Mechanism(SAMPLERS[data_on], 1.0, 1.0, **law)
    root = RootKey.from_insecure_seed(1)
    start = {"w": np.zeros(3, dtype)}
    how = {"root": root, "data_on": data_on, "audit": audit}
    return train(ALGORITHM, mechanism, start, columns, **how).params["w"]


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


def results(ways):
    """The bits of what is trained in each of these ways."""
    warnings.simplefilter("ignore")  # that a seed gives no guarantee
    return {way: np.asarray(WAYS[way]()).tobytes().hex() for way in ways}


DRIVER = """
import json, sys
import numpy as np
import jax
from test_double_precision import data, results, trained

assert jax.numpy.zeros(1).dtype == np.float64
found = results(sys.argv[1:])
try:
    trained("device", data(), dtype=np.float64)
except ValueError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "ways",
    [
        ("device", "arrays of JAX", "a sum"),
        pytest.param(("host", "audited"), marks=pytest.mark.long),
    ],
)
def test_in_64_bits_a_run_has_the_bits_that_it_has_in_32(ways):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *ways],
        check=True,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "JAX_ENABLE_X64": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (here, here.parents[2]))),
        },
    )
    found = json.loads(done.stdout)
    why = found.pop("refused")
    assert found == results(ways)
    assert why.startswith("the parameters['w'] are float64")
    assert "\n" not in why
