"""Grids of independent assignments of an example to bins: averages of log-normals, composed."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
import scipy

from accounting.algebra.composition import composed
from accounting.algebra.likelihood_ratio import LikelihoodRatio, Ratio
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import MOST_CELLS, release_ratio
from accounting.algebra.refinement import GridError, Point, largest_delta
from accounting.algebra.upper import UpperRatio
from accounting.profile import Curve
from accounting.records import Count, Ge

_SMALLEST_LOG_TAIL = -296.0
_SMALLEST_DELTA = 1e-286
_MOST_WORK = 1.8e9
"""Most pairs of atoms that are visited for one grid: a few seconds."""
_RARE = 1e-40
"""A delta that no one asks to be sharp at much cost."""
_MOST_ATOMS = 2**17
"""Most atoms of an assignment's law, where few of its bins are released."""
_FINEST_WIDE = 0.02
"""Finest resolution where that number of atoms is not enough."""
_MOST_BINS = 2**40
"""Most released bins of a draw: beyond it, rounding errors of their sums outweigh small deltas."""
_WORK_PER_DISTANCE = 1e4
"""Cost of a distance of atoms besides its pairs, in units of a pair."""


Assignment = tuple[tuple[Annotated[int, Ge(0)], Count], ...]
"""Bins of one draw, as pairs (number of releases of a bin, 0 or more; number of bins)."""


def _tail(delta: float, epochs: int) -> float:
    """Returns the mass of tails that may be cut, without consequence for `delta`.

    In steps, so that questions about different deltas share grids.
    """
    exponent = math.log10(max(delta, _SMALLEST_DELTA)) - math.log10(epochs) - 8.0
    return 10.0 ** max(5.0 * math.floor(0.2 * exponent), _SMALLEST_LOG_TAIL)


@dataclass(frozen=True)
class BinsGrids:
    """The grids of independent assignments of an example to bins, composed.

    An assignment's likelihood ratio is the mean over its bins of log-normals, of noise multiplier
    s / sqrt(m) for a bin that is released m times, and 1 for one that is not.

    Attributes:
      noise_multiplier: s.
      assignments: Different assignments, each with the number of draws that have it.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.
      first: See `Grids`.
      coarsest: See `Grids`.
      gap_note: See `Grids`.
    """

    noise_multiplier: float
    assignments: tuple[tuple[Assignment, int], ...]
    release: float
    first: float = 0.2
    coarsest: float = 0.2
    gap_note: str = ""

    def finest(self, point: Point) -> float:
        """Estimates the finest resolution within the most work."""
        return self._grid(self.coarsest, point).finest(_most_work(point))

    def upper(self, resolution: float, point: Point) -> Curve:
        """Returns an upper bound (see `Grids`)."""
        return self._curve(UpperRatio, resolution, point)

    def lower(self, resolution: float, point: Point) -> Curve:
        """Returns a lower bound (see `Grids`)."""
        return self._curve(LowerRatio, resolution, point)

    def _grid(self, resolution: float, point: Point) -> _Grid:
        kinds, counts = zip(*self.assignments, strict=True)
        return _Grid(self.noise_multiplier, kinds, resolution, _tail(point.delta, sum(counts)))

    def _curve(self, kind: type[LikelihoodRatio], resolution: float, point: Point) -> Curve:
        if point.delta <= _SMALLEST_DELTA:
            raise GridError("delta is so small that masses leave the range of doubles")
        grid, counts = self._grid(resolution, point), [count for _, count in self.assignments]
        if max(max(bins) for _, bins in _released(grid.kinds)) > _MOST_BINS:
            raise GridError("no grid is computed: so many bins leave nothing of its digits")
        if resolution < _FINEST_WIDE and grid.last_step() > grid.wanted_step():
            raise GridError("no finer grid is computed: few released bins have too many atoms")
        if grid.work() > _most_work(point):
            raise GridError("no finer grid is computed: it would take too long")
        laws = [*zip(_draws(kind, grid), counts, strict=True)]
        releases = [*laws, *release_ratio(self.release, laws[0][0])]
        alone = len(releases) == counts[0] == 1
        return laws[0][0].delta if alone else largest_delta(composed(releases, point))


def _most_work(point: Point) -> float:
    if point.epsilon is None:
        return _MOST_WORK
    return _MOST_WORK * (0.1 if point.delta <= _RARE else 0.75)


