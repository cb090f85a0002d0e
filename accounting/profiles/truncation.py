"""The privacy cost of cutting an oversize batch down to a maximum size."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import scipy

from accounting.profile import ComposesWithGaussian
from accounting.profiles.balls_and_bins import AssignmentsProfile, BallsAndBinsProfile
from accounting.profiles.bins_grids import Assignment
from accounting.profiles.gaussian import GaussianProfile, composed_noise
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.truncated import Case, Flagged, log_sum
from accounting.profiles.truncated import TruncatedProfile as TruncatedProfile
from accounting.profiles.units_then_poisson import UnitsThenPoissonProfile
from accounting.profiles.user_poisson import UserPoissonProfile

_BINOMIAL_ERROR = 1e-9
"""Bound on the relative error of a binomial tail."""
_SMALLEST_TAIL = 1e-300
_UP = 1e-9
"""Outward rounding of logarithms of probabilities."""
_MOST_FULL_BINS = 5
_FEW_BINS = 3e-4
"""Share of bins whose loss does not matter to epsilon: they are simply taken away."""
_SMALL_DELTA = math.log(1e6)
"""Logs of a share of delta and of a probability that hurt a lower end alike differ by this."""


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


def truncated_profile(
    profile: AssignmentsProfile
    | BallsAndBinsProfile
    | PoissonProfile
    | UnitsThenPoissonProfile
    | UserPoissonProfile,
    cap: Cap,
    shards: int = 1,
) -> TruncatedProfile:
    """Returns the profile of a mechanism with truncated batches.

    >>> cut = truncated_profile(PoissonProfile(1.0, 0.1, 10), Cap(1000, 0.1, 180))
    >>> f"{cut.epsilon(1e-5):.2f}"
    '[2.85, 2.86]'

    Args:
      profile: The mechanism without the cut; assignments have 1 / q bins each.
      cap: The cut, of all rows or of the largest shard.
      shards: Number of shards, cut separately.
    """
    if isinstance(profile, AssignmentsProfile | BallsAndBinsProfile):
        return _truncated_bins(profile, cap)
    if isinstance(profile, UserPoissonProfile):
        return _truncated_users(profile, cap, shards)
    return _truncated_steps(profile, cap)


def _truncated_steps(
    profile: PoissonProfile | UnitsThenPoissonProfile, cap: Cap
) -> TruncatedProfile:
    steps = profile.steps
    log_pi = math.log(steps) + cap.log_kept()
    flagged = Flagged(log_pi, profile.with_gaussian_release(profile.noise_multiplier))
    case = Case(profile, (flagged,), 2.0 * log_pi - math.log(2.0))
    if isinstance(profile, PoissonProfile):  # attained if all other rows are zero
        return TruncatedProfile(profile, (case,), math.log(steps) + cap.log_dropped_if_drawn())
    log_moved = math.log(2.0 * steps) + cap.log_overflow() + _UP
    return TruncatedProfile(profile, (case,), log_moved=log_moved)


def _truncated_bins(
    profile: BallsAndBinsProfile | AssignmentsProfile, cap: Cap
) -> TruncatedProfile:
    draws, log_full = profile.assignments, cap.log_full() + _UP
    sizes = [sum(bins for times, bins in assignment if times) for assignment, _ in draws]
    counts, times = [count for _, count in draws], [max(assignment)[0] for assignment, _ in draws]
    # The draw of several epochs is flagged in all of them at once.
    log_flags = [
        log_full if several > 1 else math.log(size) + cap.log_kept()
        for several, size in zip(times, sizes, strict=True)
    ]
    log_pi = log_sum(
        [math.log(n) + log_flag for n, log_flag in zip(counts, log_flags, strict=True)]
    )
    log_twice = 2.0 * log_pi - math.log(2.0) if sum(counts) > 1 else -math.inf
    log_some = log_sum(
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
        log_uncovered = log_sum([log_twice, *tails])
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


def _truncated_users(profile: UserPoissonProfile, cap: Cap, shards: int) -> TruncatedProfile:
    most, log_steps = profile.max_contributions, math.log(profile.steps)
    noise_multiplier = profile.noise_multiplier
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


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


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
