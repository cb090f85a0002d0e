"""Logistic regression by this project."""

import jax.numpy as jnp
import numpy as np
import optax

from accounting import calibrate, epsilon
from dpsgd import Mechanism, dpsgd, train
from samplers import BallsAndBins


def loss(params, example):
    logit = example["x"] @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


def fit(work):
    n, d = work.x.shape
    sampler = BallsAndBins(n, batch_size=work.batch_size, epochs=work.epochs)
    sigma = calibrate(sampler.privacy, epsilon=work.epsilon, delta=work.delta)
    mechanism = Mechanism(sampler, sigma, l2_clip_norm=work.l2_clip_norm)
    algorithm = dpsgd(loss, optax.adam(work.learning_rate))
    start = {"w": jnp.zeros(d), "b": jnp.zeros(())}
    data = {"x": work.x, "y": work.y}
    params, _ = train(algorithm, mechanism, start, data, delta=work.delta)
    scores = work.test_x @ np.asarray(params["w"]) + float(params["b"])
    return scores, {
        "printed": epsilon(mechanism.privacy(), work.delta).upper,
        "sampler": "balls-and-bins",
        "noise_multiplier": sigma,
        "steps_per_epoch": sampler.steps_per_epoch,
        "epochs": work.epochs,
    }