class _Grid(NamedTuple):
    sigma: float
    kinds: tuple[Assignment, ...]
    resolution: float
    tail: float

    def work(self) -> float:
        """Returns the grid's work, in pairs of atoms."""
        return sum(self._work(times, bins) for times, bins in _released(self.kinds))

    def _work(self, times: int, bins: tuple[int, ...]) -> float:
        steps, sigma = self.steps(times, max(bins)), self.sigma / math.sqrt(times)
        span = 1.0 / sigma**2 - 2.0 * float(scipy.special.ndtri(self.tail)) / sigma
        if (atoms := span / steps[0]) > MOST_CELLS:
            return math.inf
        distances = (min(atoms, (2.0 - math.log(min(step, 1.0))) / step) for step in steps)
        additions = 1.0 + sum(count.bit_count() for count in bins) / max(bins).bit_length()
        return additions * sum(d * (atoms + _WORK_PER_DISTANCE) for d in distances)

    def finest(self, most: float) -> float:
        """Estimates the finest resolution with work up to `most`."""
        finer = [self.resolution * 0.98**k for k in range(1_000)]
        beyond = bisect.bisect_right(
            finer, most, lo=1, key=lambda r: self._replace(resolution=r).work()
        )
        return finer[beyond - 1]

    def steps(self, times: int, bins: int) -> tuple[float, ...]:
        """Returns the grid step after each doubling of the bins."""
        first, halvings, _ = _steps(self.sigma, self.kinds)
        halved = halvings[times][: bins.bit_length()]
        return tuple(self.resolution * first / 2.0**h for h in halved)

    def wanted_step(self) -> float:
        """Returns the composition's grid step, in proportion to deviations."""
        first, _, last = _steps(self.sigma, self.kinds)
        return self.resolution * first / 2.0**last

    def last_step(self) -> float:
        """Returns the composition's step, of at most _MOST_ATOMS atoms."""
        step, span = self.wanted_step(), self._diluted_span()
        while span > _MOST_ATOMS * step:
            step *= 2.0
        return step

    def _diluted_span(self) -> float:
        """Estimates the largest range of log X of an assignment with unreleased bins."""
        spans = [0.0]
        for kind in self.kinds:
            if unreleased := dict(kind).get(0, 0):
                sigma, bins = self.sigma / math.sqrt(max(kind)[0]), sum(n for _, n in kind)
                reach = 0.5 / sigma**2 - float(scipy.special.ndtri(self.tail)) / sigma
                low = math.log(unreleased / bins)
                spans.append(float(np.logaddexp(low, reach - math.log(bins))) - low)
        return max(spans)


def _released(kinds: Sequence[Assignment]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns each number of releases above 0, with the numbers of bins that have it."""
    bins: dict[int, set[int]] = {}
    for times, count in itertools.chain.from_iterable(kinds):
        if times:
            bins.setdefault(times, set()).add(count)
    return [(times, tuple(sorted(counts))) for times, counts in sorted(bins.items())]


@lru_cache(maxsize=64)
def _steps(sigma: float, kinds: tuple[Assignment, ...]) -> tuple[float, dict[int, list[int]], int]:
    """Returns the first grid step at resolution 1, and how often it is halved.

    After each doubling, for each number of releases of a bin; and for the composition.
    """

    def wanted(times: int, copies: int, share: float = 1.0) -> float:
        variance = math.expm1(min(times / sigma**2, 700.0))
        return min(1.0, share * 4.0 * math.sqrt(variance / copies))

    def halved(step: float, least: int) -> int:
        while first / 2.0**least > 1.5 * step:
            least += 1
        return least

    released = _released(kinds)
    first = max(wanted(times, 1) for times, _ in released)
    halvings: dict[int, list[int]] = {}
    for times, bins in released:
        levels: list[int] = []
        halvings[times] = levels
        for level in range(max(bins).bit_length()):
            levels.append(halved(wanted(times, 2**level), levels[-1] if levels else 0))
    last = max(levels[-1] for levels in halvings.values())
    deviation = max(
        wanted(times, 2 ** (bins.bit_length() - 1), bins / sum(count for _, count in kind))
        for kind in kinds
        for times, bins in kind
        if times
    )
    return first, halvings, halved(deviation, last)


@lru_cache(maxsize=32)
def _draws(kind: type[Ratio], grid: _Grid) -> list[Ratio]:
    """Returns the likelihood ratios of the assignments, of one kind."""
    means: dict[tuple[int, int], Ratio] = {}
    for times, bins in _released(grid.kinds):
        steps = grid.steps(times, max(bins))
        first = kind.gaussian(grid.sigma / math.sqrt(times), steps[0], grid.tail)
        for count, mean in zip(bins, first.averages(bins, steps), strict=True):
            means[times, count] = mean
    return [_mean(kind_of_draw, means, grid.last_step()) for kind_of_draw in grid.kinds]


def _mean(kind: Assignment, means: Mapping[tuple[int, int], Ratio], step: float) -> Ratio:
    """Returns the mean over the bins of one assignment, on a grid of `step` in log X."""
    means_released = [(means[times, bins], bins) for times, bins in kind if times]
    finest = min(ratio.step for ratio, _ in means_released)
    (total, bins), *further_laws = [
        (law.refined(round(law.step / finest)), n) for law, n in means_released
    ]
    for law, count in further_laws:
        total, bins = total.mean_with(bins, law, count), bins + count
    unreleased = sum(count for _, count in kind) - bins
    if unreleased or total.step < 0.75 * step:
        return total.diluted(bins, unreleased, step)
    return total.refined(round(total.step / step))
