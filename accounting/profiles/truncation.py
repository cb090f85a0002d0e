"""The privacy cost of cutting an oversize batch down to a maximum size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.checks import check_count, check_delta, check_epsilon
from accounting.profile import EPSILON_TOLERANCE, Bound, PrivacyProfile

_BINOMIAL_ERROR = 1e-9  # relative; a tail's few special functions are good to 1e-10

_COARSE = 0.03
"""How sharply delta is looked at elsewhere than at the epsilon that is asked about."""
_OVERFLOWS = (
    "that some batch overflows is not much less likely than delta: raise the maximum batch size"
)


@dataclass(frozen=True)
class TruncatedProfile:
    r"""The profile of `profile`'s mechanism with each of `steps` batches cut to a maximum size.

    A batch of more than B examples is cut to B of them, uniformly at random. If the mechanism is
    (eps, delta)-DP without the cut, it is, with it,

    .. math:: \left(\epsilon,\; \delta + (1 + e^\epsilon)\, T\, \Psi\right)\text{-DP},

    with T = `steps` over the whole run, Psi = Pr[Binomial(n, b/n) > B] and log Psi =
    `log_overflow_probability`. Proof: docs/explanation/truncated-batches.md.

    Source: Chua et al., "Scalable DP-SGD: Shuffling vs. Poisson Subsampling", NeurIPS 2024
    (arXiv 2411.04205), Theorem 3.3.

    Raises:
      ValueError: If `steps` is not an integer >= 1 or `log_overflow_probability` is above 0.
    """

    profile: PrivacyProfile
    steps: int
    log_overflow_probability: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", check_count("steps", self.steps))
        if not self.log_overflow_probability <= 0.0:
            raise ValueError(
                f"log_overflow_probability must be <= 0, got {self.log_overflow_probability}"
            )

    def delta(self, epsilon: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds delta at `epsilon` >= 0."""
        inner = self.profile.delta(check_epsilon(epsilon), tolerance)
        cost = self._cost(epsilon)
        lower, upper = max(0.0, inner.lower - cost), inner.upper + cost
        # Where the falling delta(eps') crosses the rising cost, the sum is at most twice its least.
        low, high = 0.0, epsilon
        at = 0.0  # the cheapest eps' first
        while self._cost(high) - self._cost(low) > 1e-3 * upper:
            delta = self.profile.delta(at, max(tolerance, _COARSE)).upper
            upper = min(upper, delta + self._cost(at))
            if delta > self._cost(at):
                low = at
            else:
                high = at
            at = 0.5 * (low + high)
        wide = min(1.0, upper) - lower > tolerance * lower
        note = inner.note
        if not note and wide and self._cost(0.0) > tolerance * lower:
            note = _OVERFLOWS
        return Bound.resting_on(inner, lower, min(1.0, upper), note)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest epsilon >= 0 that holds with `delta`."""
        check_delta(delta)
        inner = self.profile.epsilon(delta, tolerance)
        if self._cost(0.0) == 0.0:
            return inner
        guess = inner.upper
        upper = math.inf
        for number in range(20):
            left = delta - self._cost(guess)
            if left <= 0.0:
                break
            wanted = self.profile.epsilon(left, tolerance).upper
            if wanted <= guess:
                upper = guess
                break
            guess = wanted + min(1e-6 * 4.0**number, 0.2) * tolerance  # it may climb ever slower
            if number == 2:
                guess = self._climbed(delta, guess, tolerance)
        # cost() rises, so that below inner.lower the true delta is > `delta` wherever the
        # profile's is > delta + cost(inner.lower).
        spent = delta + self._cost(inner.lower)
        lower = 0.0
        if spent < 1.0:
            lower = min(inner.lower, self.profile.epsilon(spent, tolerance).lower)
        note = inner.note
        if upper == math.inf:
            note = (
                f"the probability that some batch overflows leaves nothing of delta = {delta}: "
                "raise the maximum batch size"
            )
        return Bound.resting_on(inner, lower, upper, note)

    def _climbed(self, delta: float, guess: float, tolerance: float) -> float:
        """Returns an epsilon below which none holds with `delta`; infinity if none does at all.

        Coarse lower ends climb as the search does, and never above what it looks for.
        """
        for _ in range(100):
            left = delta - self._cost(guess)
            if left <= 0.0:
                return math.inf
            least = self.profile.epsilon(left, max(tolerance, 0.02 * guess)).lower
            if least <= guess:
                break
            guess = least
        return guess

    def _cost(self, epsilon: float) -> float:
        """(1 + e^epsilon) T Psi, rounded up."""
        log_cost = (
            math.log1p(math.exp(-epsilon))
            + epsilon
            + math.log(self.steps)
            + self.log_overflow_probability
        )
        if log_cost == -math.inf:
            return 0.0
        return math.exp(min(log_cost, 700.0)) * (1.0 + 1e-12) + 5e-324


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
