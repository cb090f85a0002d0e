"""Lanes: consecutive stretches of the examples, which may lie on different machines.

A lane's part of every batch is drawn, cut and padded by itself, so that whoever holds some lanes
needs neither rows nor draws of the others. Where each begins is public, as n is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Lanes:
    """The examples 0, ..., n - 1 as L lanes: lane l begins with example floor(l n / L).

    Lanes have floor(n / L) or ceil(n / L) examples each. The order *in turn* of all examples takes
    the first example of every lane, then the second of every lane, and so on; lanes that have one
    more come first in each round, so that only the last round is not full. Of any b consecutive
    examples in turn, floor(b / L) to ceil(b / L) are of each lane, the order's end apart, where
    there may be fewer.

    Attributes:
      num_examples: n.
      lanes: L, at most n.

    >>> lanes = Lanes(10, 4)
    >>> [lanes.examples(l) for l in range(4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    >>> lanes.in_turn(np.arange(10))  # lanes 1 and 3 have three
    array([2, 6, 0, 4, 8, 3, 7, 1, 5, 9])
    """

    num_examples: int
    lanes: int

    def examples(self, lane: int) -> range:
        """Returns the examples of a lane.

        Raises:
          ValueError: If there is no such lane.
        """
        if not 0 <= lane < self.lanes:
            raise ValueError(f"lane must be in [0, {self.lanes}), got {lane}")
        start, stop = ((lane + k) * self.num_examples // self.lanes for k in (0, 1))
        return range(start, stop)

    def of(self, examples: Any) -> Any:
        """Returns the lanes of examples: floor(l n / L) <= i where l n < (i + 1) L. int64."""
        after = np.asarray(examples, np.int64) + 1
        return (after * self.lanes - 1) // self.num_examples

    def in_turn(self, examples: Any) -> Any:
        """Returns the places of examples in the order in turn: int64."""
        lanes = self.of(examples)
        return (examples - self._start(lanes)) * self.lanes + self._rank(lanes)

    def size(self, lanes: Any) -> Any:
        """Returns how many examples lanes have: int64."""
        return self._start(lanes + 1) - self._start(lanes)

    def starts_in(self, lanes: Any, places: Any) -> Any:
        """Returns how many examples of lanes come before these places in turn: int64.

        A lane of rank r in a round has the places r, r + L, r + 2 L, ..., of which ceil((p - r) /
        L) are below p.
        """
        return np.clip(-((self._rank(lanes) - places) // self.lanes), 0, self.size(lanes))

    def batch_starts(self, lane: int, batch_size: int, steps: int) -> np.ndarray:
        """Returns where a lane's parts of batches, b after b in turn, begin: int64[steps + 1]."""
        return self.starts_in(lane, np.arange(steps + 1, dtype=np.int64) * batch_size)

    def _start(self, lanes: Any) -> Any:
        return lanes * self.num_examples // self.lanes

    def _rank(self, lanes: Any) -> Any:
        """Returns the place of lanes in a round: those that have one example more come first."""
        more = self.num_examples % self.lanes
        before = lanes * more // self.lanes  # lanes before, of those
        larger = (lanes + 1) * more // self.lanes > before
        return np.where(larger, before, more + lanes - before)
