"""Data shards: consecutive ranges of the examples, which may lie on different machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shards:
    """The examples 0, ..., n - 1 as L shards: shard l begins with example floor(l n / L).

    The order *in turn* of all examples takes the first example of every shard, then the second of
    every shard, and so on; shards of one more come first in each round
    (docs/explanation/laws-of-participation.md).

    Attributes:
      num_examples: n.
      num_shards: L, at most n.

    >>> shards = Shards(10, 4)
    >>> [shards.examples(l) for l in range(4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    >>> shards.in_turn(np.arange(10))  # shards 1 and 3 have three
    array([2, 6, 0, 4, 8, 3, 7, 1, 5, 9])
    """

    num_examples: int
    num_shards: int

    def examples(self, shard: int) -> range:
        """Returns the examples of a shard.

        Raises:
          ValueError: If there is no such shard.
        """
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"shard must be in [0, {self.num_shards}), got {shard}")
        start, stop = ((shard + k) * self.num_examples // self.num_shards for k in (0, 1))
        return range(start, stop)

    def of(self, examples: Any) -> Any:
        """Returns the shards of examples: int64."""
        after = np.asarray(examples, np.int64) + 1
        return (after * self.num_shards - 1) // self.num_examples

    def in_turn(self, examples: Any) -> Any:
        """Returns the places of examples in the order in turn: int64."""
        shards = self.of(examples)
        return (examples - self._start(shards)) * self.num_shards + self._rank(shards)

    def size(self, shards: Any) -> Any:
        """Returns how many examples shards have: int64."""
        return self._start(shards + 1) - self._start(shards)

    def starts_in(self, shards: Any, places: Any) -> Any:
        """Returns how many examples of shards come before these places in turn: int64."""
        return np.clip(-((self._rank(shards) - places) // self.num_shards), 0, self.size(shards))

    def batch_starts(self, shard: int, batch_size: int, steps: int) -> np.ndarray:
        """Returns where a shard's parts of batches, b after b in turn, begin: int64[steps + 1]."""
        return self.starts_in(shard, np.arange(steps + 1, dtype=np.int64) * batch_size)

    def _start(self, shards: Any) -> Any:
        return shards * self.num_examples // self.num_shards

    def _rank(self, shards: Any) -> Any:
        """Returns the place of shards in a round: those that have one example more come first."""
        more = self.num_examples % self.num_shards
        before = shards * more // self.num_shards  # shards before, of those
        larger = (shards + 1) * more // self.num_shards > before
        return np.where(larger, before, more + shards - before)
