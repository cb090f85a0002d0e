"""The profile of a mechanism with truncated batches, summed from the cases of `truncation`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accounting.profile import Bound, ComposesWithGaussian, Profile, Question, wanted_width
from accounting.roots import point_near_root

_UP = 1e-9
"""Outward rounding of logarithms of probabilities."""
_SHARPER = 10.0, 0.5, 0.03
"""Relative widths for the delta of a flagged run, which has a small probability."""
_NEGLIGIBLE = 1e-4
"""Share of delta below which a probability is charged whole."""
_FARTHEST = 1e6
_MARGIN = 1e-5
"""Share of delta that the lower end gives up without asking again."""
_FEW = 3e-4
"""Share of delta whose part in epsilon is not looked for."""
_BELOW_ONE = 1.0 - 1e-9
_NOTE = "the cost of cut batches is bounded, not exact: raise the maximum batch size"
_NO_DELTA_LEFT = (
    "the chance that a batch exceeds max_batch_size uses up delta: raise it or add noise"
)


class Flagged(NamedTuple):
    """Runs in which one overflowing batch keeps the example."""

    log_probability: float
    """Upper bound on the log of their probability."""
    profile: ComposesWithGaussian
    """Dominates such a run."""

    def charge(self, epsilon: float, negligible: float) -> float:
        """Bounds the delta that these runs add.

        The first bound of at most `negligible` is returned, or the sharpest: the probability alone,
        then a rough delta of such a run, then a sharper one.
        """
        weight = charged = _exp(self.log_probability)
        for tolerance in _SHARPER:
            if charged > negligible:
                question = Question("delta", epsilon, tolerance, upper_only=True)
                charged = weight * question.ask(self.profile).upper
        return charged


class Case(NamedTuple):
    """One proved upper bound: delta <= `profile` + sum of `flagged` + e^`log_rest`."""

    profile: ComposesWithGaussian
    """Dominates a run in which no overflowing batch keeps the example."""
    flagged: tuple[Flagged, ...]
    log_rest: float
    """Upper bound on the log of the probability of all other runs."""
    fuller: Flagged | None = None
    """Runs in which some bins are full, and none of them keeps the example: fewer bins are left."""

    @property
    def log_spent(self) -> float:
        """Log of the probability that `profile` does not cover."""
        return log_sum([self.log_rest, *(event.log_probability for event in self.flagged)])

    def with_gaussian_release(self, noise_multiplier: float) -> Case:
        """Returns the bound with a Gaussian release in every part."""

        def beside(part: Any) -> Any:
            return part._replace(profile=part.profile.with_gaussian_release(noise_multiplier))

        flagged = tuple(map(beside, self.flagged))
        return beside(self)._replace(flagged=flagged, fuller=self.fuller and beside(self.fuller))

    def charge(self, epsilon: float, delta: float) -> float:
        """Bounds the delta beside `profile`'s.

        Args:
          epsilon: Epsilon >= 0 at which delta is bounded.
          delta: Size of the total, which decides how sharply the events are priced.
        """
        total = _exp(self.log_rest)
        for event in (*self.flagged, *([self.fuller] if self.fuller else [])):
            total += event.charge(epsilon, _NEGLIGIBLE * delta)
        return total * (1.0 + _UP)

    def upper_epsilon(self, question: Question, start: float) -> float:
        """Returns an epsilon whose total delta is as asked.

        If c = charge(e), then the larger of e and epsilon_0(delta - c) suffices, at any e: it is
        least where both are equal.

        Args:
          question: Asks for the epsilon at a delta.
          start: Point near the answer, better below.
        """
        delta = question.at
        if _exp(self.log_rest) * (1.0 + _UP) >= delta:
            return math.inf
        charged = needed = least = math.inf

        def excess(at: float) -> float:
            nonlocal charged, needed, least
            charge = self.charge(at, delta)
            if not charge <= charged <= charge + _FEW * delta:
                charged, unspent = charge, (delta - charge) * (1.0 - _UP)
                needed = (
                    question._replace(at=unspent).ask(self.profile).upper
                    if unspent > 0
                    else math.inf
                )
            least = min(least, max(at, needed))
            return needed - at

        point_near_root(
            excess, start, lambda at: 0.3 * wanted_width(question.tolerance, at),
            low=0.0, farthest=_FARTHEST,
        )  # fmt: skip
        return least


@dataclass(frozen=True)
class TruncatedProfile(Profile):
    r"""The profile of a mechanism whose batches are cut to a maximum size, at random.

    .. math:: \delta(\epsilon) \le \delta_0(\epsilon) + \sum_i p_i \delta_i(\epsilon) + r, \qquad
        \delta(\epsilon) \ge (1 - x) \delta_{\text{below}}(\epsilon - \log(1 - x)) - e^\epsilon \rho

    for each of several `cases` (delta_0 its `profile`, p_i and delta_i its `flagged`, r its
    rest), below = `profile`, log x = epsilon + `log_thinned` and log rho = `log_moved`. Made by
    `truncated_profile`.
    Proof: docs/explanation/truncated-batches.md.

    Attributes:
      profile: The mechanism without the cut; a concrete pair attains its lower end.
      cases: Proved upper bounds, the least rest last.
      log_thinned: Log of the largest share that the cut takes from a weight of the pair's mixture.
      log_moved: Log of the largest distance that the cut moves the pair's laws.
    """

    profile: ComposesWithGaussian
    cases: tuple[Case, ...]
    log_thinned: float = -math.inf
    log_moved: float = -math.inf

    @property
    def log_spent(self) -> float:
        """Log of the most delta that truncation costs, at any noise and epsilon."""
        return min(case.log_spent for case in self.cases)

    def with_gaussian_release(self, noise_multiplier: float) -> TruncatedProfile:
        """Returns the profile with a further Gaussian release.

        The truncation is paid for once.
        """
        cases = tuple(case.with_gaussian_release(noise_multiplier) for case in self.cases)
        beside = self.profile.with_gaussian_release(noise_multiplier)
        return dataclasses.replace(self, profile=beside, cases=cases)

    def answer(self, question: Question) -> Bound:
        """Answers by the case whose rest matters no more, or is least."""
        if question.wanted == "epsilon":
            bound = self._epsilon(question)
            if question.upper_only:
                return bound
            if question.width(bound) < bound.width < 4.0 * question.width(bound):
                bound = bound.intersection(self._epsilon(question, 0.3))
        else:
            bound = self._delta(question)
        wide = not question.upper_only and bound.width > question.width(bound) and not bound.note
        note = _NO_DELTA_LEFT if math.isinf(bound.upper) else _NOTE
        return dataclasses.replace(bound, note=note) if wide else bound

    def _delta(self, question: Question) -> Bound:
        inner = question.ask(self.profile)
        least = inner.upper if question.upper_only else inner.lower
        case = self._case(least)
        upper = inner.upper if case.profile == self.profile else question.ask(case.profile).upper
        upper = min(1.0, _above(upper + case.charge(question.at, least)))
        if question.upper_only:
            return Bound.resting_on(inner, 0.0, upper)
        moved, shift = self._lost(question.at)
        lower = _below((inner.lower - math.expm1(min(shift, 1.0))) * (1.0 - 1e-15) - moved)
        if _MARGIN * inner.lower < shift < math.inf:
            # A smaller epsilon would have a larger delta: the sum is rounded up.
            below = question._replace(at=_above(question.at + shift)).ask(self.profile)
            lower = max(lower, _below(below.lower * math.exp(-shift) * (1.0 - 1e-15) - moved))
        lower = max(0.0, lower)
        return Bound.resting_on(inner, lower, max(lower, upper))

    def _case(self, delta: float) -> Case:
        """Returns the first case whose rest is negligible at `delta`, or the one of the least."""
        few = (case for case in self.cases if _exp(case.log_rest) <= 1e-3 * delta)
        return next(few, self.cases[-1])

    def _epsilon(self, question: Question, share: float = 1.0) -> Bound:
        """Bounds epsilon by answers that are as sharp as a share of the tolerance."""
        delta, tolerance = question.at, share * question.tolerance
        question, case = question._replace(tolerance=tolerance), self._case(delta)
        if question.upper_only:
            inner = question.ask(self.profile)
            return Bound.resting_on(inner, 0.0, case.upper_epsilon(question, 0.98 * inner.upper))
        below = self.profile.epsilon(min((1.0 + _MARGIN) * delta, _BELOW_ONE), tolerance)
        upper = case.upper_epsilon(question, below.lower)
        lower = self._lower_epsilon(delta, below, tolerance)
        return Bound.resting_on(below, lower, max(lower, upper))

    def _lost(self, epsilon: float) -> tuple[float, float]:
        """Returns e^epsilon rho, and -log(1 - x), which is infinite where x >= 1."""
        moved = _exp(epsilon + self.log_moved) * (1.0 + _UP)
        thinned = _exp(epsilon + self.log_thinned) * (1.0 + _UP)
        return moved, -math.log1p(-thinned) if thinned < 1.0 else math.inf

    def _lower_epsilon(self, delta: float, below: Bound, tolerance: float) -> float:
        """Returns a lower end: a point below which the pair's delta is above `delta`.

        Args:
          delta: The delta asked for.
          below: Epsilon of `profile` at (1 + _MARGIN) `delta`.
          tolerance: Relative width of further deltas.
        """
        lower = 0.0

        def excess(most: float) -> float:
            nonlocal lower
            moved, shift = self._lost(most)
            needed = (delta + moved) * math.exp(min(shift, 700.0)) * (1.0 + 2e-15)
            if needed >= _BELOW_ONE:
                return -most
            uncut = below
            if needed > (1.0 + _MARGIN) * delta:
                uncut = self.profile.epsilon(needed, tolerance)
            proved_epsilon = _below(uncut.lower - shift)
            lower = max(lower, min(most, proved_epsilon))
            return proved_epsilon - most

        point_near_root(excess, below.lower, lambda at: 0.3 * wanted_width(tolerance, at), low=0.0)
        return lower


def _above(value: float) -> float:
    return math.nextafter(value, math.inf)


def _below(value: float) -> float:
    return math.nextafter(value, -math.inf)


def _exp(log_value: float) -> float:
    """Returns exp, rounded up: 0 for -inf alone."""
    if log_value == -math.inf:
        return 0.0
    return math.exp(min(log_value, 700.0)) * (1.0 + 1e-12) + 5e-324


def log_sum(logs: Sequence[float]) -> float:
    """Returns the log of the sum of numbers, from their logs."""
    largest = max(logs)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in logs))
