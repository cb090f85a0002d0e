"""The tests of the noise's law are calibrated, and each sees what it is there for.

Every test here fails by chance once in a million times, and seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpsgd import Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import correlation_pvalue, variance_pvalue
from dpsgd.audit.runtime.blocks import STEPS, block_checks
from dpsgd.audit.runtime.noise import FULL, noise_checks
from dpsgd.engine.feed import Layout
from samplers import Poisson

pytestmark = pytest.mark.audit


def correlation(draws):
    other = np.linspace(-1, 2, draws.size)
    return correlation_pvalue(draws @ other / np.sqrt(draws @ draws * (other @ other)), draws.size)


@pytest.mark.parametrize("size", [2, 3, 100])
@pytest.mark.parametrize(
    "pvalue",
    [lambda draws: variance_pvalue(draws @ draws, draws.size), correlation],
    ids=["variance", "correlation"],
)
def test_p_values_of_normal_draws_are_uniform(pvalue, size):
    rng = np.random.default_rng(1)
    found = [pvalue(rng.normal(size=size)) for _ in range(2_000)]
    assert stats.kstest(found, "uniform").pvalue > 1e-6


def loss_fn(params, example):
    return jnp.dot(params["w"], example)


def loss_of_a_key(params, example, key):
    return jnp.dot(params["w"], example * jax.random.bernoulli(key, 0.5, (40,)))


SAMPLER = Poisson(60, 6, 2)
KINDS = {
    "a loss that takes keys": (loss_of_a_key, Mechanism(SAMPLER, 0.05, 0.5)),
    "hardly any noise": (loss_fn, Mechanism(SAMPLER, 2.0**-20, 0.5)),
    "next to the least C": (loss_fn, Mechanism(SAMPLER, 2.0, 2.0**-95)),
}


def loss_of_a_number(params, example):
    return (params["b"] * example.astype(params["b"].dtype)).astype(jnp.float32)


def test_noise_of_a_single_bfloat16_number_passes_whatever_the_root():
    """A release whose sum and noise cancel has little rounding, and the other one has much."""
    algorithm, mechanism = dpsgd(loss_of_a_number, optax.sgd(0.1)), Mechanism(SAMPLER, 1.0, 0.5)
    state = algorithm.init({"b": jnp.ones((), jnp.bfloat16)}, mechanism)
    rows = np.resize(np.array([1, -1], np.float32), 20)
    for seed in range(100):
        program = Probe(algorithm, mechanism, state, rows, root=RootKey.from_insecure_seed(seed))
        checks = noise_checks(program)
        assert all(check.passed for check in checks), (seed, checks)


@pytest.mark.short("hardly any noise", "next to the least C")
@pytest.mark.parametrize(("loss", "mechanism"), KINDS.values(), ids=KINDS)
def test_sound_noise_of_every_kind_passes_and_what_was_not_seen_is_told(loss, mechanism):
    algorithm = dpsgd(loss, optax.sgd(0.1))
    rows = np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)
    program = Probe(
        algorithm,
        mechanism,
        algorithm.init({"w": jnp.zeros(40)}, mechanism),
        rows,
        layout=Layout.choose(SAMPLER, np.zeros((60, 40), np.float32), block_steps=8),
        root=RootKey.from_insecure_seed(0),
    )
    checks = noise_checks(program) + block_checks(program)
    assert all(check.passed for check in checks), checks
    left_out = [check.name for check in checks if not check.made]
    too_little_room = mechanism.l2_clip_norm < 2.0**-90
    assert left_out == too_little_room * [FULL, STEPS]
