"""The compiled step is DP-SGD as `reference_step` defines it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit.reference_step import reference_step
from dpsgd.core.noise import Independent
from dpsgd.gradients.rules import AutomaticClipping, FlatClipping, PerLayerClipping
from dpsgd.noise.correlated import BandedToeplitz
from samplers import BallsAndBins

KEY = np.array([0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89], np.uint32)
SAMPLER = BallsAndBins(num_examples=64, batch_size=8, epochs=2, cycle_length=4)
RULES = {
    "flat": FlatClipping(),
    "per-layer": PerLayerClipping(("dense", "bias"), (3.0, 1.0)),
    "automatic": AutomaticClipping(gamma=0.5),
}
NOISES = {"independent": Independent(), "banded": BandedToeplitz((1.0, 0.5, 0.25))}


def loss(params, row):
    hidden = jnp.tanh(row["x"] @ params["dense"])
    return optax.sigmoid_binary_cross_entropy(hidden.sum() + params["bias"], row["y"])


def keyed(params, row, key):
    dropped = jax.random.bernoulli(key, 0.5, row["x"].shape)
    return loss(params, {**row, "x": row["x"] * dropped})


def frozen(params, row):
    return loss({**params, "bias": jax.lax.stop_gradient(params["bias"])}, row)


def unit(params, rows):
    return jax.vmap(loss, (None, 0))(params, rows).sum()


def narrow(params, row):
    return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), row)


def rows_of(shape, scale):
    rng = np.random.default_rng(7)
    x = scale * rng.normal(size=(*shape, 5)).astype(np.float32)
    x[2] = np.nan
    return {"x": x, "y": rng.integers(0, 2, shape).astype(np.float32)}


CASES = {
    "plain": (loss, (12,), (), False),
    "loss key": (keyed, (12,), (), True),
    "frozen leaf": (frozen, (12,), (0,), False),
    "unit of rows": (unit, (12, 3), (), False),
    "bfloat16": (narrow, (12,), (), False),
}


COMBINATIONS = [(case, "flat", "independent") for case in CASES] + [
    ("plain", "flat", "banded"),
    ("plain", "per-layer", "independent"),
    ("unit of rows", "per-layer", "banded"),
    ("plain", "automatic", "independent"),
    ("frozen leaf", "automatic", "banded"),
]


@pytest.mark.short(
    "plain-flat-banded", "frozen leaf-automatic-banded", "unit of rows-per-layer-banded"
)
@pytest.mark.parametrize(("case", "rule", "noise"), COMBINATIONS)
def test_compiled_steps_equal_the_reference(case, rule, noise):
    loss_fn, shape, frozen_leaves, takes_key = CASES[case]
    rows = rows_of(shape, 3.0)
    weights = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    keys = jax.random.split(jax.random.key(3), 12) if takes_key else None
    of_loss = {"frozen": frozenset(frozen_leaves)} if frozen_leaves else {}
    params = {"bias": jnp.float32(0.1), "dense": jnp.full((5, 3), 0.2)}
    algorithm = dpsgd(loss_fn, optax.sgd(1.0), clipping=RULES[rule])
    clipped_sum = jax.jit(functools.partial(algorithm.clipped_sum, **of_loss))
    update = jax.jit(algorithm.update)
    digits = 2.0**-6 if case == "bfloat16" else 2.0**-13
    for clip_norm in (1e-2, 1.0, 1e3):
        mechanism = Mechanism(
            SAMPLER, noise_multiplier=0.7, l2_clip_norm=clip_norm, noise=NOISES[noise]
        )
        scales = mechanism.scales()
        state = algorithm.init(params, mechanism, rows)
        for step in range(3):
            of_rows = rows, weights, scales, *([keys] if takes_key else [])
            total, _ = clipped_sum(state.params, *of_rows)
            expected = reference_step(
                loss_fn,
                state.params,
                rows,
                weights,
                mechanism,
                KEY,
                step,
                clipping=RULES[rule],
                frozen=frozen_leaves,
                loss_keys=keys,
            )
            assert {k for k, leaf in enumerate(expected) if leaf is None} == set(frozen_leaves)
            state, gradient = update(state, total, KEY, scales)
            trained = [leaf for leaf in expected if leaf is not None]
            for actual, leaf in zip(jax.tree.leaves(gradient), trained, strict=True):
                atol = digits * clip_norm / SAMPLER.expected_batch_size
                np.testing.assert_allclose(actual, leaf, atol=atol, rtol=digits)
