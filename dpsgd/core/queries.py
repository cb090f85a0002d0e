"""Full-batch queries: noisy sums over all rows after a run's last step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting import GaussianProfile
from accounting.checks import check_noise_multiplier


@dataclass(frozen=True)
class FullSums:
    """k releases, each a noisy sum over all rows of one clipped vector.

    An example has one vector of norm at most C in each sum, so that all k cost the same as one
    Gaussian release of sensitivity 1 with noise sigma / sqrt(k), even if a vector depends on
    earlier releases (`samplers.FullBatch`); the cost composes with the run's steps.

    >>> print(FullSums(5, 20.0))
    5 noisy sums over all rows (noise multiplier 20, clipping norm 1)

    Attributes:
      count: Number k >= 1 of sums.
      noise_multiplier: Standard deviation sigma > 0 of a sum's noise, in units of C.
      l2_clip_norm: Bound C > 0 on the L2 norm of an example's vector.
    """

    count: int
    noise_multiplier: float
    l2_clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"full_sums: count must be an integer >= 1, got {self.count!r}")
        check_noise_multiplier(self.noise_multiplier)
        if not 0.0 < self.l2_clip_norm < math.inf:
            raise ValueError(f"l2_clip_norm must be finite and > 0, got {self.l2_clip_norm}")

    def __str__(self) -> str:
        """Returns the description in words."""
        terms = f"noise multiplier {self.noise_multiplier:.6g}, clipping norm {self.l2_clip_norm:g}"
        return f"{self.count} noisy {'sum' if self.count == 1 else 'sums'} over all rows ({terms})"

    def release(self, count: int) -> GaussianProfile:
        """Returns the joint cost of `count` >= 1 releases."""
        return GaussianProfile(self.noise_multiplier / math.sqrt(count))
