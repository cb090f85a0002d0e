"""Bounds, and the protocol of every privacy profile: delta at an epsilon, epsilon at a delta."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from accounting.checks import check_delta, check_epsilon, check_guarantee_delta
from accounting.roots import falling_root, log_excess

Direction = Literal["remove", "add"]
"""Order of a pair (P, Q): the example's row against zeros ('remove'), or the reverse."""

EPSILON_TOLERANCE = 1e-3
"""Default distance, in epsilon, of the two ends of a certified bound.

It is relative to an epsilon below 1: see `wanted_width`.
"""

_SMALLEST_EPSILON = 1e-12
"""No search tells an epsilon below this from 0."""

THREE_DIGITS = ".3g"
"""Format of every end of an interval that people read: upper ends go up, lower ends down."""

_SPEC = re.compile(r"\.(\d+)([efg])")


class ContradictoryBounds(RuntimeError):
    """A lower bound above an upper one: at least one is wrong, and neither may be used.

    Each end is rounded outward by its own error, so that roundings alone cannot make two ends
    cross. It is an error of this program, never of its input.
    """


@dataclass(frozen=True)
class Bound:
    """An interval that contains the truth: truth in [lower, upper].

    Formatting rounds outward, so that a printed upper end is never below the true one:

    >>> bound = Bound(0.40371, 0.40376)
    >>> print(bound)
    [0.403, 0.404]
    >>> bound.format_upper(".2e")
    '4.04e-01'

    Attributes:
      lower: No truth lies below it.
      upper: No truth lies above it; a guarantee may print this end if the confidence is 1.
      confidence: Probability with which the interval holds; 1.0 means proved.
      note: Why the interval is wider than requested; empty where it is not.

    Raises:
      ContradictoryBounds: If `lower` is above `upper`, or one of them is not a number.
      ValueError: If `confidence` is not in (0, 1].
    """

    lower: float
    upper: float
    confidence: float = 1.0
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "confidence"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.lower <= self.upper:
            raise ContradictoryBounds(
                f"a lower bound of {self.lower!r} contradicts an upper bound of {self.upper!r}: "
                "this is an error of the program, please report it; neither number may be used"
            )
        if not 0.0 < self.confidence <= 1.0:
            raise ValueError(f"confidence must be in (0, 1], got {self.confidence}")

    @classmethod
    def resting_on(cls, inner: Bound, lower: float, upper: float, note: str | None = None) -> Bound:
        """Returns a bound derived from `inner`, with its confidence.

        Where `inner` is not proved chance may make the two ends cross: the upper one gives way.

        Args:
          inner: Bound that the result rests on.
          lower: Lower end of the result.
          upper: Upper end of the result.
          note: Note of the result; by default the note of `inner`.
        """
        if inner.confidence < 1.0:
            upper = max(lower, upper)
        return cls(lower, upper, inner.confidence, inner.note if note is None else note)

    @classmethod
    def largest(cls, bounds: Iterable[Bound]) -> Bound:
        """Bounds the largest of one or more bounded numbers.

        >>> print(Bound.largest([Bound(1.0, 4.0), Bound(2.0, 3.0)]))
        [2.00, 4.00]
        """
        listed = list(bounds)
        return cls(
            max(bound.lower for bound in listed),
            max(bound.upper for bound in listed),
            1.0 - math.fsum(1.0 - bound.confidence for bound in listed),
            "; ".join(dict.fromkeys(bound.note for bound in listed if bound.note)),
        )

    def intersection(self, other: Bound) -> Bound:
        """Returns the bound with the sharper of both bounds' ends.

        >>> print(Bound(1.0, 4.0).intersection(Bound(2.0, 5.0)))
        [2.00, 4.00]
        """
        return replace(self, lower=max(self.lower, other.lower), upper=min(self.upper, other.upper))

    def covering(self, parts: Iterable[Bound]) -> Bound:
        """Returns this bound if no part lies above it.

        Raises:
          ContradictoryBounds: If the lower end of a part is above the upper end of the whole, and
            both are proved.
        """
        for part in parts:
            if self.upper < part.lower and self.confidence == part.confidence == 1.0:
                raise ContradictoryBounds(
                    f"an upper bound of {self.upper!r} on a whole contradicts a lower bound of "
                    f"{part.lower!r} on a part of it: this is an error of the program, please "
                    "report it; neither number may be used"
                )
        return self

    @property
    def width(self) -> float:
        """Distance between the two ends; 0 for equal infinities."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower

    def format_lower(self, spec: str = THREE_DIGITS) -> str:
        """Formats the lower end, rounded down.

        `spec` is '.Nf', '.Ne' or '.Ng'.
        """
        return _round_outward(self.lower, spec, up=False)

    def format_upper(self, spec: str = THREE_DIGITS) -> str:
        """Formats the upper end, rounded up.

        `spec` is '.Nf', '.Ne' or '.Ng'.
        """
        return _round_outward(self.upper, spec, up=True)

    def __format__(self, spec: str) -> str:
        """Formats as '[lower, upper]', rounded outward; `spec` is '.Nf', '.Ne' or '.Ng'."""
        spec = spec or THREE_DIGITS
        return f"[{self.format_lower(spec)}, {self.format_upper(spec)}]"

    def __str__(self) -> str:
        return format(self)


def _round_outward(value: float, spec: str, *, up: bool) -> str:
    """Formats `value` so that the decimal that is printed is >= it (up) or <= it (down)."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"a Bound is formatted by '.Nf', '.Ne' or '.Ng', got {spec!r}")
    if not math.isfinite(value):
        return str(value)
    digits, kind = int(match[1]), match[2]
    exact, context = Decimal(value), Context(400, ROUND_CEILING if up else ROUND_FLOOR)
    places = max(digits - 1, 0) if kind == "g" else digits  # after the first digit or the point
    place = (0 if kind == "f" else exact.adjusted()) - places
    printed = exact.quantize(Decimal(1).scaleb(place), context=context)
    # Decimal writes 4.04e-1 where float writes 4.04e-01.
    return re.sub(r"e([+-])(\d)$", r"e\g<1>0\2", format(printed, spec))


