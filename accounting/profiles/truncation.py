"""The privacy cost of cutting an oversize batch down to a maximum size."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accounting.checks import check_count
from accounting.profile import Bound, ComposesWithGaussian, Profile, Question, wanted_width
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile

_BINOMIAL_ERROR = 1e-9  # relative; a tail's few special functions are good to 1e-10
_UP = 1e-9
"""Outward rounding of logarithms of probabilities."""

_COARSE = 0.03
"""How sharply the delta of a flagged run is asked for: its probability is small."""
_NEGLIGIBLE = 1e-4
"""Share of delta below which a probability is charged as it is."""
_MOST_FULL_BINS = 5
_FEW_BINS = 3e-4
"""Share of bins whose loss does not matter to epsilon: they are simply taken away."""
_FARTHEST = 1e6
_ROUNDS = 12
_NOTE = "the cost of cutting batches is not known more exactly: raise the maximum batch size"


class Flagged(NamedTuple):
    """Runs in which one overflowing batch keeps the example."""

    log_probability: float
    """Upper bound on the log of their probability."""
    profile: ComposesWithGaussian
    """Dominates such a run."""

    def charge(self, epsilon: float) -> float:
        """Returns an upper bound on what these runs add to delta at `epsilon`."""
        return _exp(self.log_probability) * self.profile.delta(epsilon, _COARSE).upper


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
        return _log_sum([self.log_rest, *(part.log_probability for part in self.flagged)])

    def charge(self, epsilon: float, delta: float) -> float:
        """Returns an upper bound on what is added to `profile`'s delta at `epsilon`.

        Args:
          epsilon: >= 0.
          delta: Size of the total, which decides how sharply the parts are asked for.
        """
        total = _exp(self.log_rest)
        for part in (*self.flagged, *([self.fuller] if self.fuller else [])):
            weight = _exp(part.log_probability)
            sharp = weight > _NEGLIGIBLE * delta
            total += part.charge(epsilon) if sharp else weight
        return total * (1.0 + _UP)


@dataclass(frozen=True)
class TruncatedProfile(Profile):
    r"""The profile of a mechanism whose batches are cut to a maximum size, at random.

    .. math:: \delta(\epsilon) \le \delta_0(\epsilon) + \sum_i p_i \delta_i(\epsilon) + r, \qquad
        \delta(\epsilon) \ge \delta_{\text{below}}(\epsilon) - e^\epsilon \rho

    for each of several `cases` (delta_0 its `profile`, p_i and delta_i its `flagged`, r its
    rest), below = `profile` and log rho = `log_dropped`. Made by `truncated_steps`,
    `truncated_bins` and `truncated_users`. Proof: docs/explanation/truncated-batches.md.

    Attributes:
      profile: The mechanism without the cut; its lower end is that of a concrete pair.
      cases: Proved upper bounds, the least rest last.
      log_dropped: Log of the most by which the cut moves the pair's laws.
    """

    profile: ComposesWithGaussian
    cases: tuple[Case, ...]
    log_dropped: float

    @property
    def log_spent(self) -> float:
        """Log of the delta that truncation costs at most, whatever noise and epsilon are."""
        return min(case.log_spent for case in self.cases)

    def with_gaussian_release(self, noise_multiplier: float) -> TruncatedProfile:
        """Returns the profile with a Gaussian release; the cut is paid for once."""

        def both(profile: ComposesWithGaussian) -> ComposesWithGaussian:
            return profile.with_gaussian_release(noise_multiplier)  # type: ignore[return-value]

        cases = tuple(
            Case(
                both(case.profile),
                tuple(part._replace(profile=both(part.profile)) for part in case.flagged),
                case.log_rest,
                case.fuller and case.fuller._replace(profile=both(case.fuller.profile)),
            )
            for case in self.cases
        )
        return dataclasses.replace(self, profile=both(self.profile), cases=cases)

    def answer(self, question: Question) -> Bound:
        """Answers by the case whose rest matters no more, or is least."""
        if question.wanted == "epsilon":
            return self._epsilon(question)
        inner = question.of(self.profile)
        case = self._case(inner.lower)
        upper = inner.upper if case.profile == self.profile else question.of(case.profile).upper
        upper = min(1.0, upper + case.charge(question.at, inner.lower))
        lower = max(0.0, inner.lower - self._moved(question.at))
        return _noted(question, Bound.resting_on(inner, lower, max(lower, upper)))

    def _case(self, delta: float) -> Case:
        """Returns the first case whose rest is negligible at `delta`, or the one of the least."""
        few = (case for case in self.cases if _exp(case.log_rest) <= 1e-3 * delta)
        return next(few, self.cases[-1])

    def _epsilon(self, question: Question) -> Bound:
        inner = question.of(self.profile)
        upper = _upper_epsilon(self._case(question.at), question, inner)
        lower = self._lower_epsilon(question, inner.upper)
        return _noted(question, Bound.resting_on(inner, lower, max(lower, upper)))

    def _moved(self, epsilon: float) -> float:
        return _exp(min(epsilon + self.log_dropped, 700.0)) * (1.0 + _UP)

    def _lower_epsilon(self, question: Question, ceiling: float) -> float:
        """Returns e <= `ceiling` such that below it the pair's delta is above the one asked for."""

        def proved(most: float) -> float:
            spent = question.at + self._moved(most)
            if spent >= 1.0:
                return 0.0
            return min(most, self.profile.epsilon(spent, question.tolerance).lower)

        lower, high = proved(ceiling), ceiling
        if self._moved(ceiling) <= _NEGLIGIBLE * question.at:
            return lower
        for _ in range(_ROUNDS):
            moves = self._moved(high) > 10.0 * _NEGLIGIBLE * question.at
            if not moves or high - lower <= 0.3 * wanted_width(question.tolerance, high):
                break
            middle = 0.5 * (lower + high)
            found = proved(middle)
            lower, high = max(lower, found), middle if found < middle else high
        return lower


