"""Guarantee of a run for printing: epsilon interval, terms and exclusions.

Its reading: docs/explanation/what-a-guarantee-says.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from accounting import Bound, attack_accuracy
from accounting.attack import implied_advantage
from accounting.checks import check_guarantee_delta
from accounting.profile import format_delta
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import INDEPENDENT

ADJACENCY = "zero-out"
"""Adjacency: the null example, with gradient 0, replaces one unit; the number of units is public.
"""

NOT_COVERED = (
    "choices of hyper-parameters that looked at private data and are not counted above",
    "the diagnostics of training (losses, clipped fractions, batch sizes, metrics on its rows)",
    "evaluation on rows that were not training examples",
    "side channels, such as how long a step takes",
    "floating point: the guarantee is that of exact sums and exact Gaussian noise; sums of clipped "
    "gradients in 32 bits are rounded, to some 1e-7 of themselves at each addition, and noise from "
    "a fast generator in 32 bits is Gaussian to about 1e-6",
)
"""Exclusions of every guarantee; on floating point see `dpsgd.core.gaussian`."""

FOREIGN_CALLS = (
    "host calls and foreign functions of the loss, which may carry private rows from one example "
    "to another"
)
"""Exclusion for losses with host and foreign calls (`dpsgd.gradients.isolation`)."""

NO_GUARANTEE = "NO GUARANTEE"
"""Text in place of a guarantee that does not exist."""

IF_INDEPENDENT = "if interruptions did not depend on what the run had released"
"""Condition of the first epsilon of an interrupted run, in sentences and under tables."""

UNKNOWN = Bound(0.0, 1.0)
"""Total variation distance that no profile bounds."""


def attack_in_words(advantage: Bound, unit: str) -> str:
    """States the largest accuracy of a membership attack.

    The attack's prior is fair: half of the games have the example.

    >>> attack_in_words(Bound(0.0, 0.1), "example").partition("whether ")[2]
    'a given example was used at most 55.1 % of the time'

    Args:
      advantage: Interval of the attack's largest advantage.
      unit: Unit of privacy ('example' or 'user').
    """
    percent = 100 * Decimal(attack_accuracy(advantage).format_upper())
    attacker = "someone who knows everything else can tell whether"
    return f"{attacker} a given {unit} was used at most {percent.normalize():f} % of the time"


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of a run for its training units.

    Only `dpsgd.core.cost.cost` creates it.

    Attributes:
      epsilon: Interval that contains the mechanism's epsilon; its upper end is guaranteed. None
        without a guarantee; `void` then states the reason.
      delta: Probability delta at which epsilon holds, in (0, 0.1).
      mechanism: Sampler, sigma, C, noise and full-batch queries of the run, or of its last attempt.
      unit: Unit in which neighbours differ ('example' or 'user').
      total_variation: Interval that contains the mechanism's delta(0), from its own profile.
      lazy_tables: True if noise of tables is deferred, which changes no number here.
      scope: Covered part of a run and its condition; empty for a whole run.
      void: Reason why there is no guarantee, or empty.
      notes: Notes on the interval for a reader.
      left_out: Exclusions beside the standard ones.
      initial_names: Names of the trained models that the run started from.
      together: Joint guarantee of the run and the initial model's, which holds for rows that
        trained the initial model; None if unknown.
      by_task: Exclusions that the task or the loss states, sentences.
      otherwise: Interval that holds if interruptions depended on what the run had released; None
        if nothing was interrupted.
      limits: Numbers of attempts, epochs and steps that `otherwise` needs fixed beforehand.
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
    initial_names: tuple[str, ...] = ()
    together: Guarantee | None = None
    by_task: tuple[str, ...] = ()
    otherwise: Bound | None = None
    limits: str = ""

    def __post_init__(self) -> None:
        check_guarantee_delta(self.delta)

    def stopped(self, steps: int, whole: int) -> Guarantee:
        """Returns the whole run's guarantee for a run stopped early.

        Stopping saves nothing: the decision to stop may depend on releases, see `cost`, and all
        releases are a function of the whole run's.

        Args:
          steps: Number of steps done.
          whole: Number of steps of the whole run.
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
        """Largest advantage of a membership attack; None without a guarantee.

        The attacker knows everything else and guesses if a unit was in the training data or zeroed
        out: see `accounting.attack` for the game and the proof. The upper end is the smaller of the
        profile's delta(0) and the bound that (epsilon, delta) alone implies.
        """
        if self.epsilon is None or math.isinf(self.epsilon.upper):
            return None
        distance = self.total_variation
        upper = min(distance.upper, implied_advantage(self.epsilon.upper, self.delta))
        return Bound.resting_on(distance, min(distance.lower, upper), upper)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Exclusions of the guarantee, sentences."""
        return (*self.left_out, *self.by_task, *NOT_COVERED)

    def sentence(self) -> str:
        """Returns the guarantee in one line."""
        if self.epsilon is None:
            return f"{NO_GUARANTEE}: {self.void}"
        if math.isinf(self.epsilon.upper):
            delta = format_delta(self.delta)
            return f"{NO_GUARANTEE}: no finite epsilon is certified at delta {delta}"
        exceptions = f". NOT COVERED: {'; '.join(self.by_task)}" if self.by_task else ""
        return (
            f"epsilon <= {self.epsilon.format_upper()}{self._of_interruptions(end=',')} "
            f"at delta {format_delta(self.delta)} "
            f"{f'for {self.scope} ' if self.scope else ''}"
            f"({ADJACENCY} adjacency, unit: one {self.unit}{self._of_noise()})"
            f"{self._of_initial()}{self._of_both()}certified: epsilon in {self.epsilon}; "
            f"{self.attack()}{exceptions}"
        )

    @property
    def conditional(self) -> bool:
        """True if `epsilon` and the attack's bound hold under `IF_INDEPENDENT` alone."""
        if self.otherwise is None or self.epsilon is None:
            return False
        return self.otherwise.upper > self.epsilon.upper

    def _of_both(self) -> str:
        return "if they did not, " if self.conditional else ""

    def _of_interruptions(self, condition: str = IF_INDEPENDENT, end: str = "") -> str:
        if self.otherwise is None:
            return ""
        if not self.conditional:
            return f", for {self.limits}{end}"
        return f" {condition}; otherwise <= {self.otherwise.format_upper()}, for {self.limits}{end}"

    def _of_initial(self) -> str:
        if not self.initial_names:
            return "; "
        if self.together is None:
            cost = "its cost adds to this"
        elif self.together.epsilon is None or math.isinf(self.together.epsilon.upper):
            cost = NO_GUARANTEE
        else:
            upper = self.together.epsilon.format_upper()
            names = " and ".join(self.initial_names)
            cost = f"epsilon <= {upper} (this run and {names} together)"
            condition = IF_INDEPENDENT.replace("the run", "the runs")
            cost += self.together._of_interruptions(condition)
        units = "rows" if self.unit == "example" else f"{self.unit}s"
        return (
            f" for {units} that did not train the initial model; for {units} that did, {cost}; for "
            f"the other {units}, "
        )

    def _of_noise(self) -> str:
        words = self.mechanism.noise.label
        late = ", lazy tables" if self.lazy_tables else ""
        return late if words == INDEPENDENT else f", {words}{late}"

    def attack(self) -> str:
        """Returns the bound on a membership attack in words."""
        advantage = self.attack_advantage
        if advantage is None:
            return "nothing bounds how often a membership attack is right"
        return attack_in_words(advantage, self.unit)

    def record(self) -> dict[str, Any]:
        """Returns the guarantee for `json.dumps`, with None for infinite ends."""
        advantage, mechanism = self.attack_advantage, self.mechanism
        sums, together = mechanism.full_sums, self.together.record() if self.together else {}
        return {
            "guarantee": self.sentence(),
            "epsilon_lower": self.epsilon and _finite(self.epsilon.lower),
            "epsilon_upper": self.epsilon and _finite(self.epsilon.upper),
            "epsilon_upper_otherwise": self.otherwise and _finite(self.otherwise.upper),
            "delta": self.delta,
            "attack_advantage_lower": advantage and advantage.lower,
            "attack_advantage_upper": advantage and advantage.upper,
            "attack_accuracy_upper": advantage and attack_accuracy(advantage).upper,
            "adjacency": ADJACENCY,
            "unit": self.unit,
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_clip_norm": _finite(mechanism.l2_clip_norm),
            "noise": mechanism.noise.record(),
            "full_sums": dataclasses.asdict(sums) if sums else None,
            "lazy_tables": self.lazy_tables,
            "initial_names": list(self.initial_names),
            "epsilon_upper_together": together.get("epsilon_upper"),
            "epsilon_upper_together_otherwise": together.get("epsilon_upper_otherwise"),
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
