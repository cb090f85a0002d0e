"""Sizes of the click model, without JAX arrays: a command line needs none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and loss of the click model; everything here is public."""

    embedding_dim: int
    """Length of the vector that stands for one categorical value; 0 in a linear model."""
    max_buckets: int
    """Largest number of hash buckets of a categorical feature, a power of two."""
    hidden: tuple[int, ...]
    """Units of each hidden layer."""
    wide: bool = False
    """True to add a weight for each categorical value and number to the logit."""
    bins: int = 0
    """Pieces of the piecewise linear encoding of a number with public bounds; 0 for none."""
    huber: float = 0.0
    """Residual of a numerical label, in its units, beyond which the loss is linear; 0 for none."""
    interaction: Literal["none", "dot", "cross"] = "none"
    """Interaction of the embeddings before the first layer, see `interactions`."""

    def __post_init__(self) -> None:
        for name, sizes, low in (
            ("embedding_dim", (self.embedding_dim,), 0 if self.linear else 1),
            ("hidden", self.hidden, 1),
            ("bins", (self.bins,), 0),
        ):
            if not all(low <= size <= 1 << 30 for size in sizes):
                raise ValueError(f"{name}: each size must be in [{low}, 2^30], got {list(sizes)}")
        check_power_of_two("max_buckets", self.max_buckets)
        if self.interaction != "none" and not self.embedding_dim:
            raise ValueError(
                f"interaction={self.interaction} needs embeddings, and the linear model has none; "
                "use another model, or set embedding_dim"
            )
        if not 0 <= self.huber < math.inf:
            raise ValueError(f"huber must be finite and >= 0, got {self.huber}")

    @property
    def linear(self) -> bool:
        """True for a model of weights alone, without hidden layers."""
        return self.wide and not self.hidden


def check_power_of_two(what: str, value: int) -> None:
    """Raises ValueError unless `value` is a valid bucket count."""
    if not 1 <= value <= 1 << 30 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two between 1 and 2^30, got {value}")


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