@runtime_checkable
class PrivacyProfile(Protocol):
    """The curve delta(epsilon) = sup over neighbours, events of P(event) - e^epsilon Q(event)."""

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon`.

        A closed form ignores the tolerance.

        Args:
          epsilon: Epsilon >= 0.
          tolerance: Width, relative to delta, at which a profile that refines a grid may stop.
        """
        ...

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon that holds with `delta`.

        A closed form ignores the tolerance.

        Args:
          delta: Delta in (0, 1).
          tolerance: Width at which a profile that refines a grid may stop: in epsilon, and relative
            to an epsilon below 1.
        """
        ...


@runtime_checkable
class ComposesWithGaussian(PrivacyProfile, Protocol):
    """A profile that knows its own product with a Gaussian release."""

    def with_gaussian_release(self, noise_multiplier: float) -> ComposesWithGaussian:
        """Returns the profile with a further Gaussian release of sensitivity 1."""
        ...


Curve = Callable[[float], float]
"""A bound on delta from one side, as a function of epsilon."""


class Question(NamedTuple):
    """Asks a profile for delta at the epsilon `at`, or for epsilon at the delta `at`."""

    wanted: Literal["delta", "epsilon"]
    at: float
    tolerance: float = EPSILON_TOLERANCE
    upper_only: bool = False
    """True if the lower end of the answer is not needed and may be 0."""

    def ask(self, profile: PrivacyProfile) -> Bound:
        """Returns the profile's answer."""
        bound = profile.delta if self.wanted == "delta" else profile.epsilon
        inherited = getattr(bound, "__func__", None) in (Profile.delta, Profile.epsilon)
        if isinstance(profile, Profile) and inherited:
            return profile.answer(self)
        return bound(self.at, self.tolerance)

    def upper_end(self, curve: Curve, resolution: float = 1e-12, start: float = 1.0) -> float:
        """Returns the answer's upper end by a curve from above.

        Args:
          curve: Bound on the profile's delta from above.
          resolution: Width of the search for epsilon.
          start: First epsilon of the search.
        """
        if self.wanted == "delta":
            return min(1.0, curve(self.at))
        return self._crossing(curve, resolution, start)[1]

    def lower_end(self, curve: Curve, resolution: float = 1e-12) -> float:
        """Returns the answer's lower end by a curve from below.

        Args:
          curve: Bound on the profile's delta from below.
          resolution: Width of the search for epsilon.
        """
        if self.wanted == "delta":
            return max(0.0, curve(self.at))
        return self._crossing(curve, resolution)[0]

    def _crossing(self, curve: Curve, resolution: float, start: float = 1.0) -> tuple[float, float]:
        """Returns a point where `curve` is above the delta, or 0, and one where it is not."""
        if curve(0.0) <= self.at:
            return 0.0, 0.0

        def enough(epsilon: float) -> float:
            if epsilon <= _SMALLEST_EPSILON:
                return math.inf
            return max(wanted_width(resolution, epsilon), 1e-14 * epsilon)

        return falling_root(lambda e: log_excess(curve(e), self.at), start, enough, low=0.0)

    def between(self, lower: Curve, upper: Curve) -> Bound:
        """Returns the answer of a profile between two curves.

        Args:
          lower: Bound on the profile's delta from below.
          upper: Bound on the profile's delta from above.
        """
        return Bound(self.lower_end(lower), self.upper_end(upper))

    def width(self, bound: Bound) -> float:
        """Returns the width at which `bound` is sharp enough."""
        if self.wanted == "epsilon":
            return wanted_width(self.tolerance, bound.upper)
        return self.tolerance * (bound.upper if self.upper_only else bound.lower)


class Profile(abc.ABC):
    """A `PrivacyProfile` that answers both questions in one way."""

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon`.

        Args:
          epsilon: Epsilon >= 0.
          tolerance: Width that is sharp enough, relative to delta.
        """
        return self.answer(Question("delta", check_epsilon(epsilon), tolerance))

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon that holds with `delta`.

        Args:
          delta: Delta in (0, 1).
          tolerance: Width that is sharp enough: in epsilon, and relative to an epsilon below 1.
        """
        return self.answer(Question("epsilon", check_delta(delta), tolerance))

    @abc.abstractmethod
    def answer(self, question: Question) -> Bound:
        """Answers a question whose epsilon or delta was checked."""


