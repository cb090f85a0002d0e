"""A private quantile as clipping norm: its sums, its law and its path through a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    Independent,
    LazyTables,
    Mechanism,
    QuantileClipping,
    RootKey,
    Secure,
    dpsgd,
    train_blocks,
)
from dpsgd.audit.conformance import check_clipping
from dpsgd.core.algorithm import privatize
from dpsgd.engine import algorithm as engine
from dpsgd.gradients import norms, rules
from samplers import Deterministic, Poisson

RNG = np.random.default_rng(0)
ROWS = {"x": RNG.normal(size=(64, 5)).astype(np.float32) * RNG.gamma(2, size=(64, 1))}
ROWS["x"] = ROWS["x"].astype(np.float32)
PARAMS = {"w": jnp.zeros(5), "b": jnp.zeros(())}


def loss(params, example):
    return params["w"] @ example["x"] + params["b"]


def steps(rule, rate, *, sampler, noise_multiplier, clip=0.5):
    """Yields the state after each step."""
    mechanism = Mechanism(sampler, noise_multiplier, clip)
    algorithm = dpsgd(loss, optax.sgd(rate), clipping=rule)
    state = algorithm.init(PARAMS, mechanism)
    root = RootKey.from_insecure_seed(1)
    for block in train_blocks(algorithm, mechanism, state, ROWS, root=root, block_steps=1):
        yield jax.device_get(block.state)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_steps_are_those_of_gradients_clipped_to_a_norm_that_follows_the_quantile(quantile):
    sampler = Deterministic(64, 64, 60)  # of all examples
    rule = QuantileClipping(quantile, 0.3)
    gradients = np.concatenate([np.ones((64, 1)), ROWS["x"]], axis=1).astype(np.float64)
    lengths, clip, before = np.linalg.norm(gradients, axis=1), 0.5, np.zeros(6)
    for state in steps(rule, 1.0, sampler=sampler, noise_multiplier=1e-5):
        factor = np.minimum(1, clip / lengths)
        mean = (gradients * factor[:, None]).mean(axis=0)
        now = np.concatenate([[state.params["b"]], state.params["w"]])
        np.testing.assert_allclose(before - now, mean, atol=2e-4 * clip)
        before, share = now, (lengths > clip).mean()
        clip *= np.exp(0.3 * (share - (1 - quantile)))
        assert 0.5 * np.exp(state.raw_params.log_ratio) == pytest.approx(clip, rel=1e-3)
        clip = 0.5 * np.exp(np.float64(state.raw_params.log_ratio))
    assert abs((lengths <= clip).mean() - quantile) < 0.1


@pytest.mark.parametrize("share", [0.005, 0.01, 0.1, 0.5])
def test_count_and_sum_cost_together_what_a_sum_alone_costs(share):
    """Theorem 1: z_delta = (z^-2 - (2 z_b)^-2)^(-1/2), of a count of sensitivity 1/2."""
    z, (a, k) = 1.3, QuantileClipping(count_share=share).weights
    z_delta, z_b = z / a, z / (2 * k)
    assert z_delta**-2 + (2 * z_b) ** -2 <= z**-2
    assert z_delta == pytest.approx((z**-2 - (2 * z_b) ** -2) ** -0.5, rel=1e-6)


def not_divided(rule, group_norms, clip, counts):
    return [norms.clip_factor(group_norms[0], clip * jnp.exp(rule.log_ratio), counts)]


def divided_twice(rule, group_norms, clip, counts):
    factor = norms.clip_factor(group_norms[0], clip, counts, share=rule.rule.weights[0])
    return [factor._replace(target=factor.target * jnp.exp(-rule.log_ratio))]


def count_without_noise(total, state, key, step, scales, sound=privatize):
    gradient, state = sound(total, state, key, step, scales)
    return gradient._replace(log_ratio=total.log_ratio / scales.expected_batch_size), state


FAULTS = {
    "nothing": (None, None),
    "a count without noise": (engine, {"privatize": count_without_noise}),
    "a sum that is not divided by the norm": (rules._AtNorm, {"factors": not_divided}),
    "a sum that is divided by the norm after clipping": (
        rules._AtNorm,
        {"factors": divided_twice},
    ),
    "a count that weighs more": (QuantileClipping, {"weights": (np.sqrt(0.99), 0.2)}),
    "a sum of all of C": (QuantileClipping, {"weights": (1.0, 0.1)}),
    "a count of padding": (
        QuantileClipping,
        {"count": lambda rule, clipped, others, clip: clip * 0.1 * (clipped - others - 1)},
    ),
}


@pytest.mark.audit
@pytest.mark.mutants
@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_passes_what_is_sound_and_finds_each_fault(fault, monkeypatch):
    owner, parts = FAULTS[fault]
    for name, part in (parts or {}).items():
        monkeypatch.setattr(owner, name, part)
    algorithm = dpsgd(loss, optax.sgd(0.1), clipping=QuantileClipping())
    if fault == "nothing":
        check_clipping(algorithm, PARAMS, ROWS, l2_clip_norm=0.5, batch_size=16)
        return
    with pytest.raises(AssertionError, match="FAIL"):
        check_clipping(algorithm, PARAMS, ROWS, l2_clip_norm=0.5, batch_size=16)


def test_an_example_without_a_finite_gradient_counts_in_neither():
    total = {}
    algorithm = dpsgd(loss, optax.sgd(0.1), clipping=QuantileClipping())
    mechanism = Mechanism(Poisson(64, 4), 1.0, 0.5)
    params = algorithm.init(PARAMS, mechanism).raw_params
    for x in (np.nan, np.inf, 0.0):
        batch = {"x": np.full((4, 5), x, np.float32)}
        found, _ = algorithm.clipped_sum(params, batch, jnp.array([1, 1, 0, 0]), mechanism.scales())
        total[x] = float(found.log_ratio)
    assert total[np.nan] == total[np.inf] == 0
    assert total[0.0] == pytest.approx(2 * 0.1 * 0.5, rel=1e-6)  # clipped: the bias has norm 1


@pytest.mark.parametrize(
    ("tables", "noise", "line"),
    [(None, Secure(), r"takes Independent\(\) noise"), (LazyTables(0.1), None, "lazy tables")],
)
def test_what_has_no_proof_is_refused(tables, noise, line):
    def begin():
        algorithm = dpsgd(loss, optax.sgd(0.1), clipping=QuantileClipping(), tables=tables)
        algorithm.init(PARAMS, Mechanism(Poisson(64, 16), 1.0, 0.5, noise))

    with pytest.raises(ValueError, match=line):
        begin()


@dataclasses.dataclass(frozen=True)
class Own(Independent):
    """Noise that may do anything."""


def test_noise_of_ones_own_and_uncounted_batches_are_refused():
    algorithm = dpsgd(loss, optax.sgd(0.1), clipping=QuantileClipping())
    own = Mechanism(Poisson(64, 16), 1.0, 0.5, Own()).scales()
    state = algorithm.init(PARAMS)
    with pytest.raises(ValueError, match="takes Independent"):
        algorithm.update(state, state.raw_params, jax.random.key(0), own)
    passes = {"max_batch_size": 64, "overflow": "accumulate"}
    for many in (Poisson(2**26, 2**25), Poisson(2**26, 2**25, **passes)):
        with pytest.raises(ValueError, match=r"fewer than 2\^24 examples"):
            algorithm.init(PARAMS, Mechanism(many, 1.0, 0.5))
