"""Caps on batches of random size, for programs of fixed shape."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accounting import PrivacyProfile, default_delta, profiles
from accounting.checks import check_guarantee_delta
from accounting.records import Count
from samplers.base import BatchSampler
from samplers.epochs import EpochSampler
from samplers.plans import MAX_EXAMPLES
from samplers.randomness import Key, Stream, uniform_permutation

DEFAULT_SHARE = 0.01
"""Largest share of delta that truncation costs with the default cap."""
_RARE_PASS = 1e-5
"""Probability, relative to delta, that a batch needs more than `max_passes` passes."""


def truncate_batch(
    members: np.ndarray, size: int, seed: int, step: int, shard: int = 0
) -> np.ndarray:
    """Returns a uniform subset of a step's examples, in their order.

    Args:
      members: Examples of the step: int32[examples].
      size: Number of examples that remain.
      seed: The sampling secret, an integer >= 0 of any size.
      step: Step, counted over the whole run.
      shard: Index of the shard.
    """
    # Each step and shard has another key: there are at most 2^31 steps.
    key = Key(seed, Stream.TRUNCATION, 0, shard << 32 | step)
    return members[np.sort(uniform_permutation(key, members.size)[:size])]


def _smallest(enough: Callable[[int], bool], most: int) -> int:
    """Returns the smallest size >= 1 that is `enough`, or `most`, by bisection."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class CappedBatchSampler(BatchSampler):
    """A sampler that cuts larger batches of binomial size to a cap, and pays for it."""

    if TYPE_CHECKING:  # fields of the one sampler, properties of the other
        max_batch_size: int | None
        target_delta: float | None

        @property
        def sampling_prob(self) -> float:
            """Probability of an example in a step of its group."""

        @property
        def largest_group(self) -> int:
            """Largest number of a shard's examples in one step."""

    def _check_cap(self) -> None:
        if self.target_delta is not None:
            check_guarantee_delta(self.target_delta, "target_delta")
        if self.max_batch_size is not None:
            cap = self.max_batch_size
            if cap > MAX_EXAMPLES:
                raise ValueError(f"max_batch_size must be at most {MAX_EXAMPLES}, got {cap}")
            expected = self.expected_batch_size / self.num_shards
            if not self.accumulates and cap < expected * (1.0 - 1e-9):
                raise ValueError(
                    f"max_batch_size={cap} is below the expected batch size {expected:g}"
                    f"{' of a shard' if self.num_shards > 1 else ''}: pass more, or leave it out "
                    f"for the default of {self.default_batch_size}"
                )

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the profile of all steps, truncation included."""
        return self.with_cuts(self._untruncated(noise_multiplier))

    @abc.abstractmethod
    def _untruncated(self, noise_multiplier: float) -> Any: ...

    def with_cuts(self, profile: Any) -> Any:
        """Returns the profile with the cost of the sampler's cut batches, if any are cut.

        Args:
          profile: Profile of the sampler's steps, or of some of them, without cuts.
        """
        return self._truncated(profile, self.shard_batch_size) if self.truncates else profile

    def _truncated(self, profile: Any, max_batch_size: int) -> profiles.truncation.TruncatedProfile:
        cap = self.cap(max_batch_size)
        return profiles.truncation.truncated_profile(profile, cap, self.num_shards)

    def cap(self, max_batch_size: int) -> profiles.truncation.Cap:
        """Returns the cut of the largest group of a shard to `max_batch_size`."""
        return profiles.truncation.Cap(self.largest_group, self.sampling_prob, max_batch_size)

    @cached_property
    def default_batch_size(self) -> int:
        """Default of `max_batch_size`: truncation costs at most 1 % of delta."""
        delta = self.target_delta or default_delta(self.num_units)
        log_budget = math.log(DEFAULT_SHARE * delta)
        profile = self._untruncated(1.0)
        return _smallest(
            lambda size: self._truncated(profile, size).log_spent <= log_budget, self.largest_group
        )

    @property
    def shard_batch_size(self) -> int:
        """Rows B of a shard's part of a padded batch."""
        return self.default_batch_size if self.max_batch_size is None else self.max_batch_size

    @property
    def padded_batch_size(self) -> int:
        """Rows of a padded batch, all shards together."""
        return self.num_shards * self.shard_batch_size

    def terms(self) -> dict[str, Any]:
        """Returns the settings that decide the cost, cap included."""
        return {**super().terms(), "max_batch_size": self.shard_batch_size}

    def with_epochs(self, epochs: int) -> Any:
        """Returns this sampler with other epochs and the same cap."""
        sampler: Any = super().with_epochs(epochs)
        return dataclasses.replace(sampler, max_batch_size=self.shard_batch_size)

    @property
    def truncates(self) -> bool:
        """True if a batch may be cut."""
        return not self.accumulates and self.shard_batch_size < self.largest_group

    def passes(self, members: np.ndarray, seed: int, step: int, shard: int = 0) -> list[np.ndarray]:
        """Truncates a step's examples, or splits them into passes.

        Args:
          members: Examples of the step, in the order of the plan: int32[size].
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
          shard: Index of the shard, counted from 0.
        """
        if self.accumulates or members.size <= self.shard_batch_size:
            return super().passes(members, seed, step, shard)
        return [truncate_batch(members, self.shard_batch_size, seed, step, shard)]


