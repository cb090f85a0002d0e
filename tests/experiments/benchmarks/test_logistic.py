"""Logistic regression is measured on bounded features, by both methods, at equal epsilon."""

import math

import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile, calibrate
from experiments.benchmarks import logistic
from experiments.tasks.clicks.task import Clicks


def test_features_are_bounded_by_public_numbers(store):
    task = Clicks(store)
    rows = task.columns()
    x = logistic.features(rows, task, 2, (0.0, 3.0))
    numbers, categories = len(task.schema.integers), len(task.schema.categories)
    assert x.shape == (len(rows["label"]), 1 + numbers + 2 * categories)
    assert ((x >= 0) & (x <= 1)).all()
    assert np.linalg.norm(x, axis=1).max() <= math.sqrt(1 + numbers + categories)
    present = np.asarray(rows["categories"]) > 0
    shown = x[:, 1 + numbers :].reshape(len(x), categories, 2)
    np.testing.assert_array_equal(shown.sum(-1), present)
    scaled = np.clip(rows["integers"] / 3.0, 0, 1) * ~rows["integers_missing"]
    np.testing.assert_allclose(x[:, 1 : 1 + numbers], scaled, rtol=1e-6)


N, D, R = 3_000, 4, 1.5
RNG = np.random.default_rng(0)
X = np.concatenate([np.ones((N, 1)), RNG.uniform(-0.6, 0.6, (N, D - 1))], axis=1)
X[:900] *= RNG.uniform(1, 9, (900, 1))
Y = RNG.random(N) < special.expit(X @ [-1.0, 2.0, 0.0, -3.0])


def test_newton_steps_without_noise_end_at_the_least_log_loss():
    bounded = X * np.minimum(1, R / np.linalg.norm(X, axis=1, keepdims=True))
    best = optimize.minimize(lambda theta: log_loss(theta, bounded), np.zeros(D)).x
    found = logistic.by_newton(X, Y, 1e5, R, 0)
    np.testing.assert_allclose(found, best, atol=0.02)


def test_noise_of_newton_steps_is_that_of_their_epsilon():
    n, epsilon = 500, 5.0
    x, y = np.ones((n, 1)), np.arange(n) % 2
    found = [logistic.by_newton(x, y, epsilon, 1.0, seed, 1) for seed in range(300)]
    sigma = calibrate(GaussianProfile, epsilon=epsilon, delta=1 / n)
    assert np.std(found) == pytest.approx(4 * sigma / n, rel=0.2)  # the curvature is 1 / 4


def log_loss(theta, x):
    return np.mean(np.logaddexp(0, x @ theta) - Y * (x @ theta))


@pytest.mark.long
def test_both_methods_are_measured_at_each_epsilon(store, monkeypatch):
    monkeypatch.setattr(logistic, "RATES", (0.1,))
    monkeypatch.setattr(logistic, "NORMS", (1.0,))
    monkeypatch.setattr(logistic, "BATCH", 64)
    monkeypatch.setattr(logistic, "EPOCHS", 1)
    rows = list(logistic.logistic(store=str(store), buckets=1, epsilons=(1.0,), seeds=2))
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) == 6
    assert sum("epsilon 1," in name for name in names) == 4
    assert all((row.error is None) == ("no privacy" in row.name) for row in rows)
    assert all(0 < row.value < 20 for row in rows)