def _noted(question: Question, bound: Bound) -> Bound:
    wide = bound.width > question.width(bound) and not bound.note
    return dataclasses.replace(bound, note=_NOTE) if wide else bound


def _upper_epsilon(case: Case, question: Question, inner: Bound) -> float:
    """Returns an epsilon at which the sum of `case` is at most the delta asked for.

    Where e is below the answer, no more than charge(e) is charged there: epsilon_0(delta -
    charge(e)) suffices. Between such an e and that point it is bisected.
    """
    delta, tolerance = question.at, question.tolerance
    rest = _exp(case.log_rest) * (1.0 + _UP)
    if rest >= delta:
        return math.inf

    def suffices(at: float) -> float:
        left = (delta - charge(at)) * (1.0 - _UP)
        if left <= 0.0:
            return math.inf
        return max(at, case.profile.epsilon(left, tolerance).upper)

    @functools.cache
    def charge(at: float) -> float:
        return case.charge(at, delta)

    low = inner.lower
    high = suffices(low)
    step = max(0.1, 0.1 * low)
    while high == math.inf and low < _FARTHEST:
        further = low + step
        found = suffices(further)
        if found < math.inf and found > further:
            low, high = further, found
        elif found < math.inf:  # the sum is at most delta there
            high = further
            break
        else:
            low, step = further, 2.0 * step
    if high == math.inf:
        return high
    for _ in range(_ROUNDS):
        moves = charge(low) - charge(high) > 3e-4 * (delta - charge(low))
        if not moves or high - low <= 0.3 * question.width(Bound(low, high)):
            break
        middle = 0.5 * (low + high)
        found = suffices(middle)
        if found > middle:
            low, high = middle, min(high, found)
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Cap:
    """A batch of at most B of m examples, each of which is drawn with probability q.

    Attributes:
      num_examples: m, the largest number that may take part in one step of one shard.
      sampling_prob: q.
      max_batch_size: B < m; a larger batch is cut to B, uniformly at random.
    """

    num_examples: int
    sampling_prob: float
    max_batch_size: int

    def log_overflow(self) -> float:
        """Returns log Pr[Binomial(m, q) > B], the probability that a batch overflows."""
        return log_overflow_probability(self.num_examples, self.sampling_prob, self.max_batch_size)

    def log_full(self) -> float:
        """Returns log Pr[Binomial(m - 1, q) >= B]: the others leave no room."""
        if self.max_batch_size == 0:
            return 0.0
        return log_overflow_probability(
            self.num_examples - 1, self.sampling_prob, self.max_batch_size - 1
        )

    def log_kept(self) -> float:
        """Returns the log of a bound on: an example is drawn, its batch overflows, it is kept.

        It holds for any smaller number of examples as well.
        """
        m, rate, cap = self.num_examples, self.sampling_prob, self.max_batch_size
        if cap >= m * rate:
            return _log(cap / m) + self.log_overflow() + _UP
        return _log(rate) + self.log_full() + _UP

    def log_dropped(self) -> float:
        """Returns the log of a bound on: an example is drawn and dropped."""
        m, rate, cap = self.num_examples, self.sampling_prob, self.max_batch_size
        most = float(m - cap)
        if rate < 1.0:
            # The excess is at most geometric: binomial ratios fall.
            ratio = (m - cap - 1) / (cap + 2) * rate / (1.0 - rate)
            if ratio < 1.0:
                most = min(most, 1.0 / (1.0 - ratio))
        return min(math.log(rate), self.log_overflow() + math.log(most / m)) + _UP