@dataclass(frozen=True)
class VariableBatchSampler(CappedBatchSampler, EpochSampler, abc.ABC):
    """A sampler whose batches have a binomial number of examples each.

    Where c = `cycle_length` is above 1, example i takes part only in steps t = i mod c, counted
    over the whole run: its *group*. Any two of its steps are then c apart or more, for noise that
    is correlated over c steps. Groups are public: the fewer steps a group has in an epoch, the less
    sampling amplifies. An epoch has a multiple of c steps.

    Where `overflow` is "truncate", a batch of more than B = `shard_batch_size` examples is cut to B
    of them, each choice being equally likely; of several shards, each one's part of a batch. The
    guarantee pays for it. The default B is the smallest that costs at most 1 % of delta at any
    noise and epsilon.
    Proof: docs/explanation/truncated-batches.md.

    Attributes:
      max_batch_size: Largest number B of examples per shard in one pass of the fixed-shape program.
        Default: the smallest B at which truncation costs at most 1 % of delta.
      target_delta: Delta for which the default max_batch_size is chosen. Default: `default_delta`.
      overflow: Treatment of batches above max_batch_size. truncate: drop examples at random and pay
        in delta; accumulate: take several passes for one update, without drops or cost.
      cycle_length: Period c of cyclic sampling, in steps: example i takes part only in steps t = i
        (mod c). Noise may be correlated over c steps.
    """

    max_batch_size: Count | None = None
    target_delta: float | None = None
    overflow: Literal["truncate", "accumulate"] = "truncate"
    cycle_length: Count = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        cycle = self.cycle_length
        if cycle > super().steps_per_epoch:
            raise ValueError(
                f"cycle_length must be at most the {super().steps_per_epoch} steps of an epoch, "
                f"got {cycle}: take a smaller one, or smaller batches"
            )
        if self.accumulates and self.num_shards > 1:
            raise ValueError(
                f'overflow="accumulate" needs num_shards=1, got {self.num_shards}: use '
                'overflow="truncate", as no shard knows how many passes the fullest one needs'
            )
        self._check_cap()

    @property
    @abc.abstractmethod
    def sampling_prob(self) -> float:
        """Probability of an example in a step of its group."""

    @property
    def expected_batch_size(self) -> float:
        """Mean batch size n * sampling_prob / c, the sum's divisor."""
        return self.num_examples * self.sampling_prob / self.cycle_length

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps T: ceil(n / b), rounded up to whole cycles."""
        return -(-super().steps_per_epoch // self.cycle_length) * self.cycle_length

    @property
    def group_steps(self) -> int:
        """Number T / c of steps of one group per epoch."""
        return self.steps_per_epoch // self.cycle_length

    @property
    def largest_group(self) -> int:
        """Largest number ceil(n / (L c)) of a shard's examples per group."""
        return -(-self.num_examples // (self.num_shards * self.cycle_length))

    @property
    def separation(self) -> int:
        """Minimum separation of an example's steps: the cycle."""
        return self.cycle_length

    @property
    def accumulates(self) -> bool:
        """True if `overflow` is "accumulate"."""
        return self.overflow == "accumulate"

    @property
    def max_passes(self) -> int:
        """Number of passes per step that programs have room for.

        A batch of the run needs more with probability below 1e-5 delta, and then gets them.
        """
        if not self.accumulates:
            return 1
        delta = self.target_delta or default_delta(self.num_units)
        log_budget = math.log(_RARE_PASS * delta / self.num_steps)
        largest = _smallest(
            lambda size: self.cap(size).log_overflow() <= log_budget, self.largest_group
        )
        return max(1, -(-largest // self.shard_batch_size))

    def steps_of(self, examples: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the epoch's steps at places in examples' groups.

        Args:
          examples: Examples: int32[entries].
          places: Places in [0, group_steps) among the steps of a group: int32[entries].
        """
        cycle = self.cycle_length
        return places if cycle == 1 else places * np.int32(cycle) + examples % np.int32(cycle)

    def untruncated(self) -> VariableBatchSampler:
        """Returns this sampler with `overflow="accumulate"`, if unsharded."""
        return self if self.num_shards > 1 else dataclasses.replace(self, overflow="accumulate")