@dataclass(frozen=True)
class UpperEnd(Profile):
    """The upper end of one profile and the lower end of another one, or 0 and a note that says so.

    >>> from accounting import GaussianProfile
    >>> UpperEnd(GaussianProfile(2.0)).delta(1.0).lower
    0.0

    Attributes:
      profile: Bounds the mechanism's from above.
      below: Bounds it from below; None where no lower end is proved.
    """

    profile: PrivacyProfile
    below: PrivacyProfile | None = None

    def answer(self, question: Question) -> Bound:
        """Answers by both profiles."""
        above = question.ask(self.profile)
        if question.upper_only:
            return replace(above, lower=0.0)
        least = Bound(0.0, 0.0, note="no lower end is proved")
        if self.below is not None:
            least = question.ask(self.below)
        notes = dict.fromkeys(note for note in (above.note, least.note) if note)
        confidence = above.confidence + least.confidence - 1.0
        return Bound(least.lower, above.upper, confidence, "; ".join(notes))


def proved(bound: Bound) -> Bound:
    """Returns `bound` if it is proved: a confidence holds for one question only."""
    if bound.confidence < 1.0:
        raise ValueError("a mechanism's profile must be proved, not estimated with some confidence")
    return bound


def epsilon(profile: PrivacyProfile, delta: float) -> Bound:
    """Bounds the smallest epsilon that `profile` guarantees at `delta`.

    Args:
      profile: Profile of the mechanism.
      delta: Delta of the guarantee, in (0, 0.1).

    Raises:
      TypeError: If `profile` is none, such as a sampler's method that returns one.
      ValueError: If `delta` is not in (0, 0.1), see `check_guarantee_delta`.
    """
    if not hasattr(profile, "epsilon"):
        kind = type(profile).__name__
        raise TypeError(
            f"epsilon takes a profile, as sampler.privacy(1.0) returns it, got a {kind}"
        )
    return profile.epsilon(check_guarantee_delta(delta))


def wanted_width(tolerance: float, epsilon: float) -> float:
    """Returns the width at which a bound near `epsilon` is sharp enough.

    >>> wanted_width(1e-3, 5.0), wanted_width(1e-3, 0.01)
    (0.001, 1e-05)

    Args:
      tolerance: Width in epsilon, and relative to an epsilon below 1.
      epsilon: About the bounded epsilon.
    """
    return tolerance * min(1.0, max(epsilon, _SMALLEST_EPSILON))


def format_delta(delta: float) -> str:
    """Formats the delta of a guarantee, rounded up to three digits.

    >>> format_delta(1 / 37_000_000), format_delta(1e-5)
    ('2.71e-08', '1e-05')
    """
    nearest = f"{delta:.3g}"
    if float(nearest) >= delta:
        return nearest
    return f"{float(_round_outward(delta, THREE_DIGITS, up=True)):.3g}"
