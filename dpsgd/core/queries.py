"""Noisy sums over all rows: what a run releases after its last step, such as a calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting import GaussianProfile
from accounting.checks import check_noise_multiplier


@dataclass(frozen=True)
class FullSums:
    """k releases, each the sum over all rows of a clipped vector, plus noise: full-batch queries.

    In each an example has one vector of norm at most C, so that all k cost what one Gaussian
    release of sensitivity 1 with noise sigma / sqrt(k) does, whatever the ones before let the
    vectors be (`samplers.FullBatch`); and they compose with the steps of the run.

    >>> print(FullSums(5, 20.0))
    5 noisy sums over all rows (noise multiplier 20, clipping norm 1)

    Attributes:
      count: k >= 1.
      noise_multiplier: sigma > 0: standard deviation of a sum's noise, in units of C.
      l2_clip_norm: C > 0: bound on the L2 norm of an example's vector.
    """

    count: int
    noise_multiplier: float
    l2_clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"there is at least one sum, as a whole number, got {self.count!r}")
        check_noise_multiplier(self.noise_multiplier)
        if not 0.0 < self.l2_clip_norm < math.inf:
            raise ValueError(f"l2_clip_norm must be finite and > 0, got {self.l2_clip_norm}")

    def __str__(self) -> str:
        """Returns what they are, in words."""
        terms = f"noise multiplier {self.noise_multiplier:.6g}, clipping norm {self.l2_clip_norm:g}"
        return f"{self.count} noisy {'sum' if self.count == 1 else 'sums'} over all rows ({terms})"

    def release(self, count: int) -> GaussianProfile:
        """Returns what `count` >= 1 of the releases cost together."""
        return GaussianProfile(self.noise_multiplier / math.sqrt(count))
