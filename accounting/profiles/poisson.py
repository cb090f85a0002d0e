"""Poisson sampling: every example is in every batch independently with one probability."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from accounting.algebra.cells import gaussian_delta
from accounting.algebra.inversion import ACCURACY, Inverted
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import sampled_release
from accounting.algebra.moments import NotInvertibleError, Releases
from accounting.algebra.refinement import refine
from accounting.algebra.upper import UpperRatio
from accounting.checks import Noise, Probability, Release
from accounting.profile import Bound, Question
from accounting.profiles.gaussian import WithRelease, known_order
from accounting.profiles.repeated import RepeatedGrids
from accounting.records import Count

_SHARP = 1e-6
_LARGEST_LOSS = 1e4
"""Largest loss of one release: beyond it moments overflow."""
_PRECISION = "double precision gives no more digits"


@dataclass(frozen=True)
class PoissonProfile(WithRelease):
    r"""The certified profile of Poisson-sampled Gaussian releases, from below and above.

    T = `steps` releases at s = `noise_multiplier`, q = `sampling_prob` are dominated, tightly, by

    .. math:: P = \left((1-q) N(0, s^2) + q N(1, s^2)\right)^{\otimes T}, \qquad
        Q = N(0, s^2)^{\otimes T}

    under zeroing-out adjacency (as under adding or removing one example). Both directions' curves
    are computed by inverting moments (docs/explanation/composition-by-inverting-moments.md); T = 1
    is a closed form. Where the moments decay too slowly, by tilted FFT on refined grids.

    >>> f"{PoissonProfile(1.0, 0.01, 1000).epsilon(1e-5):.2f}"
    '[1.82, 1.83]'

    Attributes:
      noise_multiplier: s.
      sampling_prob: q in (0, 1].
      steps: T >= 1.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Sources: Zhu, Dong, Wang, "Optimal Accounting of Differential Privacy via Characteristic
    Function", AISTATS 2022 (the pair); Koskela, Jalko, Prediger, Honkela, "Tight Differential
    Privacy for Discrete-Valued Mechanisms", AISTATS 2021 (FFT accounting).

    Raises:
      ValueError: If a number is out of range.
    """

    noise_multiplier: Noise
    sampling_prob: Probability
    steps: Count
    release: Release = math.inf

    def answer(self, question: Question) -> Bound:
        """Answers by inversion, or by grids where sharper."""
        # Without sampling: it is q = 1, and an upper bound for every q.
        bound = question.ask(known_order(self.noise_multiplier, self.steps, self.release))
        if self.sampling_prob == 1.0:
            return bound
        if self.steps == 1 and self.release == math.inf:
            return question.between(lambda e: self._one_step(e)[0], lambda e: self._one_step(e)[1])
        bound = Bound(0.0, bound.upper)
        releases = Releases(self.noise_multiplier, self.sampling_prob, self.steps, self.release)
        loss = 0.5 / min(self.noise_multiplier, self.release) ** 2
        if loss <= _LARGEST_LOSS:
            with contextlib.suppress(NotInvertibleError):
                bound = bound.intersection(question.ask(Inverted(releases, ACCURACY)))
        if (
            question.wanted == "epsilon"
            and question.width(bound) < bound.width <= _SHARP * bound.lower
        ):
            return replace(bound, note=_PRECISION)
        return refine(self._grids(), question, bound)

    def _one_step(self, epsilon: float) -> tuple[float, float]:
        """Bounds delta of one step: q times a Gaussian profile at log(1 + (e^epsilon - 1) / q)."""
        sigma, rate = self.noise_multiplier, self.sampling_prob
        if epsilon > 30.0:
            inner = epsilon - math.log(rate) + math.log1p(-(1.0 - rate) * math.exp(-epsilon))
        else:
            inner = math.log1p(math.expm1(epsilon) / rate)
        low, high = _around(sigma, inner)
        # The last one, also where the product underflows to 0.
        upper = math.nextafter(rate * high * (1.0 + 1e-15), math.inf)
        return rate * low * (1.0 - 1e-15), min(upper, 1.0)

    def _grids(self) -> RepeatedGrids:
        sigma, rate = self.noise_multiplier, self.sampling_prob
        deviation = rate * math.sqrt(math.expm1(min(1.0 / sigma**2, 700.0)))
        return RepeatedGrids(
            lambda step, tail: sampled_release(UpperRatio, sigma, rate, step, tail),
            lambda step, tail: [sampled_release(LowerRatio, sigma, rate, step, tail)],
            deviation,
            self.steps,
            self.release,
        )


def _around(sigma: float, epsilon: float) -> tuple[float, float]:
    low, low_error = gaussian_delta(sigma, epsilon * (1.0 + 1e-15))
    high, high_error = gaussian_delta(sigma, epsilon * (1.0 - 1e-15))
    return max(0.0, low - low_error), high + high_error
