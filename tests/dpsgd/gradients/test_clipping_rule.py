"""A clipping rule of one's own is a function, and the audit holds it to what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Diagnostics, Mechanism, dpsgd, train
from dpsgd.audit.audit import audit_program
from samplers import Poisson

pytestmark = pytest.mark.usefixtures("unoptimised")


def loss_fn(w, example):
    return jnp.square(w @ example["x"] - example["y"])


def normalised(params, batch, weights, scales):
    """Every gradient is brought near C, small ones too (Bu et al., NeurIPS 2023)."""
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
    norm = jnp.linalg.norm(grads, axis=1, keepdims=True)
    counts = (weights > 0)[:, None] & jnp.isfinite(norm)
    clip_norm = scales.l2_clip_norm * (1 - 1e-6)
    total = jnp.where(counts, grads * clip_norm / (norm + 0.01), 0).sum(0)
    return total, Diagnostics(0.0, 0.0, 0.0, (weights > 0).sum().astype(jnp.float32))


def test_a_rule_of_ones_own_passes_the_audit_and_trains():
    algorithm = dpsgd(loss_fn, optax.sgd(0.5))._replace(clipped_sum=normalised)
    x = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    data = {"x": x, "y": x[:, 0]}
    mechanism = Mechanism(Poisson(200, 20, 2), noise_multiplier=1.0, l2_clip_norm=0.5)
    assert audit_program(algorithm, mechanism, jnp.ones(5), data).passed
    w, _ = train(algorithm, mechanism, jnp.zeros(5), data, delta=1e-4, audit=False)
    assert abs(w[0] - 1) < 0.2 > np.abs(w[1:]).max()
