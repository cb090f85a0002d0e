"""What a run released, as it is accounted for: segments of its steps, or a private selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accounting import SelectionProfile, TrialCount
from accounting.releases.envelope import EnvelopeProfile
from dpsgd.core.mechanism import Mechanism
from samplers import Multistage, UnitsThenPoisson


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one run under one set of keys, with all that their cost depends on.

    >>> from samplers import Poisson
    >>> Segment(Mechanism(Poisson(10_000, batch_size=100), 1.0, l2_clip_norm=1.0)).steps
    range(0, 100)

    Attributes:
      mechanism: Sampler, sigma, C, noise and full-batch queries of the whole run, as planned.
      steps: Those that are taken: first the sampler's steps, then one for each full-batch query. By
        default all.
      unit: What is protected, see `BatchSampler.protected_unit`; by default as where every row of
        the data is an example.
      reproducible_noise: Whether the noise comes from a seed that can be guessed.
      lazy_tables: Whether noise of tables is deferred: the cost is the same.
      initial: Trained model that the run started from; None for fresh parameters.
      not_covered: Sentences of the task about what its guarantee does not cover.

    Raises:
      ValueError: if the run has not these steps.
    """

    mechanism: Mechanism
    steps: range = None  # type: ignore[assignment]
    unit: str = ""
    reproducible_noise: bool = False
    lazy_tables: bool = False
    initial: Initial | None = None
    not_covered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole = self.mechanism.num_steps
        steps = range(whole) if self.steps is None else self.steps
        if steps.step != 1 or not 0 <= steps.start <= steps.stop <= whole:
            raise ValueError(f"steps must be in [0, {whole}], the run's number, got {steps}")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "unit", self.unit or self.mechanism.sampler.unit)

    @property
    def complete(self) -> bool:
        """Whether these are all steps of the run."""
        return self.steps == range(self.mechanism.num_steps)

    @property
    def mechanisms(self) -> list[Mechanism]:
        """What may have run."""
        return [self.mechanism]

    def planned(self) -> Segment:
        """Returns the segment that lasts to the last step of the run."""
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
    """A private selection: the best of a random number of whole runs, and nothing else.

    Attributes:
      count: The law of the number of trials, which stays secret.
      candidates: What a trial may be, each equally likely; at least one.
      score: What the best is chosen by.
      released: The candidate that was released; by default the first stands for it.
    """

    count: TrialCount
    candidates: tuple[Segment, ...]
    score: str
    released: Segment | None = None

    complete = True
    steps = range(1)
    initial: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not self.candidates or not all(one.complete for one in self.candidates):
            raise ValueError("a selection needs at least one candidate, and whole runs alone")
        if len({one.unit for one in self.candidates}) > 1:
            raise ValueError("candidates must protect one unit")

    @property
    def mechanism(self) -> Mechanism:
        """That of the run which was released."""
        return self._shown.mechanism

    @property
    def unit(self) -> str:
        """What is protected."""
        return self._shown.unit

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Sentences of the task, which all candidates train."""
        return self._shown.not_covered

    @property
    def lazy_tables(self) -> bool:
        """Whether noise of tables was deferred in the run that was released."""
        return self._shown.lazy_tables

    @property
    def reproducible_noise(self) -> bool:
        """Whether the noise of a trial may come from a seed that can be guessed."""
        return any(one.reproducible_noise for one in self.candidates)

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Those of the candidates that differ in more than the clipping norm."""
        found = (dataclasses.replace(one.mechanism, l2_clip_norm=1.0) for one in self.candidates)
        return list(dict.fromkeys(found))

    @property
    def profile(self) -> SelectionProfile:
        """The privacy profile of the whole: each candidate's lies below the envelope of all."""
        envelope = EnvelopeProfile(tuple(one.privacy() for one in self.mechanisms))
        return SelectionProfile(envelope, self.count)

    def planned(self) -> Trials:
        """Returns this selection."""
        return self

    def __str__(self) -> str:
        """Returns what is done, in words."""
        few = len(self.candidates)
        return (
            f"the best by {self.score} of a random number of trials (mean {self.count.mean:g}, "
            f"negative binomial of shape {self.count.shape:g}), each one of {few} "
            f"{'candidates' if few > 1 else 'candidate'} drawn at random"
        )

    @property
    def _shown(self) -> Segment:
        return self.released or self.candidates[0]


Part = Segment | Trials


def check_together(parts: Sequence[Part]) -> None:
    """Checks that a joint privacy cost is proved for a unit with rows in several runs.

    Args:
      parts: Segments and selections of all the runs.

    Raises:
      ValueError: if one is a selection, draws units from a tree (they may lie elsewhere in each
        run), or protects another unit than the others.
    """
    if any(isinstance(part, Trials) for part in parts):
        raise ValueError("the cost of a selection together with another run is not computed")
    if len(units := dict.fromkeys(part.unit for part in parts)) > 1:
        raise ValueError(f"the runs protect different units: {' and '.join(units)}")
    trees = Multistage | UnitsThenPoisson
    if any(isinstance(part.mechanism.sampler, trees) for part in parts):
        raise ValueError("runs that draw units from a tree are not counted together")
