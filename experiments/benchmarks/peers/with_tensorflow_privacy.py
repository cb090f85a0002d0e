"""Logistic regression by TensorFlow Privacy; Keras draws a new order of the rows each epoch."""

import re

import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.analysis.compute_noise_from_budget_lib import compute_noise


def fit(work):
    tf.keras.utils.set_random_seed(work.seed)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    n, d = work.x.shape
    wanted = work.epsilon, work.epochs, work.delta
    sigma = compute_noise(n, work.batch_size, *wanted, noise_lbd=0.3)
    optimizer = tensorflow_privacy.VectorizedDPKerasAdamOptimizer(
        l2_norm_clip=work.l2_clip_norm,
        noise_multiplier=sigma,
        learning_rate=work.learning_rate,
    )
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(d,))])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer=optimizer, loss=loss)
    y = work.y[:, None]
    model.fit(work.x, y, batch_size=work.batch_size, epochs=work.epochs, verbose=0)
    statement = tensorflow_privacy.compute_dp_sgd_privacy_statement(
        number_of_examples=n,
        batch_size=work.batch_size,
        num_epochs=work.epochs,
        noise_multiplier=sigma,
        delta=work.delta,
        used_microbatching=False,
    )
    once, poisson = re.findall(r"Epsilon .*:\s+([\d.]+)", statement)
    return model.predict(work.test_x, verbose=0), {
        "printed": float(poisson),
        "printed_once_an_epoch": float(once),
        "sampler": "shuffle",
        "noise_multiplier": sigma,
        "steps_per_epoch": -(-n // work.batch_size),
        "epochs": work.epochs,
    }
