"""Samplers that pass over the examples in epochs, each drawn anew or all of one draw."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accounting.records import Count, check
from samplers.attempts import Attempt, Sizes, check_attempts, sizes_by_epoch, sizes_of
from samplers.base import BatchSampler
from samplers.plans import MAX_EXAMPLES, MAX_SHARDS, check_steps


@dataclass(frozen=True)
class EpochSampler(BatchSampler):
    """A sampler that passes over n examples E times, in ceil(n / b) steps each.

    Attributes:
      num_examples: Size n of the training set, a public number.
      batch_size: Batch size b; the expected batch size if it varies.
      epochs: Number E of passes over the data, of ceil(n / b) steps each.
      num_shards: Number L of data shards (consecutive segments of the examples). Each shard draws,
        truncates and pads its part of every batch, so that rows can lie on L machines.
    """

    num_examples: Count
    batch_size: Count
    epochs: Count = 1
    num_shards: Count = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check(self)
        if self.num_shards > min(self.num_examples, MAX_SHARDS):
            most = min(self.num_examples, MAX_SHARDS)
            raise ValueError(f"num_shards must be at most {most}, got {self.num_shards}")
        if self.num_examples > self.num_shards * MAX_EXAMPLES:
            raise ValueError(
                f"num_examples must be at most 2^31 - 1 for each shard, got {self.num_examples} "
                f"with num_shards = {self.num_shards}: take "
                f"{-(-self.num_examples // MAX_EXAMPLES)} or more"
            )
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size must be at most num_examples = {self.num_examples}, "
                f"got {self.batch_size}"
            )
        check_steps(self.num_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps T = ceil(n / b) per epoch."""
        return -(-self.num_examples // self.batch_size)

    @property
    def expected_batch_size(self) -> float:
        """The public divisor of the noisy sum of gradients: b."""
        return float(self.batch_size)

    @property
    def padded_batch_size(self) -> int:
        """Rows of a padded batch: ceil(b / L) per shard."""
        return -(-self.batch_size // self.num_shards) * self.num_shards


class RedrawnOrFixed(EpochSampler, abc.ABC):
    """A sampler of epochs that draws each one anew, or one draw for all, by one of its fields."""

    mode: ClassVar[str]
    """The name of the field, whose value is 'redrawn' or 'fixed'."""

    @property
    def redrawn(self) -> bool:
        """True if each epoch is drawn anew."""
        return getattr(self, self.mode) == "redrawn"

    def drawn_epoch(self, epoch: int) -> int:
        """Returns `epoch`, or 0 where one draw serves all."""
        return epoch if self.redrawn else 0

    def draws_of(self, attempts: Sequence[Attempt], groups: int = 1) -> tuple[int, list[Sizes]]:
        """Returns the number of complete draws, and other draws' sizes.

        Where one draw serves all epochs, each attempt has one draw, and none counts as complete.

        Args:
          attempts: Steps that each attempt releases.
          groups: Number c of groups: step t is of group t mod c.
        """
        length, complete = self.steps_per_epoch, 0
        sizes: list[Sizes] = []
        for ranges in check_attempts(attempts, self.num_steps):
            if self.redrawn:
                epochs, partial = sizes_by_epoch(ranges, length, groups)
                complete, sizes = complete + epochs, sizes + partial
            else:
                sizes.append(sizes_of(ranges, length, groups))
        return complete, sizes
