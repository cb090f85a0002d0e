"""Sizes of the click model, and default settings of its runs, by rows, guarantee and time.

A command line needs them, without JAX arrays. Measurements: docs/explanation/results/models.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from accounting.records import Ge, Le, Record
from dpsgd.runs.recommendation import (
    RecommendationRequest,
    Settings,
    generic,
    table_step_size,
)


def check_power_of_two(what: str, value: int) -> None:
    """Raises ValueError unless `value` is a valid bucket count."""
    if not 1 <= value <= 1 << 30 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two between 1 and 2^30, got {value}")


@dataclass(frozen=True)
class ModelConfig(Record):
    """Sizes and loss of the click model; everything here is public."""

    embedding_dim: Annotated[int, Ge(0), Le(2**30)]
    """Length of the vector that stands for one categorical value; 0 in a linear model."""
    max_buckets: int
    """Largest number of hash buckets of a categorical feature, a power of two."""
    hidden: tuple[Annotated[int, Ge(1), Le(2**30)], ...]
    """Units of each hidden layer."""
    wide: bool = False
    """True to add a weight for each categorical value and number to the logit."""
    bins: Annotated[int, Ge(0), Le(2**30)] = 0
    """Pieces of the piecewise linear encoding of a number with public bounds; 0 for none."""
    huber: Annotated[float, Ge(0)] = 0.0
    """Residual of a numerical label, in its units, beyond which the loss is linear; 0 for none."""
    interaction: Literal["none", "dot", "cross"] = "none"
    """Interaction of the embeddings before the first layer, see `interactions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_power_of_two("max_buckets", self.max_buckets)
        if not self.embedding_dim and (self.interaction != "none" or not self.linear):
            raise ValueError(
                f"embedding_dim=0 is for the linear model, not for hidden={self.hidden} and "
                f"interaction={self.interaction}; set embedding_dim, or use the model linear"
            )

    @property
    def linear(self) -> bool:
        """True for a model of weights alone, without hidden layers."""
        return self.wide and not self.hidden


PRESETS = {
    # A weight for each categorical value and for each piece of a number's range.
    "linear": ModelConfig(embedding_dim=0, max_buckets=2**12, hidden=(), wide=True, bins=16),
    # Sized for some 100,000 rows and a CPU.
    "small": ModelConfig(embedding_dim=8, max_buckets=2**10, hidden=(64,)),
    # Both, which share the table of categorical values.
    "wide-and-deep": ModelConfig(8, max_buckets=2**12, hidden=(64,), wide=True, bins=16),
    # Three layers of 598 units, as in Chua et al. (2024), appendix C, and tables: 85 million
    # parameters of Criteo Display Ads, and, with vectors of 17, 57 million of Sponsored Search.
    "large": ModelConfig(embedding_dim=14, max_buckets=2**20, hidden=(598, 598, 598)),
}

DefaultPreset = Literal["linear", "small", "wide-and-deep"]
"""Presets that `preset_for` chooses among."""

WIDE_FROM = 75_000
"""Training rows times epsilon, equal in their effect, beyond which adding a network to the linear
model pays: with 26,000 and 27,000 rows at epsilon 3, and not at 1
(docs/explanation/results/models.md).
"""

MOST_EPSILON = 8.0
"""Largest epsilon that counts, also without privacy: a network memorises fewer rows."""


def preset_for(
    num_examples: int, epsilon: float = 1.0, *, network: bool = False, interaction: bool = False
) -> DefaultPreset:
    """Returns the default preset of a model.

    Args:
      num_examples: Number of training rows.
      epsilon: Epsilon of the run; infinity without privacy, 1 if unknown.
      network: True if sizes of a network are given.
      interaction: True if embeddings interact, so that a model without them is no choice.

    >>> preset_for(26_000), preset_for(30_000, 3.0), preset_for(26_000, network=True)
    ('linear', 'wide-and-deep', 'small')
    """
    if network:
        return "small"
    signal = num_examples * min(epsilon, MOST_EPSILON)
    return "linear" if signal < WIDE_FROM and not interaction else "wide-and-deep"


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
