"""The privacy cost of cutting an oversize batch down to a maximum size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import scipy

from accounting.profile import Bound, ComposesWithGaussian, Profile, Question, wanted_width
from accounting.profiles.balls_and_bins import AssignmentsProfile, BallsAndBinsProfile
from accounting.profiles.bins_grids import Assignment
from accounting.profiles.gaussian import GaussianProfile, composed_noise
from accounting.roots import point_near_root

_BINOMIAL_ERROR = 1e-9
"""Bound on the relative error of a binomial tail."""
_SMALLEST_TAIL = 1e-300
_UP = 1e-9
"""Outward rounding of logarithms of probabilities."""

_SHARPER = 10.0, 0.5, 0.03
"""Relative widths at which the delta of a flagged run is asked for: its probability is small."""
_NEGLIGIBLE = 1e-4
"""Share of delta below which a probability is charged whole."""
_MOST_FULL_BINS = 5
_FEW_BINS = 3e-4
"""Share of bins whose loss does not matter to epsilon: they are simply taken away."""
_FARTHEST = 1e6
_MARGIN = 1e-5
"""Share of delta that the lower end gives up without asking again."""
_FEW = 3e-4
"""Share of delta whose part in epsilon is not looked for."""
_BELOW_ONE = 1.0 - 1e-9
_SMALL_DELTA = math.log(1e6)
"""Logs of a share of delta and of a probability that hurt a lower end alike differ by this."""
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
        return _log_sum([self.log_rest, *(event.log_probability for event in self.flagged)])

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
    `truncated_steps`, `truncated_bins` and `truncated_users`.
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
          tolerance: How sharply another one is asked for.
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


@dataclass(frozen=True)
class Cap:
    """A batch of at most B of m examples, drawn with probability q each.

    Attributes:
      num_examples: m, the largest number that may take part in one step of one shard.
      sampling_prob: q.
      max_batch_size: B < m; a larger batch is cut to B, uniformly at random.
    """

    num_examples: int
    sampling_prob: float
    max_batch_size: int

    def log_overflow(self) -> float:
        """Returns log Pr[Binomial(m, q) > B], of an overflow."""
        return log_overflow_probability(self.num_examples, self.sampling_prob, self.max_batch_size)

    def log_full(self) -> float:
        """Returns log Pr[Binomial(m - 1, q) >= B].

        That is the probability that other examples fill the batch.
        """
        if self.max_batch_size == 0:
            return 0.0
        return log_overflow_probability(
            self.num_examples - 1, self.sampling_prob, self.max_batch_size - 1
        )

    def log_kept(self) -> float:
        """Bounds log Pr[an example is kept in an overflowing batch].

        It is drawn, its batch overflows, and the cut keeps it. It holds for any smaller number of
        examples as well.
        """
        m, rate, cap = self.num_examples, self.sampling_prob, self.max_batch_size
        if cap >= m * rate:
            return _log(cap / m) + self.log_overflow() + _UP
        return _log(rate) + self.log_full() + _UP

    def log_dropped_if_drawn(self) -> float:
        """Bounds log Pr[a drawn example is dropped]."""
        m, rate, cap = self.num_examples, self.sampling_prob, self.max_batch_size
        most = float(m - cap)
        if rate < 1.0:
            # The excess is at most geometric: binomial ratios fall.
            ratio = (m - cap - 1) / (cap + 2) * rate / (1.0 - rate)
            if ratio < 1.0:
                most = min(most, 1.0 / (1.0 - ratio))
        return min(0.0, self.log_overflow() + math.log(most / (m * rate))) + _UP


def truncated_steps(
    profile: ComposesWithGaussian, cap: Cap, steps: int, noise_multiplier: float, *, exact: bool
) -> TruncatedProfile:
    """Returns the profile of `steps` independent cut batches.

    Args:
      profile: The mechanism without the cut.
      cap: The cut.
      steps: Steps of one example's group.
      noise_multiplier: s of one release.
      exact: Whether a pair whose other rows are zero attains the lower end of `profile`.
    """
    log_pi = math.log(steps) + cap.log_kept()
    flagged = Flagged(log_pi, profile.with_gaussian_release(noise_multiplier))
    case = Case(profile, (flagged,), 2.0 * log_pi - math.log(2.0))
    if exact:
        return TruncatedProfile(profile, (case,), math.log(steps) + cap.log_dropped_if_drawn())
    log_moved = math.log(2.0 * steps) + cap.log_overflow() + _UP
    return TruncatedProfile(profile, (case,), log_moved=log_moved)


def truncated_bins(profile: BallsAndBinsProfile | AssignmentsProfile, cap: Cap) -> TruncatedProfile:
    """Returns the profile of bins whose batches are cut.

    All of the bins or some of them are released.

    Args:
      profile: The mechanism without the cut; each of its assignments has 1 / q bins.
      cap: The cut.
    """
    draws, log_full = profile.assignments, cap.log_full() + _UP
    sizes = [sum(bins for times, bins in assignment if times) for assignment, _ in draws]
    counts, times = [count for _, count in draws], [max(assignment)[0] for assignment, _ in draws]
    # The draw of several epochs is flagged in all of them at once.
    log_flags = [
        log_full if several > 1 else math.log(size) + cap.log_kept()
        for several, size in zip(times, sizes, strict=True)
    ]
    log_pi = _log_sum(
        [math.log(n) + log_flag for n, log_flag in zip(counts, log_flags, strict=True)]
    )
    log_twice = 2.0 * log_pi - math.log(2.0) if sum(counts) > 1 else -math.inf
    log_some = _log_sum(
        [math.log(n * size) + log_full for n, size in zip(counts, sizes, strict=True)]
    )
    sigma = profile.noise_multiplier / math.sqrt(max(times))
    cases: list[Case] = []
    for full in range(_MOST_FULL_BINS + 1):
        fewer = profile if not full else _without_full_bins(profile, full)
        tails = [
            math.log(n) + _log(math.comb(size, full + 1)) + (full + 1) * log_full
            for n, size in zip(counts, sizes, strict=True)
        ]
        log_uncovered = _log_sum([log_twice, *tails])
        if not cases or log_uncovered < cases[-1].log_rest:
            flagged = Flagged(log_pi, _beside_flagged(fewer, sigma))
            if full <= _FEW_BINS * min(sizes) or log_some > -math.log(2.0):
                cases.append(Case(fewer, (flagged,), log_uncovered))
            else:
                cases.append(Case(profile, (flagged,), log_uncovered, Flagged(log_some, fewer)))
    log_drawn = math.log(sum(n * several for n, several in zip(counts, times, strict=True)))
    return TruncatedProfile(profile, tuple(cases), log_drawn + cap.log_dropped_if_drawn())


def _without_full_bins(
    profile: BallsAndBinsProfile | AssignmentsProfile, full: int
) -> AssignmentsProfile:
    thinned = tuple(
        (without_full_bins(assignment, full), count) for assignment, count in profile.assignments
    )
    return AssignmentsProfile(profile.noise_multiplier, thinned, profile.release)


def _beside_flagged(
    profile: BallsAndBinsProfile | AssignmentsProfile, sigma: float
) -> ComposesWithGaussian:
    """Returns the other draws, or all where they differ, beside a known release at `sigma`."""
    (assignment, count), *different = profile.assignments
    if different:
        return profile.with_gaussian_release(sigma)
    if count == 1:
        return GaussianProfile(composed_noise(sigma, profile.release))
    fewer = AssignmentsProfile(
        profile.noise_multiplier, ((assignment, count - 1),), profile.release
    )
    return fewer.with_gaussian_release(sigma)


def without_full_bins(assignment: Assignment, full: int) -> Assignment:
    """Returns a dominating assignment without `full` released bins.

    It has as much mass, or more, in released bins, all of them released most often.

    >>> without_full_bins(((0, 6), (1, 2)), 1)  # one of four, not one of seven
    ((0, 3), (1, 1))

    Args:
      assignment: Pairs (number of releases, number of bins).
      full: Number of released bins that are full.
    """
    bins = sum(count for _, count in assignment)
    released = sum(count for times, count in assignment if times)
    remaining = max(1, released - full)
    unreleased = bins * remaining // released - remaining
    most = (max(assignment)[0], remaining)
    return ((0, unreleased), most) if unreleased else (most,)


def truncated_users(
    profile: ComposesWithGaussian,
    cap: Cap,
    steps: int,
    noise_multiplier: float,
    *,
    max_contributions: int,
    shards: int = 1,
) -> TruncatedProfile:
    """Returns the profile, for users, of cut Poisson batches.

    Args:
      profile: The mechanism without the cut.
      cap: The cut, of all rows or of the largest shard.
      steps: Number of batches.
      noise_multiplier: s of one release.
      max_contributions: kappa, most rows of one user.
      shards: Number of shards, cut separately.
    """
    most, log_steps = max_contributions, math.log(steps)
    if shards > 1:
        log_pi = log_steps + math.log(most) + cap.log_kept()
        flagged: list[Flagged] = [
            Flagged(log_pi, profile.with_gaussian_release(noise_multiplier / most))
        ]
    else:
        log_share = _log(cap.max_batch_size / cap.num_examples)
        log_overflow = log_steps + cap.log_overflow() + _UP
        log_pi = log_overflow + min(0.0, math.log(most) + log_share)
        flagged = []
        low, high, last = 1, 1, min(most, cap.max_batch_size)
        while low <= last:  # groups 1, 2, 3-4, 5-8, ...
            # Each set of `low` rows is kept with probability <= (B / n)^low.
            log_any = math.log(math.comb(most, low)) if low < 64 else low * math.log(most)
            chance = log_overflow + min(0.0, log_any + low * log_share) + _UP
            beside = profile.with_gaussian_release(noise_multiplier / min(high, last))
            flagged.append(Flagged(chance, beside))
            low, high = high + 1, 2 * high
    case = Case(profile, tuple(flagged), 2.0 * log_pi - math.log(2.0))
    log_drawn = log_steps + math.log(most * cap.sampling_prob)
    log_moved = log_drawn + cap.log_dropped_if_drawn()
    if most < cap.max_batch_size:  # as if all rows of the user were drawn
        fuller = dataclasses.replace(cap, max_batch_size=cap.max_batch_size - most)
        log_thinned = log_drawn + math.log(cap.num_examples / cap.max_batch_size)
        log_thinned += fuller.log_dropped_if_drawn()
        if log_thinned < log_moved + _SMALL_DELTA:
            return TruncatedProfile(profile, (case,), log_thinned)
    return TruncatedProfile(profile, (case,), log_moved=log_moved)


def _above(value: float) -> float:
    return math.nextafter(value, math.inf)


def _below(value: float) -> float:
    return math.nextafter(value, -math.inf)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def _exp(log_value: float) -> float:
    """Returns exp, rounded up: 0 for -inf alone."""
    if log_value == -math.inf:
        return 0.0
    return math.exp(min(log_value, 700.0)) * (1.0 + 1e-12) + 5e-324


def _log_sum(logs: Sequence[float]) -> float:
    largest = max(logs)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in logs))


def log_overflow_probability(num_examples: int, sampling_prob: float, max_batch_size: int) -> float:
    """Returns an upper bound on log Pr[a batch overflows].

    A batch has Binomial(m, q) examples, and overflows above B. Tight to 1e-9 relative down to a
    probability of 1e-300, which stands for all smaller ones.

    >>> math.exp(log_overflow_probability(10, 0.5, 9)) * 2**10  # doctest: +ELLIPSIS
    1.00000000...

    Args:
      num_examples: m.
      sampling_prob: q.
      max_batch_size: B.

    Raises:
      ValueError: If a size is negative or `sampling_prob` is not in [0, 1].
    """
    n, rate, k = num_examples, sampling_prob, max_batch_size + 1
    if n < 0 or max_batch_size < 0:
        raise ValueError(
            f"sizes must be >= 0, got {num_examples} examples, maximum {max_batch_size}"
        )
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"sampling_prob must be in [0, 1], got {rate}")
    if k > n or rate == 0.0:
        return -math.inf
    if rate == 1.0 or k <= (n + 1) * rate:
        return 0.0
    # Boost's incomplete beta function is good to 1e-10 where it does not underflow.
    tail = max(float(scipy.special.betainc(k, n - k + 1, rate)), _SMALLEST_TAIL)
    return min(0.0, math.log(tail) + _BINOMIAL_ERROR)
