"""The guarantee of a run, as it may be printed: an interval, its terms, and what it leaves out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accounting import Bound, epsilon, format_delta
from dpsgd.mechanism import Mechanism

ADJACENCY = "zero-out"
"""One unit is replaced by the null example, whose gradient is 0; how many there are is public."""

NOT_COVERED = (
    "the choice of hyper-parameters, where it looked at private data",
    "the diagnostics of training (losses, clipped fractions, batch sizes)",
    "evaluation on rows that were not training examples",
    "side channels, such as how long a step takes",
)

FLOATING_POINT = (
    "floating point: the price is that of exact sums and exact Gaussian noise; sums of clipped "
    "gradients in 32 bits are rounded, to some 1e-7 of themselves at each addition, and noise from "
    "a fast generator in 32 bits is Gaussian to about 1e-6 (secure noise leaves none of this open)"
)
"""What the price does not cover either, unless noise is secure: `dpsgd.noise` says why."""


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
      void: Why there is no guarantee, or empty.
      notes: What a reader should know about the interval.
    """

    epsilon: Bound | None
    delta: float
    unit: str
    adjacency: str
    noise_multiplier: float
    l2_clip_norm: float
    secure_noise: bool = False
    void: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, mechanism: Mechanism, delta: float, *, reproducible_noise: bool = False
    ) -> Guarantee:
        """Returns the guarantee of a whole run of `mechanism` at `delta`.

        Args:
          mechanism: Sampler, sigma and C.
          delta: In (0, 1).
          reproducible_noise: Whether the noise came from a seed that can be guessed.

        Raises:
          ValueError: if `delta` is not in (0, 1), or the sampler's price is not proved.
        """
        void = ""
        if reproducible_noise:
            void = "reproducible noise: whoever guesses the seed can subtract it"
        if mechanism.noise_multiplier == 0:
            void = "no noise was added"
        interval = None if void else epsilon(mechanism.privacy(), delta)
        notes: tuple[str, ...] = ()
        if interval is not None:
            if interval.confidence < 1:
                raise ValueError(
                    f"epsilon {interval:.4f} holds only with confidence {interval.confidence}: an "
                    "estimate is not a guarantee"
                )
            notes = notes_on(mechanism, delta, interval)
        return cls(
            epsilon=interval,
            delta=delta,
            unit=mechanism.sampler.unit,
            adjacency=ADJACENCY,
            noise_multiplier=mechanism.noise_multiplier,
            l2_clip_norm=mechanism.l2_clip_norm,
            secure_noise=mechanism.secure_noise,
            void=void,
            notes=notes,
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the guarantee leaves out, in sentences."""
        return NOT_COVERED if self.secure_noise else (*NOT_COVERED, FLOATING_POINT)

    def sentence(self) -> str:
        """Returns the guarantee in one line."""
        if self.epsilon is None:
            return f"NO GUARANTEE: {self.void}"
        if math.isinf(self.epsilon.upper):
            return (
                f"NO GUARANTEE: no finite epsilon is certified at delta {format_delta(self.delta)}"
            )
        return (
            f"epsilon in {self.epsilon:.4f} at delta {format_delta(self.delta)} "
            f"({self.adjacency} adjacency, unit: one {self.unit})"
        )

    def record(self) -> dict[str, Any]:
        """Returns the guarantee as JSON values; an end that is not finite is null."""
        ends = (self.epsilon.lower, self.epsilon.upper) if self.epsilon else (math.inf, math.inf)
        lower, upper = (end if math.isfinite(end) else None for end in ends)
        return {
            "guarantee": self.sentence(),
            "epsilon_lower": lower,
            "epsilon_upper": upper,
            "delta": self.delta,
            "adjacency": self.adjacency,
            "unit": self.unit,
            "noise_multiplier": self.noise_multiplier,
            "l2_clip_norm": self.l2_clip_norm if math.isfinite(self.l2_clip_norm) else None,
            "secure_noise": self.secure_noise,
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
        }


def notes_on(mechanism: Mechanism, delta: float, price: Bound) -> tuple[str, ...]:
    """Returns what a reader should know about `price`: its own note, and its sampler's caveats."""
    caveats = mechanism.sampler.caveats(mechanism.noise_multiplier, delta)
    return (price.note, *caveats) if price.note else caveats
