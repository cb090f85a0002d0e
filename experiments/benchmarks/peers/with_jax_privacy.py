"""Logistic regression by jax_privacy, whose plan draws Poisson batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.batch_selection import pad_to_multiple_of
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig


def loss(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logits, y).mean()


def fit(work):
    n, d = work.x.shape
    steps, q = work.epochs * -(-n // work.batch_size), work.batch_size / n
    config = BandMFExecutionPlanConfig(
        strategy=[1.0],
        iterations=steps,
        epsilon=work.epsilon,
        delta=work.delta,
        l2_clip_norm=work.l2_clip_norm,
        rescale_to_unit_norm=False,
        normalize_by=work.batch_size,
        sampling_prob=q,
        noise_seed=work.seed,
    )
    plan, optimizer = config.plan, optax.adam(work.learning_rate)
    gradient = plan.clipped_grad(loss, batch_argnums=(1, 2))
    params = {"w": jnp.zeros(d), "b": jnp.zeros(())}
    noise_state = plan.noise_addition_transform.init(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, noise_state, state, x, y, padding):
        found = gradient(params, x, y, is_padding_example=padding)
        noised, noise_state = plan.noise_addition_transform.update(found, noise_state)
        updates, state = optimizer.update(noised, state)
        return optax.apply_updates(params, updates), noise_state, state

    for drawn in plan.batch_selection_strategy.batch_iterator(n, rng=work.seed):
        rows = pad_to_multiple_of(drawn, 256)
        batch = work.x[rows], work.y[rows], rows < 0
        params, noise_state, state = step(params, noise_state, state, *batch)
    event = plan.dp_event
    printed = config.accountant.compose(event).get_epsilon(work.delta)
    scores = work.test_x @ np.asarray(params["w"]) + float(params["b"])
    return scores, {
        "printed": printed,
        "sampler": "poisson",
        "noise_multiplier": event.event.event.noise_multiplier,
        "sampling_prob": q,
        "steps": steps,
    }
