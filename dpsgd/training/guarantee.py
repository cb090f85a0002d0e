"""The guarantee of a run, as it may be printed: an interval, its terms, and what it leaves out."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accounting import (
    Bound,
    attack_accuracy,
    attack_advantage,
    check_guarantee_delta,
    epsilon,
    format_delta,
    implied_advantage,
)
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.queries import FullSums
from dpsgd.noise.base import Independent
from dpsgd.noise.registry import noise_from_record, noise_record
from samplers.base import stated_law
from samplers.settings import name_of

ADJACENCY = "zero-out"
"""One unit is replaced by the null example, whose gradient is 0; how many there are is public."""

NOT_COVERED = (
    "choices of hyper-parameters that looked at private data and are not counted above",
    "the diagnostics of training (losses, clipped fractions, batch sizes, metrics on its rows)",
    "evaluation on rows that were not training examples",
    "side channels, such as how long a step takes",
)

FLOATING_POINT = (
    "floating point: the guarantee is that of exact sums and exact Gaussian noise; sums of clipped "
    "gradients in 32 bits are rounded, to some 1e-7 of themselves at each addition, and noise from "
    "a fast generator in 32 bits is Gaussian to about 1e-6 (secure noise leaves none of this open)"
)
"""What is not covered either, unless noise is secure: `dpsgd.noise.gaussian` says why."""


FOREIGN_CALLS = (
    "host calls and foreign functions of the loss, which may carry private rows from one example "
    "to another"
)
"""What is not covered where a loss makes such calls (`dpsgd.gradients.isolation`)."""

LAZY_TABLES = (
    "tables are lazy: a row got the noise of the steps in which no batch read it when it was next "
    "read, or before it was released, with the law of noise that comes at once and so the same "
    "privacy cost; training states before that noise is drawn are not covered: keep them secret"
)
"""What a reader should know of tables whose noise comes late (`dpsgd.engine.lazy.group`)."""


UNKNOWN = Bound(0.0, 1.0)
"""Of a total variation distance, what is known without a look at the profile."""


@dataclass(frozen=True)
class Guarantee:
    """What (epsilon, delta)-differential privacy a mechanism gives the units in its training data.

    Attributes:
      epsilon: Interval that contains the mechanism's epsilon; its upper end is what is guaranteed.
        None where nothing is guaranteed; `void` then says why.
      delta: The delta at which epsilon is given.
      unit: What one neighbour differs in ('example' or 'user').
      adjacency: How it differs.
      noise_multiplier: Standard deviation of the noise over `l2_clip_norm`.
      l2_clip_norm: Bound on one unit's contribution to a step; infinite without clipping.
      secure_noise: Whether sums and noise were exact, so that floating point is covered.
      noise: What names its law, see `Noise.describe`.
      full_sums: The sums over all rows that the run ends in, if any, see `Mechanism`.
      lazy_tables: Whether the noise of tables comes late, which changes no number here.
      scope: What part of a run this is about, and on what condition; empty for a whole run.
      void: Why there is no guarantee, or empty.
      notes: What a reader should know about the interval.
      total_variation: Interval that contains the mechanism's delta(0), from its own profile.
      left_out: What it does not cover beside what no guarantee does.
      foreign_calls: Whether the loss may call the host and foreign functions.
    """

    epsilon: Bound | None
    delta: float
    unit: str
    adjacency: str
    noise_multiplier: float
    l2_clip_norm: float
    secure_noise: bool = False
    noise: Mapping[str, Any] = field(default_factory=Independent().describe)
    full_sums: FullSums | None = None
    lazy_tables: bool = False
    scope: str = ""
    void: str = ""
    notes: tuple[str, ...] = ()
    total_variation: Bound = UNKNOWN
    left_out: tuple[str, ...] = ()
    foreign_calls: bool = False

    def __post_init__(self) -> None:
        check_guarantee_delta(self.delta)

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        delta: float,
        *,
        unit: str = "",
        reproducible_noise: bool = False,
        lazy_tables: bool = False,
    ) -> Guarantee:
        """Returns the guarantee of a whole run of `mechanism` at `delta`.

        Args:
          mechanism: Sampler, sigma and C.
          delta: In (0, 0.1).
          unit: What is protected, see `BatchSampler.protected_unit`; by default as where every row
            of the data is an example.
          reproducible_noise: Whether the noise came from a seed that can be guessed.
          lazy_tables: Whether the noise of tables comes late.

        Raises:
          ValueError: if `delta` is not in (0, 0.1), or the sampler's privacy profile is not proved.
        """
        whole = cls._of(mechanism, delta, mechanism.num_steps, reproducible_noise)
        whole = dataclasses.replace(whole, unit=unit) if unit else whole
        return whole.with_lazy_tables() if lazy_tables else whole

    @classmethod
    def so_far(
        cls, mechanism: Mechanism, delta: float, *, steps: int, reproducible_noise: bool = False
    ) -> Guarantee:
        """Returns what the first `steps` steps of a run cost: the epsilon that is spent so far.

        Two numbers, of which each covers something else:

        * The *interval* is the cost of a run that stops after `steps` steps for reasons that no
          release has a part in: a plan, a clock, a machine that dies. Such a run releases its first
          `steps` updates, whose cost is `BatchSampler.privacy_of`.
        * For a stop that is decided by looking at the model, at a loss of public rows, or at other
          functions of the releases, it is none: that step was chosen among many, perhaps as the one
          that tells most about somebody. What holds then, whatever the rule, is the cost of
          the *whole run*, which the notes name: wherever it stops, all that is known is a function
          of the releases that the whole run would have made. So the budget that was planned is a
          privacy filter (R. Rogers, A. Roth, J. Ullman, S. Vadhan, Privacy Odometers and Filters,
          2016), and these intervals, read one after another, are not an odometer. Whoever looks at
          private rows to decide, training rows without noise among them, is covered by neither.

        Args:
          mechanism: Sampler, sigma and C of the whole run, as planned.
          delta: In (0, 0.1).
          steps: Steps that are done, at most `mechanism.num_steps`: for all of them, this is `of`.
          reproducible_noise: Whether the noise came from a seed that can be guessed.

        Raises:
          ValueError: if `steps` is out of range, and as for `of`.
        """
        steps, whole = operator.index(steps), mechanism.num_steps
        if not 0 <= steps <= whole:
            raise ValueError(f"steps must be in [0, {whole}], the run's number, got {steps}")
        return cls._of(mechanism, delta, steps, reproducible_noise)

    @classmethod
    def _of(
        cls, mechanism: Mechanism, delta: float, steps: int, reproducible_noise: bool
    ) -> Guarantee:
        void, scope, whole = "", "", mechanism.num_steps
        if reproducible_noise:
            void = "reproducible noise: whoever guesses the seed can subtract it"
        if mechanism.noise_multiplier == 0:
            void = "no noise was added"
        interval = None if void else _price(mechanism, delta, steps)
        notes: tuple[str, ...] = ()
        distance = UNKNOWN
        if interval is not None:
            notes = notes_on(mechanism, delta, interval)
            distance = _distance(mechanism, steps)
        if steps < whole:
            scope = f"the first {steps:,} of {whole:,} steps, if no release decides to stop there"
            if interval is not None:
                notes += (note_on_stopping(f"{_price(mechanism, delta, whole):.4f}"),)
        return cls(
            epsilon=interval,
            delta=delta,
            unit=mechanism.sampler.unit,
            adjacency=ADJACENCY,
            noise_multiplier=mechanism.noise_multiplier,
            l2_clip_norm=mechanism.l2_clip_norm,
            secure_noise=mechanism.noise.exact,
            noise=noise_record(mechanism.noise),
            full_sums=mechanism.full_sums,
            scope=scope,
            void=void,
            notes=notes,
            total_variation=distance,
        )

    def with_lazy_tables(self) -> Guarantee:
        """Returns this guarantee, of noise that comes at once, as that of a run with lazy tables.

        It is the same, as the law of what is flushed is: `dpsgd.engine.lazy.group` has the proof.
        """
        notes = self.notes if self.void else (*self.notes, LAZY_TABLES)
        return dataclasses.replace(self, lazy_tables=True, notes=notes)

    def stopped(self, steps: int, whole: int) -> Guarantee:
        """Returns this guarantee, of a whole run, as that of a run that was stopped.

        It costs no less: the decision to stop may depend on what was released, see `so_far`, and
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
        always = NOT_COVERED if self.secure_noise else (*NOT_COVERED, FLOATING_POINT)
        return (*self.left_out, *[FOREIGN_CALLS] * self.foreign_calls, *always)

    def sentence(self) -> str:
        """Returns the guarantee in one line."""
        if self.epsilon is None:
            return f"NO GUARANTEE: {self.void}"
        if math.isinf(self.epsilon.upper):
            return (
                f"NO GUARANTEE: no finite epsilon is certified at delta {format_delta(self.delta)}"
            )
        return (
            f"epsilon <= {self.epsilon.format_upper('.3g')} at delta {format_delta(self.delta)} "
            f"{f'for {self.scope} ' if self.scope else ''}"
            f"({self.adjacency} adjacency, unit: one {self.unit}{self._of_noise()}); "
            f"certified: epsilon in {self.epsilon:.4f}; "
            f"{self.attack()}{f'. NOT COVERED: {FOREIGN_CALLS}' if self.foreign_calls else ''}"
        )

    def _of_noise(self) -> str:
        words = words_on(self.noise)
        late = ", lazy tables" if self.lazy_tables else ""
        return late if words == INDEPENDENT else f", {words}{late}"

    def attack(self) -> str:
        """Returns what bounds a membership attack, or that nothing does, in words."""
        advantage = self.attack_advantage
        if advantage is None:
            return "nothing bounds the accuracy of a membership attack"
        accuracy = attack_accuracy(advantage).format_upper(".4f")
        return f"a membership attack with a fair prior has an accuracy of at most {accuracy}"

    def record(self) -> dict[str, Any]:
        """Returns the guarantee as JSON values; an end that is not finite is null."""
        ends = (self.epsilon.lower, self.epsilon.upper) if self.epsilon else (math.inf, math.inf)
        lower, upper = (end if math.isfinite(end) else None for end in ends)
        advantage = self.attack_advantage
        return {
            "guarantee": self.sentence(),
            "epsilon_lower": lower,
            "epsilon_upper": upper,
            "delta": self.delta,
            "attack_advantage_lower": advantage and advantage.lower,
            "attack_advantage_upper": advantage and advantage.upper,
            "attack_accuracy_upper": advantage and attack_accuracy(advantage).upper,
            "adjacency": self.adjacency,
            "unit": self.unit,
            "noise_multiplier": self.noise_multiplier,
            "l2_clip_norm": self.l2_clip_norm if math.isfinite(self.l2_clip_norm) else None,
            "secure_noise": self.secure_noise,
            "noise": dict(self.noise),
            "full_sums": dataclasses.asdict(self.full_sums) if self.full_sums else None,
            "lazy_tables": self.lazy_tables,
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
        }


