"""Poisson sampling within units that are drawn at random: amplification is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import scipy

from accounting.algebra.likelihood_ratio import ROUNDING, Ratio
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import sampled_release
from accounting.algebra.upper import UpperRatio
from accounting.checks import GridProbability
from accounting.profile import ComposesWithGaussian
from accounting.profiles.gaussian import GaussianProfile, known_order
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.repeated import RepeatedProfile
from accounting.records import Ge, Lt


@dataclass(frozen=True)
class UnitsThenPoissonProfile(RepeatedProfile):
    r"""The profile of random units whose leaves then take part independently.

    In each step the leaf's unit is drawn with probability G = `unit_prob`, from a public tree, and
    each leaf of a drawn unit takes part with probability q = `sampling_prob`. Upper, units known:

    .. math:: X = 1 \text{ with probability } 1 - G, \text{ else } (1-q) + q\, e^Y, \quad
        Y \sim N(-1/(2 s^2), 1/s^2)

    is the likelihood ratio of a pair that dominates one step, in any dimension. Lower: concrete
    pairs, sharper with more `siblings`. Proof: docs/explanation/units-and-users.md.

    Args:
      noise_multiplier: s, in units of the clipping norm.
      steps: T, number of releases.
      unit_prob: G, in [1e-12, 1].
      sampling_prob: q, in [1e-12, 1].
      siblings: Number of its unit's further leaves; it raises the lower end alone.

    Raises:
      ValueError: If a number is out of range.
    """

    unit_prob: GridProbability
    sampling_prob: GridProbability
    siblings: Annotated[int, Ge(0), Lt(2**63)] = 0

    gap_note: ClassVar[str] = "the upper end assumes an attacker who knows which units were drawn"

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns Poisson's profile where every unit is drawn."""
        if self.unit_prob < 1.0:
            return None
        return PoissonProfile(self.noise_multiplier, self.sampling_prob, self.steps)

    def ceiling(self) -> GaussianProfile:
        """Returns the profile without sampling."""
        return known_order(self.noise_multiplier, self.steps)

    def deviation(self) -> float:
        """Returns the deviation of one release's X."""
        variance = math.expm1(min(1.0 / self.noise_multiplier**2, 700.0))
        return self.sampling_prob * math.sqrt(self.unit_prob * variance)

    def upper_ratio(self, step: float, tail: float) -> UpperRatio:
        """Returns the pair of known units.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        unit_prob = self.unit_prob
        ratio = self._sampled(UpperRatio, self.sampling_prob, step, tail / unit_prob)
        q, p = unit_prob * ratio.q, unit_prob * ratio.p
        q[-ratio.start] += 1.0 - unit_prob
        p[-ratio.start] += 1.0 - unit_prob
        zero, infinity = unit_prob * ratio.zero, unit_prob * ratio.infinity
        drift = ratio.drift + 4.0 * ROUNDING
        return replace(ratio, q=q, p=p, zero=zero, infinity=infinity, drift=drift)

    def lower_ratios(self, step: float, tail: float) -> list[LowerRatio]:
        """Returns the laws of concrete pairs.

        The siblings' gradients are 0, or show whether the unit was drawn.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        alone = self._sampled(LowerRatio, self.unit_prob * self.sampling_prob, step, tail)
        return [alone, self._with_siblings(step, tail)] if self.siblings else [alone]

    def _sampled(self, kind: type[Ratio], rate: float, step: float, tail: float) -> Ratio:
        """Returns the law of X where the leaf takes part with probability `rate`."""
        # Losses are large only if the leaf takes part: the cut tail has mass rate * tail.
        tail = min(tail / rate, 0.1)
        return sampled_release(kind, self.noise_multiplier, rate, step, tail)

    def _with_siblings(self, step: float, tail: float) -> LowerRatio:
        """Returns a lower law: the siblings' sum shows, by an event, whether the unit was drawn."""
        event_if_drawn, event_if_not = self._event()
        p, q = [], []
        for if_drawn, if_not in (
            (event_if_drawn, event_if_not),
            (1.0 - event_if_drawn, 1.0 - event_if_not),
        ):
            probability = self.unit_prob * if_drawn + (1.0 - self.unit_prob) * if_not
            rate = self.sampling_prob * self.unit_prob * if_drawn / probability
            ratio = self._sampled(LowerRatio, rate, step, tail)
            p.append(probability * ratio.p)
            q.append(probability * ratio.q)
        drift = ratio.drift + 16.0 * ROUNDING
        return LowerRatio.from_masses(np.concatenate(p), np.concatenate(q), step, drift)

    def _event(self) -> tuple[float, float]:
        """Returns probabilities, unit drawn and not, of a siblings' sum above a threshold.

        Rounded down and up, at the threshold at which they differ most.
        """
        rate, sigma = self.sampling_prob, self.noise_multiplier
        mean = self.siblings * rate
        around = 10.0 * math.sqrt(mean) + 10.0
        count = np.arange(max(0, math.floor(mean - around)), min(self.siblings, mean + around) + 1)
        logs = scipy.special.gammaln(self.siblings + 1.0)
        law = np.exp(
            logs
            - scipy.special.gammaln(count + 1.0)
            - scipy.special.gammaln(self.siblings - count + 1.0)
            + scipy.special.xlogy(count, rate)
            + scipy.special.xlog1py(self.siblings - count, -rate)
        )
        rounding_factor = 1.0 - 64.0 * ROUNDING * (logs + 16.0)
        best = 0.5, 0.5
        for threshold in np.linspace(0.0, mean + sigma, 50):
            if_drawn = rounding_factor * float(
                law @ scipy.special.ndtr((count - threshold) / sigma)
            )
            if_not = float(scipy.special.ndtr(-threshold / sigma)) * (1.0 + 64.0 * ROUNDING)
            if if_drawn - if_not > best[0] - best[1]:
                best = if_drawn, if_not
        return best
