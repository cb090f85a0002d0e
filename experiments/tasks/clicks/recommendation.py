"""Settings for models of clicks, by the number of rows, the guarantee that is wanted, and time.

They were found on the validation rows of the public Criteo Display Ads sample, by log loss after
calibration: on 78,000 training rows and a tenth of them, at epsilon 1, 3 and 8, in 1 to 100 epochs
of batches of 128 to 8,192. Those of SGD were found by AUC on 88,000 rows, at 660 to 880 steps, with
noise that is independent and noise that is correlated over up to 22 steps: the best rates were the
same. For more rows, and for other data, these are laws drawn further than they were measured.
Without privacy, Adam's were found on Criteo, Adult and Bank: many small steps, and no row read
twice, as two passes of Criteo's 88,000 rows lose 0.012 of AUC, and three of 8,800 rows 0.06. Over
five splits of Adult and Bank the AUC on held-out rows is 0.892 +- 0.001 and 0.913 +- 0.002, and
with the noise of epsilon 8 it is 0.890 +- 0.002 and 0.906 +- 0.002; one pass of 300 steps has 0.866
on Bank. Of numbers alone a model has no tables to learn rows by heart, and gains in 30 passes:
0.974 +- 0.006 on the test rows of the breast cancer data, which has 455 to train on. Averages of
the iterates gain 0.0001 of AUC or log loss at most, as rates fall to zero. Where tables are lazy,
and so trained by SGD, all else is as where they are not, but for rates without privacy; momentum
0.9 is no better for them than none, and has twice their state.
To choose settings by private rows costs privacy, which the guarantee of a run does not cover.
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
"""By optimizer. Of Adam's, 50 are no better, and in 100 a model of epsilon 8 fits its training rows
by heart. Of SGD's, 20 are no better. Without privacy that begins with the second."""

USUAL_VISITS = 3_000_000
"""Rows that are read in all where no time is given: a minute or two on two cores
with the small model, and one epoch at least."""

L2_CLIP_NORM = 4.0
"""With less, logits grow so far that calibration does not mend them; with more, AUC is lower. Of
lazy tables too, where AUC with 2 is the same at its best rate."""

MOST_OF_TABLES = 40.0
"""Of 40 steps of 22,000 rows at epsilon 8 the best rate of lazy tables is 40: AUC is 0.753 on
validation rows, 0.750 at 20 and 0.740 at 80."""

TABLES_WITHOUT_NOISE = 20.0
"""In one epoch rates of 10 to 40 are alike, with AUC of 0.761 to 0.762 on validation rows beside
Adam's 0.7615; in 10 epochs about 4 is best, 0.759 beside 0.758, and 10 learns rows by heart."""


LINEAR = {"few": 2.0, "many": 3.5}
"""Clipping norm of linear models by their values: 0.4 of the longest gradient on Adult, Bank and
Criteo, the root of twice the number of columns. On Criteo with 3.5 in place of 2, over eight runs,
the log loss of validation rows is less by 0.0014 +- 0.0004, 0.0009 +- 0.0005 and 0.0015 +- 0.0003
at epsilon 1, 3 and 8, and AUC more by 0.0015 +- 0.0008, 0.0006 +- 0.0008 and 0.0013 +- 0.0004."""

MANY_VALUES = 2**16
"""Buckets of a category beyond which most of its values are rare: the weight of a rare value takes
up the noise of all steps, and little else."""

OF_FEW_VALUES = {"linear": 5.0, "wide": 2.0}
"""How much higher rates are where no category has many values, so that gradients, and not noise,
move most weights: on Adult and Bank, where linear models are alike from 0.02 to 0.06 of 540
steps, and lose 0.003 to 0.005 of AUC at 0.01; on Criteo they lose 0.005 at 0.012 of 660 steps."""

LITTLE_EPSILON = 0.7
"""Part of the rate of models with a weight for each of many values up to epsilon 1, as noise moves
the weights of rare ones: on Criteo linear models have an AUC of 0.7533 on validation rows with it,
and 0.7518 with all of the rate, wide and deep ones 0.7519 and 0.7504. At epsilon 3 linear ones are
alike, and at 8 all of it is better by 0.002; between, it is linear in log(epsilon)."""

MANY_WITHOUT_NOISE = {"linear": 1.5e-3, "wide": 2e-3}
"""Rates without privacy where models with a weight for each value have many. On Criteo's validation
rows linear models have an AUC of 0.7697 at 0.001, 0.7703 at 0.0015 and 0.7693 at 0.002; wide and
deep ones are alike there, and 0.006 loses 0.010."""

LINEAR_EPOCHS = {"few": 20, "many": 3}
"""Without privacy, of linear models by their values. Of many, three epochs have more AUC than one,
on 88,000 rows and on a tenth of them, and no less than five. Of few, AUC on the validation rows of
Adult and Bank is 0.9181 and 0.9154 in 10 epochs, 0.9180 and 0.9155 in 20, 0.9180 and 0.9154 in 30,
and log loss is least in 20 and in 30."""


def recommended(
    request: RecommendationRequest, sizes: ModelConfig = PRESETS["small"], most_buckets: int = 2**20
) -> Settings:
    """Returns the settings of a run on clicks or on a table.

    With a given noise multiplier epsilon follows from the settings, and they are equal for all
    noise and all samplers.

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
    """Returns the target epsilon, infinity without privacy, and 1 where noise is given.

    The settings are independent of a given noise multiplier.
    """
    if request.noise_multiplier is not None:
        return 1.0
    return math.inf if request.target_epsilon is None else request.target_epsilon


def _epochs(request: RecommendationRequest, most: int) -> int:
    # On 400,000 generated rows 10 epochs were better than 30: more rows want fewer.
    shrunk = min(1.0, 1e5 / request.num_examples) ** 0.5
    most = round(most * shrunk)
    return max(1, min(most, USUAL_VISITS // request.num_examples))


def _batch_size(n: int, epochs: int, request: RecommendationRequest) -> int:
    """Returns a power of two of which there are about 600 in the run.

    Without privacy there are 3,000, or 300 for lazy tables; SGD takes some more than 600 or 300.

    With noise, few large batches are as good as many small ones, and where the noise multiplier
    would be below 1 they are better.
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
    many = 17 * (8 / min(10.0, max(0.5, epsilon))) ** 0.4
    return 0.2 / math.hypot(1, epochs / many)


def _rate_of_sgd(steps: int, batch_size: int, epsilon: float | None) -> float:
    """Returns the learning rate at momentum 0.9.

    Times the number of steps it is equal for all batches and bands. Beyond an epsilon of 4
    gradients limit it, and not noise. A step of few rows is mostly noise and must be short: with
    125 rows 0.05 was the best tried.
    """
    if epsilon is None:
        return min(0.5, 180 / steps)
    return min(0.5, 90 * math.sqrt(min(epsilon, 4.0)) / steps, batch_size / 2000)
