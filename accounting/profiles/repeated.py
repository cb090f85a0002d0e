"""Many equal releases, each bounded by likelihood ratios on a grid: composed and refined."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accounting.algebra.composition import ComposedLoss, compose_both
from accounting.algebra.likelihood_ratio import LikelihoodRatio, Side
from accounting.algebra.mixtures import release_ratio, with_release
from accounting.algebra.refinement import GridBounds, GridError, refine
from accounting.checks import check_settings
from accounting.profile import Bound, ComposesWithGaussian, Curve, PrivacyProfile, Question
from accounting.profiles.gaussian import WithRelease

_FINEST = 2e-4
_COARSEST_STEP = 500.0
"""Steps of a grid are exponents, and floats end at e^709."""
_TAIL = 1e-6
"""Share of delta that may be cut off the laws' tails."""
_COARSE = 0.02
"""Step of the first grid, where that of `RepeatedGrids.deviation` is less."""
_FEW_ATOMS = 6000
"""So many are convolved directly in less than a second."""
_RARE = 1e-40
"""A delta that no one asks to be sharp at much cost."""
_FEW_DIGITS = 1e-4
"""A tail that is a larger share of delta than this hides it."""


@dataclass(frozen=True)
class RepeatedGrids:
    """The grids of `steps` equal releases, and of a further one: composed by FFT.

    The resolution is the grid step, in log X, relative to the deviation of one release's X.

    Attributes:
      ratios: See `RepeatedProfile.ratios`.
      deviation: About that of one release's X under Q.
      steps: How many releases.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.
      coarsest: See `Grids`.
      gap_note: See `Grids`.
    """

    ratios: Callable[[Side, float, float], Sequence[LikelihoodRatio]]
    deviation: float
    steps: int
    release: float = math.inf
    gap_note: str = ""
    coarsest: float = 1e6

    @property
    def first(self) -> float:
        """The resolution to begin with.

        Few large losses, among many small ones, are seen on grids far coarser than these.
        """
        return 0.4 if self.gap_note else max(0.4, _COARSE / self.deviation)

    def bounds(self, resolution: float, delta: float, epsilon: float | None) -> GridBounds:
        """Computes one grid (see `Grids`), with tails that are of no consequence to `delta`."""
        if resolution < _FINEST:
            raise GridError("the finest grid was reached")
        tail = _TAIL * delta
        if epsilon is not None:
            # What delta turns out to be may be far less.
            tail = min(tail, 1e-12)
        while True:
            bounds = self._composed(resolution, tail, delta, epsilon)
            found = min(delta, bounds.upper(epsilon)) if epsilon is not None else delta
            if tail <= max(_FEW_DIGITS * found, 1e-100):
                return bounds
            tail = _TAIL * found * min(1.0, found / tail)

    def _composed(
        self, resolution: float, tail: float, delta: float, epsilon: float | None
    ) -> GridBounds:
        step = resolution * min(1.0, self.deviation)
        if step > _COARSEST_STEP:
            raise GridError("no finer grid is computed: losses are beyond floats")
        tail = max(tail / self.steps, 1e-300)
        # The upper ratio first: where no grid serves it says so at once.
        (ratio,) = self.ratios("upper", step, tail)
        if epsilon is not None and delta <= _RARE and ratio.q.size > 4 * _FEW_ATOMS:
            raise GridError(
                "no finer grid is computed: for so small a delta it would take too long"
            )
        below = self.ratios("lower", step, tail)

        def compose(law: LikelihoodRatio) -> tuple[ComposedLoss, ComposedLoss]:
            beside = release_ratio(self.release, law, tail)
            return compose_both(law, self.steps, beside, delta=delta, epsilon=epsilon)

        high, low = compose(ratio), [part for law in below for part in compose(law)]

        def floor(lower: float, upper: float) -> float:
            return max(*(part.floor(lower) for part in low), *(part.floor(upper) for part in high))

        # Both directions at once: where a lower curve's window has no mass, another's may.
        bounds = GridBounds([(_largest(low), _largest(high))], floor, _FINEST)
        if ratio.q.size > _FEW_ATOMS:
            return bounds
        at = epsilon
        if at is None:
            at = bounds.answer(Question("epsilon", delta, 1.0)).lower
        if floor(at, at) <= _FEW_DIGITS * max(part.delta(at) for part in low):
            return bounds
        # Where the FFT's error is a part of delta, convolutions have none, but coarser grids.
        powers = [self._power(law) for law in below]
        both = max(powers, key=lambda law: law.delta(at)), self._power(ratio)
        return GridBounds([_sharpest(bounds.directions[0], both)], finest=_FINEST)

    def _power(self, law: LikelihoodRatio) -> LikelihoodRatio:
        """Returns the law of X of all releases by direct convolutions."""
        return with_release(law.power(self.steps), self.release)


def _largest(parts: Sequence[ComposedLoss]) -> Curve:
    return lambda epsilon: max(part.delta(epsilon) for part in parts)


def _sharpest(
    curves: tuple[Curve, Curve], laws: tuple[LikelihoodRatio, LikelihoodRatio]
) -> tuple[Curve, Curve]:
    return (
        lambda epsilon: max(curves[0](epsilon), laws[0].delta(epsilon)),
        lambda epsilon: min(curves[1](epsilon), laws[1].delta(epsilon)),
    )


@dataclass(frozen=True)
class RepeatedProfile(WithRelease, abc.ABC):
    """The profile of `steps` equal releases, each bounded by likelihood ratios on a grid.

    The gap between the two ends is that of the grid, which is refined until it matters no more,
    and, for some mechanisms, one between the proved bound and any concrete pair of data sets. A
    further Gaussian release of every example, at noise multiplier `release`, composes with both.
    """

    noise_multiplier: float
    steps: int
    release: float = field(default=math.inf, kw_only=True)

    gap_note: ClassVar[str] = ""
    """Why the two ends of the finest grids may still differ; empty where they meet."""

    def __post_init__(self) -> None:
        check_settings(self, counts=("steps",))

    @abc.abstractmethod
    def ratios(self, side: Side, step: float, tail: float) -> Sequence[LikelihoodRatio]:
        """Returns laws of one release's X: 'upper', one that dominates; 'lower', ones dominated.

        Args:
          side: Which bounds.
          step: Grid step in log X.
          tail: Mass, of each of a release's laws, that may be cut off.

        Raises:
          GridError: If the grid would be too large.
        """

    @abc.abstractmethod
    def deviation(self) -> float:
        """Returns about the deviation of one release's X under Q, to choose the grid by."""

    @abc.abstractmethod
    def ceiling(self) -> ComposesWithGaussian:
        """Returns a closed-form profile of the releases that is never below this one's."""

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns the releases' law under another name, where there is one."""
        return None

    def _beside(self, releases: ComposesWithGaussian) -> PrivacyProfile:
        """Returns the product of a profile of the releases with the further one."""
        if self.release == math.inf:
            return releases
        return releases.with_gaussian_release(self.release)

    def answer(self, question: Question) -> Bound:
        """Answers by grids, until neither end moves by more than about the tolerance.

        Or by 1e-4 of an epsilon above 10.
        """
        if simpler := self.simpler():
            return question.of(self._beside(simpler))
        within = Bound(0.0, question.of(self._beside(self.ceiling())).upper)
        return refine(self._grids(), question, within, 0.1 * question.tolerance)

    def _grids(self) -> RepeatedGrids:
        return RepeatedGrids(self.ratios, self.deviation(), self.steps, self.release, self.gap_note)
