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
      num_examples: Number n of examples.
      num_shards: Number L of shards, at most n.

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

    def shard_of(self, examples: Any) -> Any:
        """Returns the shard index of each example: int64."""
        numbers = np.asarray(examples, np.int64) + 1
        return (numbers * self.num_shards - 1) // self.num_examples

    def in_turn(self, examples: Any) -> Any:
        """Returns the places of examples in the order in turn: int64."""
        shards = self.shard_of(examples)
        return (examples - self._start(shards)) * self.num_shards + self._rank(shards)

    def size(self, shards: Any) -> Any:
        """Returns the number of examples of each shard: int64."""
        return self._start(shards + 1) - self._start(shards)

    def starts_in(self, shards: Any, places: Any) -> Any:
        """Returns the number of a shard's examples before a place in turn.

        Args:
          shards: Shard indices: integers of any shape.
          places: Places in the order in turn: integers of any shape that broadcasts with `shards`.

        Returns:
          int64 of the common shape.
        """
        return np.clip(-((self._rank(shards) - places) // self.num_shards), 0, self.size(shards))

    def batch_starts(self, shard: int, batch_size: int, steps: int) -> np.ndarray:
        """Returns the first example of each batch within a shard.

        Args:
          shard: Index of the shard.
          batch_size: Number b of examples that a batch takes, in turn.
          steps: Number of batches.

        Returns:
          int64[steps + 1], counted within the shard; the last entry ends the last batch.
        """
        return self.starts_in(shard, np.arange(steps + 1, dtype=np.int64) * batch_size)

    def _start(self, shards: Any) -> Any:
        return shards * self.num_examples // self.num_shards

    def _rank(self, shards: Any) -> Any:
        """Returns the place of shards in a round: shards with one example more come first."""
        num_larger = self.num_examples % self.num_shards
        preceding = shards * num_larger // self.num_shards  # larger shards before each shard
        is_larger = (shards + 1) * num_larger // self.num_shards > preceding
        return np.where(is_larger, preceding, num_larger + shards - preceding)
