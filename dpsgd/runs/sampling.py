"""Samplers as they are asked for, before the number of examples is known: named, typed, frozen.

Samplers are imported where they are built: whoever asks for help waits neither for NumPy nor SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from samplers import BatchSampler


def check_default_batch_size(batch_size: int, num_examples: int) -> None:
    """Raises ValueError if the default is a larger batch than there are examples."""
    if 1 <= num_examples < batch_size == _Batches.batch_size:
        raise ValueError(
            f"--batch-size is {batch_size} by default, which is more than the {num_examples} "
            "training examples: give a smaller one"
        )


@dataclass(frozen=True)
class _Batches:
    name: ClassVar[str]

    batch_size: int = 1024
    """Expected number of examples in a batch."""
    epochs: int = 10
    """Passes over the training examples (for Poisson: in expectation)."""

    def _fitting(self, num_examples: int) -> int:
        """Returns the number of examples, unless a batch that nobody asked for is larger."""
        check_default_batch_size(self.batch_size, num_examples)
        return num_examples


@dataclass(frozen=True)
class Deterministic(_Batches):
    """The examples in the order of the file, the same batches in every epoch."""

    name: ClassVar[str] = "deterministic"

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns the sampler over `num_examples` examples."""
        import samplers

        return samplers.Deterministic(self._fitting(num_examples), self.batch_size, self.epochs)


@dataclass(frozen=True)
class Shuffle(_Batches):
    """A uniformly random order. Its guarantee is NOT Poisson's: certified only as deterministic."""

    name: ClassVar[str] = "shuffle"

    order: Literal["redrawn", "fixed"] = "redrawn"
    """Draw a new order for every epoch, or keep the first."""

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns the sampler over `num_examples` examples."""
        import samplers

        sizes = (self._fitting(num_examples), self.batch_size, self.epochs)
        return samplers.Shuffle(*sizes, order=self.order)


@dataclass(frozen=True)
class _VariableBatches(_Batches):
    max_batch_size: int | None = None
    """Examples that one step can hold; by default so many that truncation costs next to nothing."""
    overflow: Literal["truncate", "accumulate"] = "truncate"
    """Drop the excess of an oversize batch (accounted for), or process it in several passes."""

    def _sizes(self, target_delta: float | None) -> dict[str, Any]:
        """Returns what samplers with variable batches are built with, by name."""
        return {
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "max_batch_size": self.max_batch_size,
            "overflow": self.overflow,
            "target_delta": target_delta,
        }


@dataclass(frozen=True)
class Poisson(_VariableBatches):
    """Each example joins each batch independently with probability batch_size / num_examples."""

    name: ClassVar[str] = "poisson"

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns the sampler over `num_examples` examples."""
        import samplers

        return samplers.Poisson(self._fitting(num_examples), **self._sizes(target_delta))


@dataclass(frozen=True)
class BallsAndBins(_VariableBatches):
    """Each example joins exactly one uniformly random batch of an epoch, independently."""

    name: ClassVar[str] = "balls-and-bins"

    assignment: Literal["redrawn", "fixed"] = "redrawn"
    """Draw new bins for every epoch, or keep the first (a far weaker guarantee)."""

    def build(self, num_examples: int, target_delta: float | None) -> BatchSampler:
        """Returns the sampler over `num_examples` examples."""
        import samplers

        return samplers.BallsAndBins(
            self._fitting(num_examples), assignment=self.assignment, **self._sizes(target_delta)
        )


SamplerConfig = Deterministic | Shuffle | Poisson | BallsAndBins

SAMPLERS: dict[str, type] = {
    kind.name: kind for kind in (Deterministic, Shuffle, Poisson, BallsAndBins)
}
"""Every sampler of `SamplerConfig` by its name."""
