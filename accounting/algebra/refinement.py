"""Refinement: a profile is bounded on finer and finer grids until both ends agree, or say why not.

Every grid's bounds hold, so that the best ends of all of them do: which grid comes next, and when
to stop, are questions of cost alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from accounting.profile import Bound, Curve, Question

_STALLS = 3
"""Number of finer grids in a row that may be of no use."""
_FINE = 0.5
"""Resolution below which a grid is expected to be of use."""
_SMALLEST_WIDTH = 1e-300
_ROUNDED = "no finer grid is computed: rounding errors would outweigh its gain"


class GridError(Exception):
    """A grid that is not computed: too large, too fine, or out of range, as its message says."""


class Point(NamedTuple):
    """The point at which a curve is to be sharp."""

    delta: float
    """The delta, or an upper bound on it."""
    epsilon: float | None = None
    """The epsilon, if its delta is the result."""


@runtime_checkable
class Part(Protocol):
    """A bound on delta in one direction, or under one of several laws."""

    def delta(self, epsilon: float) -> float:
        """Bounds delta at `epsilon`."""
        ...


def largest_delta(parts: Sequence[Part]) -> Curve:
    """Returns the largest of the parts' bounds."""
    return lambda epsilon: max(bound.delta(epsilon) for bound in parts)


@runtime_checkable
class Grids(Protocol):
    """The grids of one law, by their resolution.

    The gap that a grid leaves is of second order in its resolution.
    """

    @property
    def first(self) -> float:
        """The resolution to begin with."""
        ...

    @property
    def coarsest(self) -> float:
        """Coarsest resolution that is tried, where the first grid is too large."""
        ...

    @property
    def gap_note(self) -> str:
        """Reason why the finest ends may differ, or ""."""
        ...

    def finest(self, point: Point) -> float:
        """Estimates the finest resolution that would be computed."""
        ...

    def upper(self, resolution: float, point: Point) -> Curve:
        """Returns an upper bound, sharp near `point`.

        Args:
          resolution: Fineness of the grid, in proportion to its step.
          point: Point at which the bound is to be sharp.
        """
        ...

    def lower(self, resolution: float, point: Point) -> Curve:
        """Returns a lower bound, sharp near `point`."""
        ...


@dataclass(frozen=True)
class _Step:
    """One grid of a refinement.

    Attributes:
      resolution: Resolution of the grid.
      found: Bound that the grid proves.
      gap: Width of `found`; or, of an upper end alone, twice its estimated excess.
    """

    resolution: float
    found: Bound
    gap: float


def refine(grids: Grids, question: Question, bound: Bound, relative: float = 0.0) -> Bound:
    """Intersects `bound` with bounds of finer grids until sharp.

    Args:
      grids: Grids of increasing resolution.
      question: Question to answer, with its tolerance.
      bound: Bound on the answer that is known without a grid.
      relative: Width, relative to epsilon, that also suffices.
    """
    resolution, steps = grids.first, list[_Step]()
    while True:
        sharp_width = max(question.width(bound), relative * bound.lower, _SMALLEST_WIDTH)
        if bound.width <= sharp_width or (
            question.upper_only and steps and steps[-1].gap <= sharp_width
        ):
            return bound
        if steps and (reason := _reason_to_stop(grids, question, steps, sharp_width)):
            return replace(bound, note=reason)
        if steps:
            resolution = _next_resolution(grids, question, steps, bound, sharp_width)
        try:
            steps.append(_compute(grids, question, resolution, bound, steps[-1:]))
        except GridError as error:
            if steps or 4.0 * resolution > grids.coarsest:
                return replace(bound, note=str(error))
            resolution *= 4.0
            continue
        bound = bound.intersection(steps[-1].found)


def _point(question: Question, bound: Bound) -> Point:
    if question.wanted == "epsilon":
        return Point(question.at)
    return Point(bound.upper, question.at)


def _compute(
    grids: Grids, question: Question, resolution: float, bound: Bound, before: list[_Step]
) -> _Step:
    """Computes one grid: its upper side first, whose delta tells how sharp the lower must be."""
    point, precision = _point(question, bound), 1e-3 * question.tolerance
    upper_end = question.upper_end(grids.upper(resolution, point), precision)
    if question.upper_only:
        gap = upper_end
        if before:  # the excess falls as the square of the resolution
            shrunk = (resolution / before[0].resolution) ** 2
            gap = 2.0 * abs(before[0].found.upper - upper_end) * shrunk / (1.0 - shrunk)
        return _Step(resolution, Bound(0.0, upper_end), gap)
    if question.wanted == "delta":
        point = Point(min(upper_end, bound.upper), question.at)
    lower_end = question.lower_end(grids.lower(resolution, point), precision)
    grid_bound = Bound(lower_end, upper_end)
    return _Step(resolution, grid_bound, grid_bound.width)


def _reason_to_stop(grids: Grids, question: Question, steps: list[_Step], wanted: float) -> str:
    """Returns why no finer grid would help, or an empty text."""
    if grids.gap_note:
        settled = len(steps) > 1 and _settled(question, steps[-2].found, steps[-1].found, wanted)
        return grids.gap_note if settled else ""
    return _ROUNDED if _stalls(steps) == _STALLS else ""


def _stalls(steps: list[_Step]) -> int:
    """Returns how many of the last fine grids in a row left the gap as it was."""
    count = 0
    for coarser, step in zip(steps[-2::-1], steps[:0:-1], strict=False):
        if step.gap <= 0.9 * coarser.gap or step.resolution >= _FINE:
            break
        count += 1
    return count


def _settled(question: Question, before: Bound, found: Bound, wanted: float) -> bool:
    """Returns whether the rest of the gap is not the grid's: halving it again changes nothing."""
    if question.wanted == "epsilon":
        # A gap of second order shrinks by a third of this change in total from here on.
        return max(before.upper - found.upper, found.lower - before.lower) <= 3.0 * wanted
    fallen = found.upper < before.upper * (1.0 - question.tolerance)
    return not fallen and found.lower <= before.lower * (1.0 + question.tolerance)


def _next_resolution(
    grids: Grids, question: Question, steps: list[_Step], bound: Bound, wanted: float
) -> float:
    """Returns the next resolution, by the gap that is left once that is not all of delta."""
    resolution, gap = steps[-1].resolution, steps[-1].gap
    by_delta = question.wanted == "delta"
    if grids.gap_note or (by_delta and (resolution > _FINE or gap > 0.5 * bound.upper)):
        return 0.5 * resolution
    finest, excess = grids.finest(_point(question, bound)), max(gap, wanted) / wanted
    if by_delta:
        # There are two resolutions to a factor of 2, so that questions at many points share
        # grids; a grid slightly too coarse would double the cost.
        wished = -math.log2(max(0.02, math.sqrt(0.25 / excess)))
        allowed = math.log2(resolution / max(finest, 1e-300))
        halves = max(1, min(math.ceil(2.0 * wished), math.floor(2.0 * allowed)))
        return resolution * 2.0 ** (-0.5 * halves)
    # Gaps that did not fall are told apart by factors of 2.
    most = 0.5 if _stalls(steps) else 0.7
    shrink = min(most, max(0.15, math.sqrt(0.7 / excess)))
    # In quarters of a factor of 2, so that questions about near deltas share grids.
    shrink = 2.0 ** (0.25 * math.floor(4.0 * math.log2(shrink)))
    return max(shrink * resolution, min(most * resolution, finest))
