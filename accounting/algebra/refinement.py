"""Refinement: a profile is bounded on finer and finer grids until both ends agree, or say why not.

Every grid's bounds hold, so that the best ends of all of them do: which grid comes next, and when
to stop, are questions of cost alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from accounting.profile import Bound, Curve, Question

_STALLS = 3
"""How many finer grids in a row may be of no use."""
_FINE = 0.5
"""Grids that are coarser than this may be of no use at first."""
_SMALLEST_WIDTH = 1e-300
_FLOOR = "delta is so small that the composition's certified error is a part of it"
_ROUNDED = "a finer grid is of no use: roundings, or the composition's error, outweigh it"


class GridError(Exception):
    """A grid that is not computed: too large, too fine, or out of range, as its message says."""


@dataclass(frozen=True)
class GridBounds:
    """What one grid proves.

    Attributes:
      directions: A lower and an upper bound on each direction's delta, or on the larger one; the
        profile is the largest of all.
      floor: How much of delta may be the computation's own certified error: of lower ends at the
        first epsilon, of upper ones at the second.
      finest: About the finest resolution that would be computed.
    """

    directions: Sequence[tuple[Curve, Curve]]
    floor: Callable[[float, float], float] = lambda lower, upper: 0.0
    finest: float = 0.0

    def answer(self, question: Question) -> Bound:
        """Bounds what is asked for: epsilon by bisection."""
        resolution = 1e-3 * question.tolerance
        return Bound.largest(
            question.between(low, high, resolution) for low, high in self.directions
        )

    def upper(self, epsilon: float) -> float:
        """Returns the upper bound on delta at `epsilon`."""
        return max(high(epsilon) for _, high in self.directions)


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
        """No coarser one is tried where the first is too large to be computed."""
        ...

    @property
    def gap_note(self) -> str:
        """Why the ends of the finest grids may still differ; empty where they meet."""
        ...

    def bounds(self, resolution: float, delta: float, epsilon: float | None) -> GridBounds:
        """Computes one grid, sharp near one point of the curve.

        Args:
          resolution: How fine.
          delta: The delta that is asked about, or an upper bound on it.
          epsilon: The epsilon whose delta is asked about, if it is that.

        Raises:
          GridError: If it is not computed.
        """
        ...


def refine(grids: Grids, question: Question, bound: Bound, relative: float = 0.0) -> Bound:
    """Intersects `bound` with the bounds of finer and finer grids, until it is sharp.

    Where the two ends are to meet, the next resolution is chosen by the gap that is left, once that
    is not all of delta; else it is halved until the ends settle.

    Args:
      grids: What is refined.
      question: What is asked, and how sharply.
      bound: What is known of the answer without a grid.
      relative: A width, relative to epsilon, that is sharp enough as well.
    """
    at_epsilon = question.at if question.wanted == "delta" else None

    def sharp(found: Bound) -> float:
        return max(question.width(found), relative * found.lower, _SMALLEST_WIDTH)

    resolution, gap, stalled = grids.first, math.inf, 0
    grid: GridBounds | None = None
    while bound.width > sharp(bound):
        known = question.at if at_epsilon is None else bound.upper
        try:
            grid = grids.bounds(resolution, known, at_epsilon)
        except GridError as error:
            if grid is not None or 4.0 * resolution > grids.coarsest:
                return replace(bound, note=str(error))
            resolution *= 4.0
            continue
        found, before = grid.answer(question), bound
        bound = bound.intersection(found)
        wanted = sharp(bound)
        if bound.width <= wanted:
            break
        floored = resolution < _FINE and _floored(question, grid, bound)
        if grids.gap_note:
            if _settled(question, before, found, wanted):
                return replace(bound, note=_FLOOR if floored else grids.gap_note)
        elif floored:
            return replace(bound, note=_FLOOR)
        else:
            stalled = stalled + 1 if found.width > 0.9 * gap and resolution < _FINE else 0
            if stalled == _STALLS:
                return replace(bound, note=_ROUNDED)
        gap = found.width
        far = at_epsilon is not None and (resolution > _FINE or gap > 0.5 * bound.upper)
        if grids.gap_note or far:
            resolution *= 0.5
            continue
        if at_epsilon is not None:
            # There are two resolutions to a factor of 2, so that questions at many points share
            # grids; one that is a little too coarse would cost as much again.
            wished = -math.log2(max(0.04, math.sqrt(0.3 * wanted / max(gap, wanted))))
            allowed = math.log2(resolution / max(grid.finest, 1e-300))
            halves = max(1, min(math.ceil(2.0 * wished), math.floor(2.0 * allowed)))
            resolution *= 2.0 ** (-0.5 * halves)
            continue
        # Gaps of which the last ones did not fall are told apart by factors of 2.
        most = 0.5 if stalled else 0.7
        shrink = min(most, max(0.15, math.sqrt(0.7 * wanted / max(gap, wanted))))
        # In quarters of a factor of 2, so that questions about near deltas share grids.
        shrink = 2.0 ** (0.25 * math.floor(4.0 * math.log2(shrink)))
        resolution = max(shrink * resolution, min(most * resolution, grid.finest))
    return bound


def _settled(question: Question, before: Bound, found: Bound, wanted: float) -> bool:
    """Whether the rest of the gap is not the grid's: halving it again changes nothing."""
    if question.wanted == "epsilon":
        # A gap of second order moves by a third as much, in all, from here on.
        return max(before.upper - found.upper, found.lower - before.lower) <= 3.0 * wanted
    fallen = found.upper < before.upper * (1.0 - question.tolerance)
    return not fallen and found.lower <= before.lower * (1.0 + question.tolerance)


def _floored(question: Question, grid: GridBounds, bound: Bound) -> bool:
    """Whether the computation's certified error is a part of what is left of the gap."""
    if question.wanted == "delta":
        return grid.floor(question.at, question.at) > 0.1 * bound.upper
    return grid.floor(bound.lower, bound.upper) > 0.1 * question.at
