"""Logistic regression at equal epsilon: by noised Newton steps, and by DP-SGD in balls and bins."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from accounting import calibrate
from dpsgd import Mechanism, RootKey, dpsgd, train
from dpsgd.engine.newton import derivatives, hessian_weight, newton_step
from experiments.benchmarks.case import Estimate, Row, figure
from experiments.tasks.clicks.metrics import BinaryMetrics, binary_metrics
from experiments.tasks.clicks.task import Clicks
from samplers import BallsAndBins, FullBatch

RATES = 0.03, 0.1, 0.3, 1.0
NORMS = 1.0, 3.0, 10.0
"""Of DP-SGD by Adam: the pair is taken that is best on validation rows, at no cost in privacy."""
BATCH, EPOCHS = 2_048, 20
CURVATURE = 0.5
"""Least curvature of a Newton step, in units of the Hessian's noise; chosen on public data."""

Columns = dict[str, np.ndarray]


def features(rows: Columns, task: Clicks, buckets: int, bounds: tuple[float, ...]) -> np.ndarray:
    """Returns bounded features of rows: 1, numbers in [0, 1], and a 1 for each category's bucket.

    All is public: the bounds, and the hash to so many buckets; a missing value is 0.
    """
    count = len(rows["label"])
    low, high = np.resize(bounds, (len(task.schema.integers), 2)).T
    numbers = np.clip((np.asarray(rows["integers"], np.float32) - low) / (high - low), 0, 1)
    numbers = np.where(rows["integers_missing"], 0, numbers)
    ids = np.asarray(task.schema.fold(np.asarray(rows["categories"]), buckets))
    shown = ids[..., None] == np.arange(1, buckets + 1)
    parts = np.ones((count, 1)), numbers, shown.reshape(count, -1)
    return np.concatenate(parts, axis=1).astype(np.float32)


def loss(params: Any, row: Any) -> jax.Array:
    """Returns the log loss of a row, in nats."""
    return optax.sigmoid_binary_cross_entropy(jnp.sum(params * row["x"]), row["y"])


def by_steps(
    x: np.ndarray, y: np.ndarray, epsilon: float, tuned: tuple[float, float], seed: int
) -> np.ndarray:
    """Returns coefficients by DP-SGD, with a rate and a clipping norm."""
    rate, norm = tuned
    sampler = BallsAndBins(len(y), BATCH, EPOCHS)
    rates = optax.cosine_decay_schedule(rate, sampler.num_steps)
    found = train(
        dpsgd(loss, optax.adam(rates)),
        Mechanism(sampler, _sigma(sampler, epsilon), norm),
        jnp.zeros(x.shape[1]),
        {"x": x, "y": y},
        root=RootKey.from_insecure_seed(seed),
        audit=False,
    )
    return np.asarray(found.params, np.float64)


def by_newton(
    x: np.ndarray, y: np.ndarray, epsilon: float, bound: float, seed: int, steps: int = 6
) -> np.ndarray:
    """Returns coefficients by noised Newton steps, each from one noisy sum over all rows.

    Args:
      x: Features, float32[n, d].
      y: Labels, 0 or 1, [n].
      epsilon: Epsilon of all steps together, at delta 1 / n.
      bound: Public bound of the rows' L2 norm, to which longer rows are shortened.
      seed: Seed of the noise.
      steps: Number of Newton steps.

    Source: docs/explanation/private-calibration.md.
    """
    (n, d), rng = x.shape, np.random.default_rng(seed)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), bound)
    i, j = np.triu_indices(d)
    weights = hessian_weight(1.0) * np.where(i == j, 1, math.sqrt(2))
    noise = _sigma(FullBatch(n, steps), epsilon) / n  # of one coordinate of the mean
    least = max(CURVATURE * noise * math.sqrt(d) / 2, 1e-6)
    theta = np.zeros(d)
    for _ in range(steps):
        p = special.expit(x @ theta)
        hessian = (x.T * (p * (1 - p))) @ x
        mean = np.concatenate([x.T @ (p - y), weights * hessian[i, j]]) / n
        mean += noise * rng.normal(size=mean.size)
        theta += np.asarray(newton_step(*derivatives(jnp.asarray(mean), d, 1.0), least))
    return theta / bound


@functools.cache
def _sigma(sampler: BallsAndBins | FullBatch, epsilon: float) -> float:
    return calibrate(sampler.privacy, epsilon=epsilon, delta=1 / sampler.num_examples)


def logistic(
    *,
    store: str | None = None,
    buckets: int = 4,
    bounds: tuple[float, ...] = (0.0, 10.0),
    epsilons: tuple[float, ...] = (0.3, 1.0, 3.0, 8.0),
    seeds: int = 5,
) -> Iterator[Row]:
    """Measures both on test rows of a store, at delta 1 / n; noise is seeded, to be repeated."""
    assert store is not None, "the case needs --store"
    task = Clicks(Path(store))
    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for split in ("train", "validation", "test"):
        blocks = list(task.read(Path(store), split=split))
        rows = {k: np.concatenate([block[k] for block in blocks]) for k in blocks[0]}
        x = features(rows, task, buckets, bounds)
        parts[split] = x, np.asarray(rows["label"], np.float32)
    x, y = parts["train"]
    most = math.sqrt(1 + len(task.schema.integers) + len(task.schema.categories))

    def quality(theta: np.ndarray, split: str) -> BinaryMetrics:
        x, y = parts[split]
        return binary_metrics(x @ theta, y)

    def shown(name: str, fitted: Callable[[int], np.ndarray], count: int = seeds) -> Iterator[Row]:
        found = [quality(fitted(seed), "test") for seed in range(count)]
        for key, title in (("auc", "AUC"), ("log_loss", "log loss")):
            yield figure(f"{title}, {name}", Estimate.mean([getattr(one, key) for one in found]))

    def newton(epsilon: float, seed: int, steps: int = 6) -> np.ndarray:
        return by_newton(x, y, epsilon, most, seed, steps)

    of = f"{len(y):,} rows, {x.shape[1]} features"
    yield from shown(f"no privacy, {of}", lambda seed: newton(1e6, seed, 20), 1)
    for epsilon in epsilons:
        at = f"epsilon {epsilon:g}, {of}"
        yield from shown(f"noised Newton steps, {at}", functools.partial(newton, epsilon))

        steps = functools.partial(by_steps, x, y, epsilon)
        tried = itertools.product(RATES, NORMS)
        best = max(tried, key=lambda one: quality(steps(one, 0), "validation").auc)
        name = f"DP-SGD, rate {best[0]:g}, C {best[1]:g}, {at}"
        yield from shown(name, functools.partial(steps, best))
