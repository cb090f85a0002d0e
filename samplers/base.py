"""The interface of batch samplers: a random participation matrix and its privacy cost.

X in {0,1}^(examples x steps). Training reads its columns (the batch of a step), accounting reads
its rows (when one example takes part). A sampler draws X and returns its cost, in one class.
All costs at a glance: docs/explanation/samplers-and-dominating-pairs.md.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accounting
from accounting import PrivacyProfile
from accounting.profile import UpperEnd
from samplers import plans
from samplers.attempts import Attempt, check_attempts, entered_epochs, sizes_by_epoch
from samplers.plans import EpochPlan, Participations, group, join_plans
from samplers.population import Population
from samplers.registry import code_digest
from samplers.row_law import RowLaw
from samplers.shards import Shards


class BatchSampler(abc.ABC):
    """Draws batches and computes their privacy cost.

    The guarantee is about zeroing-out adjacency: one example's gradients are replaced by 0, and
    num_examples is public. All draws are then alike for both neighbours. It assumes that the
    adversary sees the releases but not the batches: keep the seed secret, of 128 bits or more,
    beside the noise's. An adversary with the seed knows the batches, so nothing is amplified.

    A sampler is a frozen dataclass of JSON values (and, where it draws from one, a tree of units).
    Most have n, b and E, see `EpochSampler`.
    """

    permutes_sums: ClassVar[bool] = False
    """True if the lower end of the cost permutes sums: correlated noise then has no lower end."""
    counts_epochs: ClassVar[bool] = False
    """True if a draw that serves all epochs costs no more than the epochs that attempts enter."""

    @property
    def separation(self) -> int:
        """Least distance between two steps of an example; 1 allows independent noise only.

        The privacy cost holds for noise that is correlated over at most this many consecutive steps
        (docs/explanation/correlated-noise.md). The steps must be a public set, or the cost must
        hold for any steps: the distance of the steps that the example is drawn into is not enough.
        """
        return 1

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Caches the class's `code_digest`; refuses a method by its former name.

        Raises:
          TypeError: If the class has a method `of`, which is `with_population` now.
        """
        super().__init_subclass__(**arguments)
        code_digest(cls)
        if inspect.isfunction(inspect.getattr_static(cls, "of", None)):
            raise TypeError(
                f"{cls.__qualname__}.of was renamed in 0.3.0: call the method with_population"
            )

    if TYPE_CHECKING:  # fields of the one sampler, properties of the other

        @property
        def num_examples(self) -> int:
            """Size n of the training set, a public number."""

        @property
        def epochs(self) -> int:
            """Number E of epochs, each drawn as a whole."""

        @property
        def steps_per_epoch(self) -> int:
            """Number of steps T of one epoch."""

        @property
        def expected_batch_size(self) -> float:
            """The public divisor of the noisy sum of gradients."""

        @property
        def padded_batch_size(self) -> int:
            """Rows of a padded batch."""

    @property
    def num_shards(self) -> int:
        """Number L of data shards (`Shards`), drawn separately.

        A shard's part of a batch is cut and padded separately; the shards' bounds are public.
        """
        return 1

    @property
    def shards(self) -> Shards:
        """Shards of the examples."""
        return Shards(self.num_examples, self.num_shards)

    def shard_range(self, shard: int) -> range:
        """Returns the examples of a shard, 0 <= shard < num_shards.

        >>> from samplers import Deterministic
        >>> Deterministic(num_examples=10, batch_size=4, num_shards=2).shard_range(1)
        range(5, 10)
        """
        return self.shards.examples(shard)

    @property
    def shard_batch_size(self) -> int:
        """Rows of a shard's part of a padded batch."""
        return self.padded_batch_size // self.num_shards

    @property
    def clipped_shape(self) -> tuple[int, ...]:
        """Shape of jointly clipped row blocks; () for single rows."""
        return ()

    @property
    def num_steps(self) -> int:
        """Number of steps T * E of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def accumulates(self) -> bool:
        """True if an update may need several passes."""
        return False

    @property
    def max_passes(self) -> int:
        """Number of passes per step that programs have room for.

        A block of steps that needs more is compiled on its own when it comes.
        """
        return 1

    @property
    def unit(self) -> str:
        """Name of the protected unit, for rows that are examples."""
        return "example"

    @property
    def num_units(self) -> int:
        """Number of protected units, which a delta is compared with."""
        return self.num_examples

    def protected_unit(self, population: Population) -> str:
        """Returns the protected unit of the data: by default, one row.

        Raises:
          ValueError: If the data are not those that this sampler draws from.
        """
        if population.num_examples != self.num_examples:
            raise ValueError(
                f"the sampler draws from {self.num_examples} examples, and the data have "
                f"{population.num_examples}"
            )
        return population.row

    def with_population(self, population: Population) -> BatchSampler:
        """Returns this sampler for the data, after a check.

        Raises:
          ValueError: If the data are not those that this sampler draws from.
        """
        self.protected_unit(population)
        return self

    @property
    def num_chunks(self) -> int:
        """Number of chunks: `CHUNK` examples each, or fewer."""
        return -(-self.num_examples // plans.CHUNK)

    def chunk_range(self, chunk: int) -> range:
        """Returns the examples of a chunk, 0 <= chunk < num_chunks."""
        if not 0 <= chunk < self.num_chunks:
            raise ValueError(f"chunk must be in [0, {self.num_chunks}), got {chunk}")
        return range(chunk * plans.CHUNK, min((chunk + 1) * plans.CHUNK, self.num_examples))

    def drawn_epoch(self, epoch: int) -> int:
        """Returns the epoch whose draw `epoch` uses: itself, or 0 if all share one."""
        return epoch

    @abc.abstractmethod
    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the cost of all `num_steps` steps together, truncation included.

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
        """

    def row_law(self) -> RowLaw:
        """Returns the participation law, which audits test draws against.

        Raises:
          NotImplementedError: If the sampler states none: its draws are not audited, and its
            guarantee says so.
        """
        raise NotImplementedError(f"{type(self).__name__} has no row_law(): audits skip its draws")

    def terms(self) -> dict[str, Any]:
        """Returns the settings that decide the cost, as JSON.

        >>> from samplers import Deterministic
        >>> Deterministic(num_examples=100, batch_size=10).terms()
        {'num_examples': 100, 'batch_size': 10, 'epochs': 1, 'num_shards': 1}
        """
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(as_dataclass(self))}

    @classmethod
    def from_terms(cls, terms: Mapping[str, Any]) -> BatchSampler:
        """Returns a sampler of the cost that `terms` decide.

        >>> from samplers import Shuffle
        >>> Shuffle.from_terms(Shuffle(100, 10, epochs=3).terms())
        Shuffle(num_examples=100, batch_size=10, epochs=3, num_shards=1, order='redrawn')
        """
        return cls(**terms)

    def caveats(self, noise_multiplier: float, delta: float) -> tuple[str, ...]:
        """Returns warnings for readers of the guarantee.

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
          delta: Delta of the guarantee.
        """
        return ()

    def privacy_of(
        self, noise_multiplier: float, attempts: Sequence[Attempt], *, same_rows: bool = False
    ) -> PrivacyProfile:
        """Returns the cost of attempts together, drawn from different seeds.

        It holds if no release decides where attempts begin and end; else price the attempts that
        `as_entered` returns. By default the epochs that attempts enter count whole, which is
        exact for samplers of one step an epoch. Attempts with one draw for several epochs each
        compose basically. Proof: docs/explanation/partial-epochs.md.

        >>> from samplers import Deterministic
        >>> sampler = Deterministic(num_examples=100, batch_size=10)
        >>> profile = sampler.privacy_of(1.0, [range(0, 6), range(4, 10)], same_rows=True)
        >>> f"{profile.epsilon(1e-5):.2f}"  # who is in the steps 4 and 5 takes part twice
        '[6.57, 6.58]'

        Args:
          noise_multiplier: Noise standard deviation of a step's sum, in units of the clipping norm.
          attempts: Steps that each attempt releases, counted from the beginning of the run: a
            range, or several disjoint ranges.
          same_rows: Whether all attempts draw from the same rows, so that an example keeps its
            place (its group, or its steps in a known order).

        Raises:
          ValueError: If a range leaves the run, or overlaps another range of its attempt.
        """
        del same_rows
        length = self.steps_per_epoch
        entered, num_complete = [], 0
        for ranges in check_attempts(attempts, self.num_steps):
            complete, partial = sizes_by_epoch(ranges, length)
            entered.append(complete + len(partial))
            num_complete += complete
        if self.independent_epochs:
            entered = [sum(entered)]
        elif self.drawn_epoch(self.epochs - 1) != 0:  # epochs of several draws are not alike
            entered = [self.epochs] * len(entered)
        upper = accounting.releases.ComposedProfile.from_profiles(
            self.with_epochs(epochs).privacy(noise_multiplier) for epochs in entered
        )
        if [num_complete] == entered:
            return upper
        lower = None
        if self.independent_epochs and num_complete:
            lower = self.with_epochs(num_complete).privacy(noise_multiplier)
        return UpperEnd(upper, lower)

    @property
    def independent_epochs(self) -> bool:
        """True if each epoch has another draw."""
        return self.drawn_epoch(self.epochs - 1) == self.epochs - 1

    def as_entered(self, attempts: Sequence[Attempt]) -> list[list[range]]:
        """Extends attempts to all steps of the draws they enter.

        Their cost holds even if releases decide where attempts end. A draw is of one epoch, or of
        all where one draw serves them, unless its cost counts epochs.

        >>> from samplers import Poisson
        >>> Poisson(100, 10, epochs=3, cycle_length=2).as_entered([range(9, 11)])
        [[range(0, 20)]]
        """
        checked = check_attempts(attempts, self.num_steps)
        if not (self.independent_epochs or self.counts_epochs):
            return [[range(self.num_steps)] for _ in checked]
        return [entered_epochs(ranges, self.steps_per_epoch) for ranges in checked]

    def with_epochs(self, epochs: int) -> BatchSampler:
        """Returns this sampler with another number of epochs.

        >>> from samplers import Poisson
        >>> Poisson(num_examples=100, batch_size=10).with_epochs(3).num_steps
        30
        """
        return dataclasses.replace(as_dataclass(self), epochs=epochs)

    def untruncated(self) -> BatchSampler:
        """Returns this sampler without truncation; most never truncate."""
        return self

    @abc.abstractmethod
    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Draws one chunk's rows of one epoch, a pure function.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
          chunk: Chunk of `CHUNK` examples, counted from 0.
        """

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """Draws one epoch of all shards.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
        """
        plans = [self.shard_plan(seed, epoch, shard) for shard in range(self.num_shards)]
        return join_plans(plans, self.shards)

    def shard_plan(self, seed: int, epoch: int, shard: int) -> EpochPlan:
        """Draws a shard's part of one epoch, by step.

        Rows of a chunk are drawn alike on every machine, so that the matrix is the same for every
        number of shards.

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          epoch: Epoch, counted from 0.
          shard: Index of the shard, counted from 0.
        """
        shard_rows = self.shard_range(shard)
        chunks = []
        for chunk in range(shard_rows.start // plans.CHUNK, -(-shard_rows.stop // plans.CHUNK)):
            entries = self.participations(seed, epoch, chunk)
            rows = self.chunk_range(chunk)
            if not shard_rows.start <= rows.start <= rows.stop <= shard_rows.stop:
                inside = entries.examples >= shard_rows.start
                inside &= entries.examples < shard_rows.stop
                entries = Participations(entries.examples[inside], entries.steps[inside])
            if shard_rows.start:
                within = (entries.examples - shard_rows.start).astype(np.int32)
                entries = entries._replace(examples=within)
            chunks.append(entries)
        examples, steps = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
        del chunks
        return group(
            Participations(examples.astype(np.int32, copy=False), steps), self.steps_per_epoch
        )

    def passes(self, members: np.ndarray, seed: int, step: int, shard: int = 0) -> list[np.ndarray]:
        """Splits a shard's members of a step into passes.

        Args:
          members: Examples of the step, in the order of the plan: int32[size].
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
          shard: Index of the shard, counted from 0; several shards have one pass each.

        Returns:
          Passes of at most `shard_batch_size` examples, usually one: int32[size] each.
        """
        del seed, step, shard
        cap = self.shard_batch_size
        if not self.accumulates or members.size <= cap:
            return [members]
        return [members[start : start + cap] for start in range(0, members.size, cap)]


def stated_law(sampler: BatchSampler) -> RowLaw | None:
    """Returns a sampler's `row_law`, or None if it states none."""
    try:
        law = sampler.row_law()
    except NotImplementedError:
        return None
    return law if isinstance(law, RowLaw) else None


def as_dataclass(sampler: BatchSampler) -> Any:
    """Returns the sampler, typed as a dataclass, or raises TypeError."""
    if not dataclasses.is_dataclass(sampler):
        raise TypeError(f"decorate the sampler {type(sampler).__name__} as a frozen dataclass")
    return sampler
