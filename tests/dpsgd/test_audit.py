"""The coupled audit passes sound training and catches training that costs more than its price."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit import coupled_audit
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle

N = 200
SAMPLERS = {
    "deterministic": Deterministic(N, 10, 2),
    "shuffle": Shuffle(N, 10, 2),
    "poisson": Poisson(N, 10, 2),
    "balls-and-bins": BallsAndBins(N, 10, 2),
}


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


def audit(sampler, *, mutate=lambda algorithm: algorithm, claimed=None):
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(N, 50)).astype(np.float32),
        "y": rng.integers(0, 2, N).astype(np.float32),
    }
    params = {"w": jnp.full(50, 0.1), "b": jnp.zeros(())}
    mechanism = Mechanism(sampler, noise_multiplier=1.0, l2_clip_norm=0.5)
    return coupled_audit(
        lambda optimizer: mutate(dpsgd(loss_fn, optimizer, mechanism)),
        params,
        data,
        claimed=claimed,
    )


def half_noise(algorithm):
    def update(state, total, key, scales):
        scales = scales._replace(noise_stddev=scales.noise_stddev / 2)
        return algorithm.update(state, total, key, scales)

    return algorithm._replace(update=update)


def one_noise_for_all_steps(algorithm):
    def update(state, total, key, scales):
        first = algorithm.update(state._replace(step=0 * state.step), total, key, scales)
        return first._replace(step=state.step + 1)

    return algorithm._replace(update=update)


def padding_counted(algorithm):
    def clipped_sum(params, batch, weights, scales):
        return algorithm.clipped_sum(params, batch, jnp.ones_like(weights), scales)

    return algorithm._replace(clipped_sum=clipped_sum)


def clipped_too_loosely(algorithm):
    def clipped_sum(params, batch, weights, scales):
        loose = scales._replace(l2_clip_norm=2 * scales.l2_clip_norm)
        return algorithm.clipped_sum(params, batch, weights, loose)

    return algorithm._replace(clipped_sum=clipped_sum)


def divided_by_the_realised_size(algorithm):
    def clipped_sum(params, batch, weights, scales):
        total, diagnostics = algorithm.clipped_sum(params, batch, weights, scales)
        factor = scales.expected_batch_size / jnp.maximum(weights.sum(), 1)
        return jax.tree.map(lambda leaf: leaf * factor, total), diagnostics

    return algorithm._replace(clipped_sum=clipped_sum)


@pytest.mark.audit
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_sound_training_passes(sampler):
    report = audit(sampler)
    assert report.passed, report.lines()


@pytest.mark.mutants
@pytest.mark.parametrize(
    "mutate",
    [
        half_noise,
        one_noise_for_all_steps,
        padding_counted,
        clipped_too_loosely,
        divided_by_the_realised_size,
    ],
)
def test_broken_training_is_caught(mutate):
    assert not audit(SAMPLERS["poisson"], mutate=mutate).passed


@pytest.mark.mutants
@pytest.mark.parametrize("sampler", ["deterministic", "shuffle", "balls-and-bins"])
def test_other_batches_claimed_as_poisson_are_caught(sampler):
    assert not audit(SAMPLERS[sampler], claimed=SAMPLERS["poisson"]).passed


@pytest.mark.mutants
def test_fixed_bins_claimed_as_redrawn_are_caught():
    fixed = BallsAndBins(N, 10, 2, assignment="fixed")
    assert audit(fixed).passed
    assert not audit(fixed, claimed=SAMPLERS["balls-and-bins"]).passed
