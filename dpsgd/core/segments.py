"""Releases of a run as `cost` counts them: segments of steps, or a private selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from accounting import SelectionProfile, TrialCount
from accounting.records import STATED
from accounting.releases import EnvelopeProfile
from dpsgd.core.mechanism import Mechanism
from samplers import Multistage, UnitsThenPoisson


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one run under one set of keys.

    It has everything that their cost depends on.

    >>> from samplers import Poisson
    >>> Segment(Mechanism(Poisson(10_000, batch_size=100), 1.0, l2_clip_norm=1.0)).steps
    range(0, 100)

    Attributes:
      mechanism: Sampler, sigma, C, noise and full-batch queries of the whole run, as planned.
      steps: Range of steps: first the sampler's, then one for each full-batch query. All by
        default.
      unit: Protected unit, see `BatchSampler.protected_unit`; by default for data with one row per
        example.
      reproducible_noise: True if the noise comes from a seed that can be guessed.
      lazy_tables: True if noise of tables is deferred; the cost is the same.
      initial: Trained model that the run started from; None for fresh parameters.
      not_covered: Exclusions that the task or the loss states, sentences.
      rows: Digest of the training rows; empty if unknown. Attempts at equal rows give each example
        the same place.

    Raises:
      TypeError: If `steps` are no range.
      ValueError: If the run does not have these steps.
    """

    mechanism: Mechanism
    steps: range = None  # type: ignore[assignment]
    unit: str = ""
    reproducible_noise: Annotated[bool, STATED] = False
    lazy_tables: bool = False
    initial: Initial | None = None
    not_covered: tuple[str, ...] = ()
    rows: str = ""

    def __post_init__(self) -> None:
        num_steps = self.mechanism.num_steps
        steps = range(num_steps) if self.steps is None else self.steps
        if not isinstance(steps, range):
            raise TypeError(f"steps must be a range, such as range({num_steps}), got {steps!r}")
        if steps.step != 1 or not 0 <= steps.start <= steps.stop <= num_steps:
            raise ValueError(f"steps must be in [0, {num_steps}], the run's steps, got {steps}")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "unit", self.unit or self.mechanism.sampler.unit)

    @property
    def complete(self) -> bool:
        """True if these are all steps of the run."""
        return self.steps == range(self.mechanism.num_steps)

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Mechanisms that may have run."""
        return [self.mechanism]

    @property
    def entered(self) -> Segment:
        """Segment with each epoch that this one enters whole."""
        sampler, steps = self.mechanism.sampler, self.steps
        trained = range(steps.start, min(steps.stop, sampler.num_steps))
        if not trained:
            return self
        ((epochs,),) = sampler.as_entered([trained])
        steps = range(epochs.start, max(epochs.stop, steps.stop))
        return dataclasses.replace(self, steps=steps)

    def planned(self) -> Segment:
        """Returns the segment extended to the run's last step."""
        return dataclasses.replace(self, steps=range(self.steps.start, self.mechanism.num_steps))


@dataclass(frozen=True)
class Initial:
    """Trained model whose parameters a run starts from.

    Attributes:
      sha256: SHA-256 of its file of parameters, in hexadecimal.
      segments: Segments of the run that trained it; empty if they are not known, or if no cost of
        both runs together is proved.
      name: Name of its folder or file, for messages.
    """

    sha256: str
    segments: tuple[Segment, ...] = ()
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Trials:
    """Private selection: release of the best of a random number of whole runs.

    Attributes:
      count: Law of the number of trials, which stays secret.
      candidates: Possible runs of a trial, each equally likely; at least one.
      score: Name of the score that the best trial maximises or minimises.
      released: Candidate that was released; by default the first stands for it.
    """

    count: TrialCount
    candidates: tuple[Segment, ...]
    score: str
    released: Segment | None = None

    complete = True
    steps = range(1)
    initial: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not self.candidates or not all(candidate.complete for candidate in self.candidates):
            raise ValueError("a selection needs at least one candidate, each a whole run")
        if len({candidate.unit for candidate in self.candidates}) > 1:
            raise ValueError("all candidates must protect the same unit")

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism of the released run."""
        return self._released_segment.mechanism

    @property
    def unit(self) -> str:
        """Protected unit."""
        return self._released_segment.unit

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Exclusions that the task of all candidates states."""
        return self._released_segment.not_covered

    @property
    def lazy_tables(self) -> bool:
        """True if the released run deferred noise of tables."""
        return self._released_segment.lazy_tables

    @property
    def reproducible_noise(self) -> bool:
        """True if a trial's noise may come from a guessable seed."""
        return any(candidate.reproducible_noise for candidate in self.candidates)

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Mechanisms of the candidates, distinct up to the clipping norm."""
        mechanisms = (
            dataclasses.replace(candidate.mechanism, l2_clip_norm=1.0)
            for candidate in self.candidates
        )
        return list(dict.fromkeys(mechanisms))

    @property
    def profile(self) -> SelectionProfile:
        """Privacy profile, from the envelope of the candidates' profiles."""
        envelope = EnvelopeProfile(tuple(mechanism.privacy() for mechanism in self.mechanisms))
        return SelectionProfile(envelope, self.count)

    def planned(self) -> Trials:
        """Returns this selection."""
        return self

    def __str__(self) -> str:
        """Returns the selection in words."""
        few = len(self.candidates)
        return (
            f"the best by {self.score} of a random number of trials (mean {self.count.mean:g}, "
            f"negative binomial of shape {self.count.shape:g}), each one of {few} "
            f"{'candidates' if few > 1 else 'candidate'} drawn at random"
        )

    @property
    def _released_segment(self) -> Segment:
        return self.released or self.candidates[0]


Part = Segment | Trials


def check_together(parts: Sequence[Part]) -> None:
    """Checks that several runs have a proved joint privacy cost.

    A protected unit may have rows in all of them.

    Raises:
      ValueError: if one is a selection, draws units from a tree (they may lie elsewhere in each
        run), or protects another unit than the others.
    """
    if any(isinstance(piece, Trials) for piece in parts):
        raise ValueError("the cost of a selection together with another run is not computed")
    if len(units := dict.fromkeys(piece.unit for piece in parts)) > 1:
        raise ValueError(f"the runs protect different units: {' and '.join(units)}")
    trees = Multistage | UnitsThenPoisson
    if any(isinstance(piece.mechanism.sampler, trees) for piece in parts):
        raise ValueError("runs that draw units from a tree are not counted together")