def truncated_steps(
    profile: ComposesWithGaussian, cap: Cap, steps: int, noise_multiplier: float, *, exact: bool
) -> TruncatedProfile:
    """Returns the profile of `steps` independent cut batches, in each of which x may take part.

    Args:
      profile: The mechanism without the cut.
      cap: The cut.
      steps: Steps of one example's group.
      noise_multiplier: s of one release.
      exact: Whether the lower end of `profile` is that of a pair whose other rows are zero.
    """
    log_pi = math.log(steps) + cap.log_kept()
    flagged = Flagged(log_pi, _beside(profile, noise_multiplier))
    dropped = cap.log_dropped() if exact else math.log(2.0) + cap.log_overflow() + _UP
    case = Case(profile, (flagged,), 2.0 * log_pi - math.log(2.0))
    return TruncatedProfile(profile, (case,), math.log(steps) + dropped)


def truncated_bins(profile: BallsAndBinsProfile, cap: Cap) -> TruncatedProfile:
    """Returns the profile of balls-and-bins whose batches are cut.

    Args:
      profile: The mechanism without the cut; q = 1 / `bins`.
      cap: The cut.
    """
    bins, epochs, log_full = profile.bins, profile.epochs, cap.log_full() + _UP
    redrawn = profile.assignment == "redrawn"
    sigma = profile.noise_multiplier
    log_pi = math.log(epochs * bins) + cap.log_kept() if redrawn else log_full
    log_rest = 2.0 * log_pi - math.log(2.0) if redrawn else -math.inf
    cases: list[Case] = []
    for full in range(min(_MOST_FULL_BINS + 1, bins)):
        fewer = dataclasses.replace(profile, bins=bins - full)
        alone = GaussianProfile(sigma if redrawn else sigma / math.sqrt(epochs))
        beside: ComposesWithGaussian = alone
        if profile.release < math.inf:
            beside = alone.with_gaussian_release(profile.release)
        if redrawn and epochs > 1:
            beside = dataclasses.replace(fewer, epochs=epochs - 1).with_gaussian_release(sigma)
        tail = math.log(math.comb(bins, full + 1)) + (full + 1) * log_full
        tail += math.log(epochs) if redrawn else 0.0
        rest = _log_sum([log_rest, tail])
        if not cases or rest < cases[-1].log_rest:
            log_full_bins = math.log(epochs * bins if redrawn else bins) + log_full
            one: tuple[ComposesWithGaussian, Flagged | None] = fewer, None
            if full > _FEW_BINS * bins and log_full_bins < -math.log(2.0):
                one = profile, Flagged(log_full_bins, fewer)
            cases.append(Case(one[0], (Flagged(log_pi, beside),), rest, one[1]))
    dropped = math.log(epochs * bins) + cap.log_dropped()
    return TruncatedProfile(profile, tuple(cases), dropped)


def truncated_users(
    profile: ComposesWithGaussian,
    cap: Cap,
    steps: int,
    noise_multiplier: float,
    *,
    max_contributions: int,
    shards: int = 1,
) -> TruncatedProfile:
    """Returns the profile, for users, of `steps` cut Poisson batches of rows.

    Args:
      profile: The mechanism without the cut.
      cap: The cut, of all rows or of the largest shard.
      steps: Number of batches.
      noise_multiplier: s of one release.
      max_contributions: kappa, most rows of one user.
      shards: Number of shards, each of which is cut by itself.
    """
    most, log_steps = max_contributions, math.log(steps)
    if shards > 1:
        log_pi = log_steps + math.log(most) + cap.log_kept()
        flagged: list[Flagged] = [Flagged(log_pi, _beside(profile, noise_multiplier / most))]
    else:
        log_share = _log(cap.max_batch_size / cap.num_examples)
        log_overflow = log_steps + cap.log_overflow() + _UP
        log_pi = log_overflow + min(0.0, math.log(most) + log_share)
        flagged = []
        for low, high in _doubling(min(most, cap.max_batch_size)):
            # Each set of `low` rows is kept with probability <= (B / n)^low.
            log_any = math.log(math.comb(most, low)) if low < 64 else low * math.log(most)
            chance = log_overflow + min(0.0, log_any + low * log_share) + _UP
            flagged.append(Flagged(chance, _beside(profile, noise_multiplier / high)))
    case = Case(profile, tuple(flagged), 2.0 * log_pi - math.log(2.0))
    return TruncatedProfile(profile, (case,), log_steps + math.log(most) + cap.log_dropped())


