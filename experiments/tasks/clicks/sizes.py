"""Sizes of the click model. No array is made of them here: a command line reads no JAX."""

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
    """Hash buckets of a categorical feature, at most; a power of two."""
    hidden: tuple[int, ...]
    """Units of each hidden layer."""
    wide: bool = False
    """Whether categorical values and numbers have weights of their own in the logit."""
    bins: int = 0
    """Pieces of the piecewise linear encoding of a number with public bounds; 0 for none."""
    huber: float = 0.0
    """Residual of a label that is a number, in its units, from which on the loss is a line."""

    def __post_init__(self) -> None:
        for name, sizes, low in (
            ("embedding_dim", (self.embedding_dim,), 0 if self.linear else 1),
            ("hidden", self.hidden, 1),
            ("bins", (self.bins,), 0),
        ):
            if not all(low <= size <= 1 << 30 for size in sizes):
                raise ValueError(f"{name}: each size lies in [{low}, 2^30], got {list(sizes)}")
        check_power_of_two("max_buckets", self.max_buckets)
        if not 0 <= self.huber < math.inf:
            raise ValueError(f"huber must be finite and >= 0, got {self.huber}")

    @property
    def linear(self) -> bool:
        """Whether weights of categorical values and of numbers are all that there is."""
        return self.wide and not self.hidden


def check_power_of_two(what: str, value: int) -> None:
    """Raise ValueError, which begins with `what`, unless `value` is one that tables can have."""
    if not 1 <= value <= 1 << 30 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two between 1 and 2^30, not {value}")


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

WIDE_FROM = 75_000
"""Training rows times epsilon, in which noise and rows count alike, from which on a network that is
added to the linear model is as good or better: of 26,000 and 27,000 rows at epsilon 3, and not at
1 (docs/explanation/results/models.md)."""

MOST_EPSILON = 8.0
"""That counts, without privacy too: of fewer rows a network learns them by heart."""


def preset_for(
    num_examples: int, epsilon: float = 1.0, *, network: bool = False
) -> Literal["linear", "small", "wide-and-deep"]:
    """Returns the preset where none is given, and whether sizes of a network are.

    Args:
      num_examples: Training rows.
      epsilon: Of the run; infinity without privacy, 1 where it is not known.
      network: Whether sizes of a network are given.

    >>> preset_for(26_000), preset_for(30_000, 3.0), preset_for(26_000, network=True)
    ('linear', 'wide-and-deep', 'small')
    """
    if network:
        return "small"
    signal = num_examples * min(epsilon, MOST_EPSILON)
    return "linear" if signal < WIDE_FROM else "wide-and-deep"