def notes_on(mechanism: Mechanism, delta: float, price: Bound) -> tuple[str, ...]:
    """Returns what a reader should know about `price`: its own note, and its sampler's caveats."""
    caveats = mechanism.sampler.caveats(mechanism.noise_multiplier, delta)
    num_units = mechanism.sampler.num_units
    if delta >= 1 / num_units:
        caveats += (
            f"delta is not below 1 / {num_units:,}, one over the number of protected units: to "
            "publish one unit at random is as private; take a smaller delta",
        )
    if stated_law(mechanism.sampler) is None:
        caveats += (
            f"the sampler {name_of(type(mechanism.sampler))} is not audited: it states no law of "
            "its rows, so that its draws are not held against what is claimed",
        )
    if (sums := mechanism.full_sums) is not None:
        caveats += (
            f"the run ends in {sums}, such as those of a calibration: they are counted as its last "
            f"{sums.count} of {mechanism.num_steps:,} steps",
        )
    return (price.note, *caveats) if price.note else caveats


INDEPENDENT = "independent noise"


def words_on(noise: Mapping[str, Any]) -> str:
    """Returns what a noise is called, of which this is the description.

    >>> words_on({"name": "banded toeplitz", "coefficients": [4, 3]}), words_on({"name": "secure"})
    ('BandedToeplitz noise of 2 bands', 'independent noise')
    """
    try:
        law = noise_from_record(noise)
    except ValueError:  # of a module that is not imported here
        return f"{noise.get('name')} noise"
    return str(law) if law.bands > 1 else INDEPENDENT


