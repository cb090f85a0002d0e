"""Default settings of models of clicks, by rows, guarantee and time.

Measurements: docs/explanation/results/models.md.
"""

from __future__ import annotations

import dataclasses
import math

from dpsgd.runs.recommendation import (
    RecommendationRequest,
    Settings,
    generic,
    table_step_size,
)
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig

MOST_EPOCHS = {"adam": 30, "sgd": 10}
"""Most epochs of a private run, by optimizer."""

USUAL_VISITS = 3_000_000
"""Rows read in all by default: one or two minutes on two cores with the small model."""

L2_CLIP_NORM = 4.0
"""Clipping norm of networks."""

MOST_OF_TABLES = 40.0
"""Largest learning rate of lazy tables with noise."""

TABLES_WITHOUT_NOISE = 20.0
"""Learning rate of lazy tables without noise, in one epoch."""

LINEAR = {"few": 2.0, "many": 3.5}
"""Clipping norm of linear models, by the number of their values."""

MANY_VALUES = 2**16
"""Buckets of a category beyond which most of its values are rare."""

OF_FEW_VALUES = {"linear": 5.0, "wide": 2.0}
"""Factor of the learning rate if no category has many values, by model."""

LITTLE_EPSILON = 0.7
"""Factor of the learning rate up to epsilon 1 for a weight per value of categories with many."""

MANY_WITHOUT_NOISE = {"linear": 1.5e-3, "wide": 2e-3}
"""Learning rate without privacy for a weight per value of categories with many."""

LINEAR_EPOCHS = {"few": 20, "many": 3}
"""Epochs of linear models without privacy, by the number of their values."""


def recommended(
    request: RecommendationRequest, sizes: ModelConfig = PRESETS["small"], most_buckets: int = 2**20
) -> Settings:
    """Returns the settings of a run on a table.

    If the noise multiplier is given, they depend neither on it nor on the sampler.

    Args:
      request: Size, target and choices of the run.
      sizes: Sizes of the model.
      most_buckets: Largest declared bucket count of a category; 0 for a table of numbers alone.

    >>> found = recommended(RecommendationRequest(88_000, 1e-5, target_epsilon=8.0))
    >>> found.batch_size, found.epochs, found.l2_clip_norm, found.learning_rate
    (4096, 30, 4.0, 0.0038)
    """
    if request.noise_multiplier is not None:
        return generic(request)
    n, categories = request.num_examples, most_buckets > 0
    epsilon = epsilon_of(request) if request.private else None
    few = most_buckets <= MANY_VALUES
    by_heart = categories and not (sizes.linear and few)  # a row that is read again is learned
    most = MOST_EPOCHS[request.optimizer]
    if not request.private and (categories or request.optimizer == "sgd"):
        linear = sizes.linear and request.optimizer == "adam"
        most = LINEAR_EPOCHS["few" if few else "many"] if linear else 1
    epochs = request.epochs or _epochs(request, most)
    batch_size = request.batch_size or min(n, _batch_size(n, epochs, request))
    steps = math.ceil(n / batch_size) * epochs
    if request.optimizer == "sgd":
        rate = _rate_of_sgd(steps, batch_size, epsilon) * (1 - request.momentum) / 0.1
    elif epsilon is None and not by_heart:
        rate = 6e-3
    elif epsilon is None and sizes.wide and not few and request.tables == "dense":
        rate = MANY_WITHOUT_NOISE["linear" if sizes.linear else "wide"]
    elif epsilon is None:
        rate = 6e-3 / epochs**1.5 if request.tables == "dense" else 2e-2 / epochs**2
    else:
        rate = _distance(epochs, epsilon) / math.sqrt(steps)
        if sizes.wide and few:
            rate *= OF_FEW_VALUES["linear" if sizes.linear else "wide"]
        elif sizes.wide and request.tables == "dense":
            much = min(1.0, max(0.0, math.log(epsilon) / math.log(3)))
            rate *= LITTLE_EPSILON + (1 - LITTLE_EPSILON) * much
    norm = LINEAR["few" if few else "many"] if sizes.linear else L2_CLIP_NORM
    settings = Settings(batch_size, epochs, norm, float(f"{rate:.2g}"))
    if request.tables == "dense":
        return settings
    limits = {"most": MOST_OF_TABLES, "without_noise": TABLES_WITHOUT_NOISE / epochs**0.6}
    return dataclasses.replace(
        settings, tables_learning_rate=table_step_size(request, settings, **limits)
    )


def epsilon_of(request: RecommendationRequest) -> float:
    """Returns the epsilon that the settings assume.

    It is the target epsilon; infinity without privacy; and 1 for a given noise multiplier.
    """
    if request.noise_multiplier is not None:
        return 1.0
    return math.inf if request.target_epsilon is None else request.target_epsilon


def _epochs(request: RecommendationRequest, most: int) -> int:
    shrunk = min(1.0, 1e5 / request.num_examples) ** 0.5
    most = round(most * shrunk)
    return max(1, min(most, USUAL_VISITS // request.num_examples))


def _batch_size(n: int, epochs: int, request: RecommendationRequest) -> int:
    """Returns a power of two: about 600 batches a run with noise, 3,000 or 300 without.

    Lazy tables without noise take 300 batches; SGD takes 1.5 times the number. With noise, few
    large batches match many small ones, and are better if the noise multiplier would be below 1.
    """
    steps, least, most = (600, 32, 32_768) if request.private else (300, 32, 1024)
    if request.optimizer == "sgd":
        steps += steps // 2
    elif not request.private and request.tables == "dense":
        steps, least = 3000, 4
    return 2 ** round(math.log2(min(most, max(least, n * epochs / steps))))


def _distance(epochs: int, epsilon: float) -> float:
    """Returns the learning rate times the root of the number of steps.

    It is equal for all batches: if noise outweighs gradients, Adam's steps are a random walk, and
    this is its length. It is shorter for many epochs, the sooner the less noise.
    """
    long_run = 17 * (8 / min(10.0, max(0.5, epsilon))) ** 0.4  # epochs
    return 0.2 / math.hypot(1, epochs / long_run)


def _rate_of_sgd(steps: int, batch_size: int, epsilon: float | None) -> float:
    """Returns the learning rate at momentum 0.9.

    Times the number of steps it is equal for all batches and bands. Beyond an epsilon of 4
    gradients limit it, and not noise. A step of few rows is mostly noise and must be short: with
    125 rows 0.05 was the best tried.
    """
    if epsilon is None:
        return min(0.5, 180 / steps)
    return min(0.5, 90 * math.sqrt(min(epsilon, 4.0)) / steps, batch_size / 2000)