def _doubling(most: int) -> Iterator[tuple[int, int]]:
    """Yields (1, 1), (2, 2), (3, 4), (5, 8), ... up to `most`."""
    low, high = 1, 1
    while low <= most:
        yield low, min(high, most)
        low, high = high + 1, 2 * high


def _beside(profile: ComposesWithGaussian, noise_multiplier: float) -> ComposesWithGaussian:
    return profile.with_gaussian_release(noise_multiplier)  # type: ignore[return-value]


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
    return largest + math.log(math.fsum(math.exp(one - largest) for one in logs))


def log_overflow_probability(num_examples: int, sampling_prob: float, max_batch_size: int) -> float:
    """Returns an upper bound on log Pr[Binomial(num_examples, sampling_prob) > max_batch_size].

    Tight to 1e-9 relative, and valid far below the smallest double.

    >>> math.exp(log_overflow_probability(10, 0.5, 9)) * 2**10  # doctest: +ELLIPSIS
    1.00000000...

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
    log_first = _log_binomial_term(n, k, rate)
    odds = rate / (1.0 - rate)
    total = term = 1.0
    i = k
    while True:
        ratio = (n - i) / (i + 1) * odds
        if i >= n:
            break
        remainder = term * ratio / (1.0 - ratio)
        if remainder <= 1e-11 * total:
            total += remainder
            break
        term *= ratio
        total += term
        i += 1
    return min(0.0, log_first + math.log(total) + _BINOMIAL_ERROR)


def _log_binomial_term(n: int, k: int, rate: float) -> float:
    """Log of C(n, k) q^k (1-q)^(n-k), in Loader's form: no difference of large numbers."""
    if k == n:
        return n * math.log(rate)
    m = n - k
    deviance = _deviance(k, n * rate) + _deviance(m, n * (1.0 - rate))
    stirling = _stirling_error(n) - _stirling_error(k) - _stirling_error(m)
    return stirling - deviance + 0.5 * math.log(n / (2.0 * math.pi * k * m))


def _deviance(x: float, mean: float) -> float:
    """X log(x/mean) + mean - x, without cancellation near x = mean."""
    ratio = (x - mean) / mean
    if abs(ratio) > 0.1:
        return x * math.log(x / mean) + mean - x
    # (1+r) log(1+r) - r = sum_{j>=2} (-r)^j / (j (j-1))
    return mean * sum((-ratio) ** j / (j * (j - 1)) for j in range(2, 20))


def _stirling_error(n: float) -> float:
    """log(n!) - log(sqrt(2 pi n) (n/e)^n)."""
    if n < 16:
        return math.lgamma(n + 1) - 0.5 * math.log(2.0 * math.pi * n) - n * math.log(n) + n
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / n**2) / n**2) / n**2) / n


def smallest_max_batch_size(
    num_examples: int, sampling_prob: float, steps: int, total_log_probability: float
) -> int:
    """Returns the smallest B at which log(`steps` Pr[Binomial > B]) <= `total_log_probability`.

    With B = the result, the probability that any of `steps` batches of Binomial(`num_examples`,
    `sampling_prob`) size overflows is at most exp(`total_log_probability`), by a union bound.

    Raises:
      ValueError: If `steps` is not an integer >= 1, or as for `log_overflow_probability`.
    """
    check_count("steps", steps)
    wanted = total_log_probability - math.log(steps)
    low, high = -1, num_examples  # at B = n nothing can overflow
    while high - low > 1:
        middle = (low + high) // 2
        if log_overflow_probability(num_examples, sampling_prob, middle) <= wanted:
            high = middle
        else:
            low = middle
    return high
