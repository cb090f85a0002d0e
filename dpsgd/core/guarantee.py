"""A guarantee as it may be printed: an interval, its terms, and what it leaves out.

How to read one: docs/explanation/what-a-guarantee-says.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accounting import Bound, attack_accuracy
from accounting.attack import implied_advantage
from accounting.checks import check_guarantee_delta
from accounting.profile import format_delta
from dpsgd.core.mechanism import Mechanism
from dpsgd.noise.registry import noise_from_record, noise_record

ADJACENCY = "zero-out"
"""One unit is replaced by the null example, whose gradient is 0; how many there are is public."""

NOT_COVERED = (
    "choices of hyper-parameters that looked at private data and are not counted above",
    "the diagnostics of training (losses, clipped fractions, batch sizes, metrics on its rows)",
    "evaluation on rows that were not training examples",
    "side channels, such as how long a step takes",
    "floating point: the guarantee is that of exact sums and exact Gaussian noise; sums of clipped "
    "gradients in 32 bits are rounded, to some 1e-7 of themselves at each addition, and noise from "
    "a fast generator in 32 bits is Gaussian to about 1e-6",
)
"""What no guarantee covers; on floating point see `dpsgd.noise.gaussian`."""

FOREIGN_CALLS = (
    "host calls and foreign functions of the loss, which may carry private rows from one example "
    "to another"
)
"""What is not covered where a loss makes such calls (`dpsgd.gradients.isolation`)."""

NO_GUARANTEE = "NO GUARANTEE"
"""Stands for a guarantee where there is none."""

UNKNOWN = Bound(0.0, 1.0)
"""Of a total variation distance, where no profile bounds it."""


@dataclass(frozen=True)
class Guarantee:
    """What (epsilon, delta)-differential privacy a run gives the units in its training data.

    It is made by `dpsgd.core.cost.cost` alone.

    Attributes:
      epsilon: Interval that contains the mechanism's epsilon; its upper end is what is guaranteed.
        None where nothing is guaranteed; `void` then says why.
      delta: The delta at which epsilon is given, in (0, 0.1).
      mechanism: Sampler, sigma, C, noise and full-batch queries of the run, or of its last attempt.
      unit: What one neighbour differs in ('example' or 'user').
      total_variation: Interval that contains the mechanism's delta(0), from its own profile.
      lazy_tables: Whether noise of tables is deferred, which changes no number here.
      scope: What part of a run this is about, and on what condition; empty for a whole run.
      void: Why there is no guarantee, or empty.
      notes: What a reader should know about the interval.
      left_out: What it does not cover beside what no guarantee does.
      foreign_calls: Whether the loss may call the host and foreign functions.
      initial_names: Names of the trained models that the run started from.
      together: Guarantee of the run and the initial model's together, which holds for rows that
        trained the initial model; None if it is not known.
      by_task: Sentences of the task about what its guarantee does not cover.
    """

    epsilon: Bound | None
    delta: float
    mechanism: Mechanism
    unit: str
    total_variation: Bound = UNKNOWN
    lazy_tables: bool = False
    scope: str = ""
    void: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    foreign_calls: bool = False
    initial_names: tuple[str, ...] = ()
    together: Guarantee | None = None
    by_task: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_guarantee_delta(self.delta)

    def stopped(self, steps: int, whole: int) -> Guarantee:
        """Returns this guarantee, of a whole run, as that of a run that was stopped.

        It costs no less: the decision to stop may depend on what was released, see `cost`, and
        all that is known is then a function of what the whole run would have released.

        Args:
          steps: Steps that were done.
          whole: Steps of the whole run.
        """
        return dataclasses.replace(
            self,
            scope=f"a run stopped after {steps:,} of {whole:,} steps, which costs what all of them "
            "do",
            notes=(
                *self.notes,
                "the run was stopped: where losses, other diagnostics or private rows had a part "
                "in that, it is not covered",
            ),
        )

    @property
    def attack_advantage(self) -> Bound | None:
        """The largest advantage of a membership attack; None where nothing is guaranteed.

        Whether a unit was in the training data or zeroed out is guessed by whoever knows all else:
        see `accounting.attack` for the game and the proof. The upper end is that of the whole
        profile, delta(0), or what this (epsilon, delta) alone implies, whichever is less.
        """
        if self.epsilon is None or math.isinf(self.epsilon.upper):
            return None
        found = self.total_variation
        upper = min(found.upper, implied_advantage(self.epsilon.upper, self.delta))
        return Bound.resting_on(found, min(found.lower, upper), upper)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the guarantee leaves out, in sentences."""
        return (*self.left_out, *self.by_task, *[FOREIGN_CALLS] * self.foreign_calls, *NOT_COVERED)

    def sentence(self) -> str:
        """Returns the guarantee in one line."""
        if self.epsilon is None:
            return f"{NO_GUARANTEE}: {self.void}"
        if math.isinf(self.epsilon.upper):
            delta = format_delta(self.delta)
            return f"{NO_GUARANTEE}: no finite epsilon is certified at delta {delta}"
        return (
            f"epsilon <= {self.epsilon.format_upper()} at delta {format_delta(self.delta)} "
            f"{f'for {self.scope} ' if self.scope else ''}"
            f"({ADJACENCY} adjacency, unit: one {self.unit}{self._of_noise()})"
            f"{self._of_initial()}; certified: epsilon in {self.epsilon}; "
            f"{self.attack()}{self._exceptions()}"
        )

    def _exceptions(self) -> str:
        found = (*self.by_task, *[FOREIGN_CALLS] * self.foreign_calls)
        return f". NOT COVERED: {'; '.join(found)}" if found else ""

    def _of_initial(self) -> str:
        if not self.initial_names:
            return ""
        if self.together is None:
            cost = "its cost adds to this"
        elif self.together.epsilon is None or math.isinf(self.together.epsilon.upper):
            cost = NO_GUARANTEE
        else:
            upper = self.together.epsilon.format_upper()
            names = " and ".join(self.initial_names)
            cost = f"epsilon <= {upper} (this run and {names} together)"
        return f" for rows that did not train the initial model; for rows that did, {cost}"

    def _of_noise(self) -> str:
        words = words_on(noise_record(self.mechanism.noise))
        late = ", lazy tables" if self.lazy_tables else ""
        return late if words == INDEPENDENT else f", {words}{late}"

    def _upper_together(self) -> float | None:
        if self.together is None or self.together.epsilon is None:
            return None
        upper = self.together.epsilon.upper
        return upper if math.isfinite(upper) else None

    def attack(self) -> str:
        """Returns what bounds a membership attack, or that nothing does, in words."""
        advantage = self.attack_advantage
        if advantage is None:
            return "nothing bounds the accuracy of a membership attack"
        accuracy = attack_accuracy(advantage).format_upper()
        return f"a membership attack with a fair prior has an accuracy of at most {accuracy}"

    def record(self) -> dict[str, Any]:
        """Returns the guarantee as JSON values; an end that is not finite is null."""
        ends = (self.epsilon.lower, self.epsilon.upper) if self.epsilon else (math.inf, math.inf)
        lower, upper = (end if math.isfinite(end) else None for end in ends)
        advantage, mechanism = self.attack_advantage, self.mechanism
        sums, clip = mechanism.full_sums, mechanism.l2_clip_norm
        return {
            "guarantee": self.sentence(),
            "epsilon_lower": lower,
            "epsilon_upper": upper,
            "delta": self.delta,
            "attack_advantage_lower": advantage and advantage.lower,
            "attack_advantage_upper": advantage and advantage.upper,
            "attack_accuracy_upper": advantage and attack_accuracy(advantage).upper,
            "adjacency": ADJACENCY,
            "unit": self.unit,
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_clip_norm": clip if math.isfinite(clip) else None,
            "noise": noise_record(mechanism.noise),
            "full_sums": dataclasses.asdict(sums) if sums else None,
            "lazy_tables": self.lazy_tables,
            "initial_names": list(self.initial_names),
            "epsilon_upper_together": self._upper_together(),
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
        }


INDEPENDENT = "independent noise"


def words_on(noise: Mapping[str, Any]) -> str:
    """Returns what a noise is called, of which this is the description.

    >>> words_on({"name": "banded toeplitz", "coefficients": [4, 3]})
    'BandedToeplitz noise of 2 bands'
    """
    try:
        law = noise_from_record(noise)
    except ValueError:  # of a module that is not imported here
        return f"{noise.get('name')} noise"
    return str(law) if law.bands > 1 else INDEPENDENT