def note_on_stopping(whole: str) -> str:
    """Returns what that of a part of a run does not cover; `whole`: epsilon of all of it."""
    return (
        "this is the privacy cost if the run stops here for reasons that do not depend on what it "
        "released; a stop decided by looking at the model costs what the whole run costs (epsilon "
        f"in {whole}), and one decided by losses or other diagnostics is not covered"
    )


def _once(compute: Callable[..., Bound]) -> Callable[..., Bound]:
    """Returns `compute(mechanism, ...)`, computed once however often a training loop asks."""
    remembered = functools.lru_cache(maxsize=256)(compute)

    @functools.wraps(compute)
    def bound(mechanism: Mechanism, *terms: Any) -> Bound:
        try:
            hash(mechanism)
        except TypeError:  # a sampler from elsewhere may hold arrays
            return compute(mechanism, *terms)
        return remembered(mechanism, *terms)

    return bound


@_once
def _price(mechanism: Mechanism, delta: float, steps: int) -> Bound:
    """Bounds what the first `steps` steps cost.

    Raises:
      ValueError: If the bound is not proved.
    """
    if steps == mechanism.num_steps:
        interval = epsilon(mechanism.privacy(), delta).covering(mechanism.parts(delta))
    elif steps == 0:
        interval = Bound(0.0, 0.0, note="no step was taken: nothing was released")
    else:
        part = epsilon(mechanism.privacy_of([range(steps)]), delta)
        note = "epochs that were entered count whole except under Poisson; no lower end is computed"
        note = f"{part.note}; {note}" if part.note else note
        interval = Bound(0.0, part.upper, part.confidence, note)
    if interval.confidence < 1:
        raise ValueError(
            f"epsilon {interval:.4f} holds only with confidence {interval.confidence}: an "
            "estimate is not a guarantee"
        )
    return interval


@_once
def _distance(mechanism: Mechanism, steps: int) -> Bound:
    """Bounds the total variation distance of the first `steps` steps, as `_price` does epsilon."""
    if steps == 0:
        return Bound(0.0, 0.0)
    whole = steps == mechanism.num_steps
    profile = mechanism.privacy() if whole else mechanism.privacy_of([range(steps)])
    found = attack_advantage(profile)
    if found.confidence < 1:
        return UNKNOWN
    return found if whole else Bound(0.0, found.upper)
