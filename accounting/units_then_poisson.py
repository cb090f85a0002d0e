"""Units drawn at random, then each of their examples by itself: amplification that is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from accounting.gaussian import GaussianProfile
from accounting.likelihood_ratio import LikelihoodRatio, Side
from accounting.mixtures import CELL_DRIFT, RepeatedProfile, check_grid
from accounting.profile import PrivacyProfile, check_probability


@dataclass(frozen=True)
class UnitsThenPoissonProfile(RepeatedProfile):
    r"""The profile of random units whose leaves then decide, each by itself, whether to take part.

    In each step the leaf's unit is drawn with probability G = `unit_prob`, from a public tree, and
    each leaf of a drawn unit takes part with probability q = `sampling_prob`. Upper: tell the
    adversary which units were drawn. This draw does not depend on the data, so that

    .. math:: X = 1 \text{ with probability } 1 - G, \text{ else } (1-q) + q\, e^Y, \quad
        Y \sim N(-1/(2 s^2), 1/s^2)

    is the likelihood ratio of a pair that dominates one step, whatever the other leaves are, and in
    any dimension: no swap is needed, and amplification is not lost to other units' contributions.
    Lower: if all other leaves are 0, it is Poisson sampling at rate G q.

    Raises:
      ValueError: If a number is out of range.
    """

    unit_prob: float
    sampling_prob: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("unit_prob", "sampling_prob"):
            check_probability(name, getattr(self, name))

    def ceiling(self) -> PrivacyProfile:
        """Returns the price without sampling."""
        return GaussianProfile(self.noise_multiplier / math.sqrt(self.steps))

    def deviation(self) -> float:
        """Returns the deviation of one release's X."""
        variance = math.expm1(min(1.0 / self.noise_multiplier**2, 700.0))
        return self.sampling_prob * math.sqrt(self.unit_prob * variance)

    def ratios(self, side: Side, step: float, tail: float) -> list[LikelihoodRatio]:
        """Returns the pair with known units ('upper') or with all other leaves 0 ('lower')."""
        rate = self.sampling_prob * (self.unit_prob if side == "lower" else 1.0)
        reach = 0.5 / self.noise_multiplier**2 - special.ndtri(tail) / self.noise_multiplier
        check_grid(reach, step, 3.0 * reach / step)
        ratio = LikelihoodRatio.subsampled_gaussian(self.noise_multiplier, rate, step, side, tail)
        if side == "lower":
            return [ratio]
        q, p = self.unit_prob * ratio.q, self.unit_prob * ratio.p
        q[-ratio.start] += 1.0 - self.unit_prob
        p[-ratio.start] += 1.0 - self.unit_prob
        return [
            LikelihoodRatio(
                side,
                step,
                0.0,
                ratio.start,
                q,
                p,
                ratio.offset,
                self.unit_prob * ratio.zero,
                self.unit_prob * ratio.infinity,
                ratio.drift + CELL_DRIFT,
            )
        ]
