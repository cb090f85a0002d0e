"""Many equal releases, each bounded by likelihood ratios on a grid: composed and refined."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accounting.algebra.composition import composed
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import release_ratio
from accounting.algebra.refinement import GridError, Point, largest_delta, refine
from accounting.algebra.upper import UpperRatio
from accounting.checks import Noise, Release
from accounting.profile import Bound, ComposesWithGaussian, Curve, PrivacyProfile, Question
from accounting.profiles.gaussian import WithRelease
from accounting.records import Count

_FINEST = 2e-4
_FINEST_STEP = 1e-30
"""Least grid step, far below the rounding of losses."""
_COARSEST_STEP = 500.0
"""Largest grid step, as floats overflow at e^709."""
_TAIL = 1e-6
"""Share of delta that may be cut off the laws' tails."""
_COARSE = 0.02
"""Least step of the first grid."""
_RARE = 1e-40
"""Delta up to which bounds may be loose, to save time."""
_MOST_ATOMS = 24_000
"""Largest number of atoms of a release's law for delta <= _RARE."""
_FEW_DIGITS = 1e-4
"""Largest share of a delta that truncated tails may add to it."""


@dataclass(frozen=True)
class RepeatedGrids:
    """The grids of `steps` equal releases, and of a further one: composed by FFT.

    The resolution is the grid step, in log X, relative to the deviation of one release's X.

    Attributes:
      upper_ratio: See `RepeatedProfile.upper_ratio`.
      lower_ratios: See `RepeatedProfile.lower_ratios`.
      deviation: Rough deviation of one release's X under Q.
      steps: Number of releases.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.
      gap_note: See `Grids`.
      coarsest: See `Grids`.
    """

    upper_ratio: Callable[[float, float], UpperRatio]
    lower_ratios: Callable[[float, float], Sequence[LowerRatio]]
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

    def finest(self, point: Point) -> float:
        """Returns the finest resolution that is computed."""
        return _FINEST

    def upper(self, resolution: float, point: Point) -> Curve:
        """Returns an upper bound (see `Grids`).

        Its truncated tails change delta negligibly.
        """
        tail = _tail(point)
        while True:
            curve = self._upper(self._step(resolution), tail, point)
            if point.epsilon is None:
                return curve
            upper_delta = min(point.delta, curve(point.epsilon))
            if tail <= max(_FEW_DIGITS * upper_delta, 1e-100):
                return curve
            tail = _TAIL * upper_delta * min(1.0, upper_delta / tail)

    def _upper(self, step: float, tail: float, point: Point) -> Curve:
        tail = max(tail / self.steps, 1e-300)
        ratio = self.upper_ratio(step, tail)
        if point.epsilon is not None and point.delta <= _RARE and ratio.q.size > _MOST_ATOMS:
            raise GridError(
                "no finer grid is computed: for so small a delta it would take too long"
            )
        laws = [(ratio, self.steps), *release_ratio(self.release, ratio, tail)]
        return largest_delta(composed(laws, point))

    def lower(self, resolution: float, point: Point) -> Curve:
        """Returns the largest of several laws' lower bounds."""
        tail = max(_tail(point) / self.steps, 1e-300)
        ratios = self.lower_ratios(self._step(resolution), tail)
        laws = ([(law, self.steps), *release_ratio(self.release, law, tail)] for law in ratios)
        # Both directions at once: where a lower curve's window has no mass, another's may.
        return largest_delta([bound for releases in laws for bound in composed(releases, point)])

    def _step(self, resolution: float) -> float:
        step = resolution * min(1.0, self.deviation)
        if resolution < _FINEST:
            raise GridError("the finest grid was reached")
        if step < _FINEST_STEP:
            raise GridError("no finer grid is computed: rounding errors would outweigh its gain")
        if step > _COARSEST_STEP:
            raise GridError("no finer grid is computed: losses are beyond floats")
        return step


def _tail(point: Point) -> float:
    # The delta at an epsilon may be far smaller.
    return _TAIL * point.delta if point.epsilon is None else min(_TAIL * point.delta, 1e-12)


@dataclass(frozen=True)
class RepeatedProfile(WithRelease, abc.ABC):
    """The profile of `steps` equal releases, each bounded by likelihood ratios on a grid.

    The gap between the two ends is the grid's, which is refined until it matters no more,
    and, for some mechanisms, one between the proved bound and any concrete pair of data sets. A
    further Gaussian release of every example, at noise multiplier `release`, composes with both.
    """

    noise_multiplier: Noise
    steps: Count
    release: Release = field(default=math.inf, kw_only=True)

    gap_note: ClassVar[str] = ""
    """Why the two ends of the finest grids may still differ; empty where they meet."""

    @abc.abstractmethod
    def upper_ratio(self, step: float, tail: float) -> UpperRatio:
        """Returns a law of one release's X that dominates it.

        Args:
          step: Grid step in log X.
          tail: Mass, of each of a release's laws, that may be cut off.

        Raises:
          GridError: If the grid would be too large.
        """

    @abc.abstractmethod
    def lower_ratios(self, step: float, tail: float) -> Sequence[LowerRatio]:
        """Returns laws that one release's X dominates.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """

    @abc.abstractmethod
    def deviation(self) -> float:
        """Estimates the deviation of one release's ratio.

        It is taken under Q, for the choice of the grid.
        """

    @abc.abstractmethod
    def ceiling(self) -> ComposesWithGaussian:
        """Returns a closed-form profile that is never below this one."""

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns an equal profile of another class, or None."""
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
            return question.ask(self._beside(simpler))
        within = Bound(0.0, question.ask(self._beside(self.ceiling())).upper)
        return refine(self._grids(), question, within, 0.1 * question.tolerance)

    def _grids(self) -> RepeatedGrids:
        ratios, deviation = (self.upper_ratio, self.lower_ratios), self.deviation()
        return RepeatedGrids(*ratios, deviation, self.steps, self.release, self.gap_note)
