"""The sampling estimators of balls-and-bins' privacy, as published: an independent check.

The certified interval of `accounting.balls_and_bins` needs no samples. These estimators do not
share a line with it, so that their agreement is evidence, and they reproduce the curves of their
papers. What they return holds with a confidence below one and is never a guarantee.

Setting (one epoch, clipping norm 1). Under P the observation is x ~ N(e_t, σ² I) with t uniform on
the T bins, under Q it is x ~ N(0, σ² I). As the likelihood ratio is symmetric in the coordinates,
P may be replaced by N(e_1, σ² I). The privacy loss of x is

    log dP/dQ(x) = log( (1/T) Σ_t exp(x_t/σ² - 1/(2σ²)) ),

`direction="remove"` takes L = log dP/dQ under P, `direction="add"` takes L = -log dP/dQ under Q,
and in both the divergence is H_ε = E[(1 - e^{ε-L})_+].

**Importance sampling.** Where the loss is at most ε outside an event A,
H_ε = Pr(A) E[(1 - e^{ε-L})_+ | A].

- remove: y = x - e_1 is iid N(0, σ²), and A = {max_t y_t >= c} with Pr(A) = 1 - Φ(c/σ)^T and
  c = 1/2 + σ²(ε - log(1 + (e^{1/σ²} - 1)/T)): if every y_t < c, then
  Σ_t e^{x_t/σ²} < e^{c/σ²} (e^{1/σ²} + T - 1), so L < (c - 1/2)/σ² + log(1 + (e^{1/σ²} - 1)/T) = ε.
- add: A = {max_t x_t <= c} with Pr(A) = Φ(c/σ)^T and c = 1/2 + σ²(log T - ε): if some x_t > c, then
  dP/dQ > e^{(c - 1/2)/σ²}/T = e^{-ε}.

**Order statistics.** With the r_i-th largest of the draws at hand (r_1 < ... < r_R, r_0 = 0), draws
of rank r_i ... r_{i+1} - 1 are at most the r_i-th largest, and draws of rank r_{i-1} + 1 ... r_i at
least it:

    Σ_i (r_i - r_{i-1}) e^{x_(r_i)/σ²}  <=  Σ_t e^{x_t/σ²}  <=  Σ_i (r_{i+1} - r_i) e^{x_(r_i)/σ²}

(right side: r_1 = 1, r_{R+1} = one more than the number of draws). Each loss is replaced by an
upper bound on it, so a few hundred draws stand for a million bins, and what is estimated bounds
H_ε from above.

All sampling is by the inverse distribution function in log space: nothing is lost at a million
bins, nor for events of probability 1e-300.

Sources: L. Chua et al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025, arXiv:2412.16802
(Algorithms 4, 5, 6, 10 and 11, Appendix B); L. Chua et al., How Private are DP-SGD
Implementations?, ICML 2024, arXiv:2403.17673 (the events of the maximum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri_exp

from accounting.profile import (
    EPSILON_TOLERANCE,
    Bound,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
    epsilon_from_delta,
)

Direction = Literal["remove", "add"]
Floats = NDArray[np.float64]

# Entries of the largest temporary array; several of them live at once (about 100 MB in all).
_CHUNK_ENTRIES = 2**21
# Relative slack for the rounding of closed forms that are printed as proved.
_ROUNDING = 1e-9


def kl_upper_bound(mean: float, num_samples: int, beta: float) -> float:
    """Returns an upper confidence bound on the expectation of a variable with values in [0, 1].

    The bound is the smallest p >= q with KL(Bernoulli(q) || Bernoulli(p)) >= log(1/β)/m, or 1. It
    fails with probability at most β, because Pr(sample mean <= q) <= exp(-m KL(q || p)) for q <= p
    (Chernoff; Hoeffding 1963 shows that variables in [0, 1] are no worse than Bernoulli ones).

    Args:
      mean: q, the sample mean, in [0, 1].
      num_samples: m, the number of independent samples.
      beta: β, the probability in (0, 1) with which the bound may fail.

    Source: Chua et al., arXiv:2412.16802, Algorithm 4.

    >>> kl_upper_bound(0.0, 1000, 1e-3) == -math.expm1(math.log(1e-3) / 1000)
    True
    """
    if not 0.0 <= mean <= 1.0:
        raise ValueError(f"mean must be in [0, 1], got {mean}")
    check_count("num_samples", num_samples)
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be in (0, 1), got {beta}")
    budget = -math.log(beta) / num_samples
    if mean == 0.0:
        return -math.expm1(-budget)
    if mean == 1.0:
        return 1.0
    # Pinsker: KL >= 2 (p - q)^2, so the solution is at most q + sqrt(budget / 2).
    low, high = mean, min(1.0, mean + math.sqrt(budget / 2))
    while low < (middle := 0.5 * (low + high)) < high:
        excess = middle - mean
        divergence = mean * math.log1p(-excess / middle) + (1 - mean) * math.log1p(
            excess / (1 - middle)
        )
        low, high = (low, middle) if divergence >= budget else (middle, high)
    return high


def geometric_ranks(num_draws: int, growth: float = 1.02) -> tuple[int, ...]:
    """Returns ranks 1, 2, 3, ... that grow by the factor `growth`, up to `num_draws`.

    The top ranks, which carry the privacy loss, are all kept; the bulk is kept at a relative
    spacing of `growth` - 1.

    >>> geometric_ranks(20, growth=1.5)
    (1, 2, 3, 4, 6, 9, 13, 19)
    """
    if not growth > 1.0:
        raise ValueError(f"growth must exceed 1, got {growth}")
    ranks, rank = [], 1
    while rank <= num_draws:
        ranks.append(rank)
        rank = max(rank + 1, int(rank * growth))
    return tuple(ranks)


def log_order_statistics(
    rng: np.random.Generator, size: int, num_draws: int, ranks: Sequence[int]
) -> Floats:
    """Samples log U for the largest of `num_draws` uniform draws, jointly at the given ranks.

    With r_0 = 0 and independent y_i ~ Beta(n - r_i + 1, r_i - r_{i-1}), the r_i-th largest of n
    uniform draws is y_1 ... y_i: given the r_{i-1}-th largest, the n - r_{i-1} draws below it are
    iid uniform below it, and y_i is the (r_i - r_{i-1})-th largest of them relative to it.

    Args:
      rng: Source of randomness.
      size: Number of independent samples.
      num_draws: n.
      ranks: r_1 < ... < r_R, each in [1, n].

    Returns:
      log of the order statistics, float64 of shape [size, R].

    Source: Chua et al., arXiv:2412.16802, Algorithm 6.
    """
    r = np.asarray(ranks, dtype=np.int64)
    gaps = np.diff(r, prepend=0)
    if r.size and (np.any(gaps < 1) or r[-1] > num_draws):
        raise ValueError(f"ranks must increase strictly within [1, {num_draws}], got {ranks}")
    # 1 - y ~ Beta(gap, n - r + 1) is what is small, so it is what is drawn.
    return np.cumsum(np.log1p(-rng.beta(gaps, num_draws - r + 1.0, (size, r.size))), axis=1)


def _draws_below(
    rng: np.random.Generator,
    log_ceiling: Floats,
    num_draws: int,
    ranks: Sequence[int] | None,
    direction: Direction,
) -> tuple[Floats, Floats]:
    """Draws standard normals below a ceiling: values [size, K] and weights [K] that stand for them.

    `log_ceiling` [size] is log Φ of the ceiling. Under `ranks` the weighted sum of any increasing
    function bounds the sum over all draws: from above for "remove", from below for "add".
    """
    size = log_ceiling.size
    if ranks is None:
        log_cdf = log_ceiling[:, None] - rng.standard_exponential((size, num_draws))
        weights = np.ones(num_draws)
    else:
        kept = [r for r in ranks if r <= num_draws]
        log_cdf = log_ceiling[:, None] + log_order_statistics(rng, size, num_draws, kept)
        bounds = [*kept, num_draws + 1] if direction == "remove" else [0, *kept]
        weights = np.diff(bounds).astype(np.float64)
    # A draw of exactly log 1 would be an infinite normal.
    return ndtri_exp(np.minimum(log_cdf, -1e-300)), weights


def _log_weighted_sum_exp(values: Floats, weights: Floats) -> Floats:
    top = values.max(axis=1)
    return top + np.log(np.exp(values - top[:, None]) @ weights)


def _event_ceiling(
    epsilon: float, noise_multiplier: float, bins: int, direction: Direction
) -> float:
    """Returns c/σ, where c bounds the event outside which the loss is at most `epsilon`."""
    variance = noise_multiplier**2
    if direction == "remove":
        # log(1 + (e^{1/σ²} - 1)/T) with no overflow at small σ.
        log_ratio = np.logaddexp(
            math.log1p(-1.0 / bins) if bins > 1 else -math.inf, 1.0 / variance - math.log(bins)
        )
        return float((0.5 + variance * (epsilon - log_ratio)) / noise_multiplier)
    return (0.5 + variance * (math.log(bins) - epsilon)) / noise_multiplier


def event_probability(
    epsilon: float, *, noise_multiplier: float, bins: int, direction: Direction
) -> float:
    """Returns the probability of the event outside which the privacy loss is at most `epsilon`.

    1 - Φ(c/σ)^T under P for "remove", Φ(c/σ)^T under Q for "add" (T = `bins`; c as in the module's
    docstring). It bounds H_ε, and importance sampling costs about 1/probability times fewer
    samples.

    Source: Chua et al., arXiv:2412.16802, Algorithm 5.
    """
    ceiling = _event_ceiling(epsilon, noise_multiplier, bins, direction)
    log_below = bins * float(log_ndtr(ceiling))
    return -math.expm1(log_below) if direction == "remove" else math.exp(log_below)


def sample_losses(
    rng: np.random.Generator,
    num_samples: int,
    *,
    noise_multiplier: float,
    bins: int,
    direction: Direction,
    epochs: int = 1,
    ranks: Sequence[int] | None = None,
    event_epsilon: float | None = None,
) -> Floats:
    """Samples the privacy loss of balls-and-bins, or an upper bound on it.

    Args:
      rng: Source of randomness.
      num_samples: Number of independent samples.
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      direction: "remove": log dP/dQ under P; "add": -log dP/dQ under Q.
      epochs: Number of epochs with bins drawn anew: the sum of as many independent losses.
      ranks: Ranks whose order statistics stand for all coordinates (1 first); the result is then an
        upper bound on a loss. None samples every coordinate: exact, at a cost of T normals for each
        sample.
      event_epsilon: ε of the event A; samples are then drawn given A. None samples without
        condition.

    Returns:
      Losses, float64 of shape [num_samples]. Temporary memory is about 100 MB whatever the sizes.

    Source: Chua et al., arXiv:2412.16802, Algorithms 4, 6, 10, 11 and Appendix B.3.
    """
    check_noise_multiplier(noise_multiplier)
    check_count("bins", bins)
    check_count("epochs", epochs)
    check_count("num_samples", num_samples)
    if direction not in ("remove", "add"):
        raise ValueError(f'direction must be "remove" or "add", got {direction!r}')
    if ranks is not None and (len(ranks) == 0 or ranks[0] != 1):
        raise ValueError(f"ranks must begin with 1, got {ranks}")
    if event_epsilon is not None and epochs != 1:
        raise ValueError("importance sampling is for one epoch; drop event_epsilon")
    width = 2 + (bins if ranks is None else len(ranks))
    chunk = max(1, _CHUNK_ENTRIES // width)
    losses = np.zeros(num_samples)
    for start in range(0, num_samples, chunk):
        part = losses[start : start + chunk]
        for _ in range(epochs):
            part += _losses(rng, part.size, noise_multiplier, bins, direction, ranks, event_epsilon)
    return losses


def _losses(
    rng: np.random.Generator,
    size: int,
    noise_multiplier: float,
    bins: int,
    direction: Direction,
    ranks: Sequence[int] | None,
    event_epsilon: float | None,
) -> Floats:
    """One chunk of one epoch of `sample_losses`."""
    scale = 1.0 / noise_multiplier  # x_t/σ² = (y_t + shift)/σ² = scale * (z_t + scale * shift)
    ceiling = (
        math.inf
        if event_epsilon is None
        else _event_ceiling(event_epsilon, noise_multiplier, bins, direction)
    )
    if direction == "add":
        log_ceiling = np.full(size, float(log_ndtr(ceiling)))
        z, weights = _draws_below(rng, log_ceiling, bins, ranks, direction)
        return math.log(bins) + 0.5 * scale**2 - _log_weighted_sum_exp(scale * z, weights)
    if event_epsilon is None:
        shifted = rng.standard_normal((size, 1)) + scale
        z, weights = _draws_below(rng, np.zeros(size), bins - 1, ranks, direction)
        columns = [shifted, z]
        weights = np.concatenate([np.ones(1), weights])
    else:
        # The largest of the T iid normals, given that it exceeds the ceiling: its distribution
        # function to the power T is uniform on [Φ^T, 1].
        above = -math.expm1(bins * float(log_ndtr(ceiling)))
        log_top = np.minimum(np.log1p(-above * rng.random(size)) / bins, -1e-300)
        top = ndtri_exp(log_top)[:, None]
        if bins == 1:
            columns, weights = [top + scale], np.ones(1)
        else:
            # It sits at the shifted coordinate with probability 1/T. The others are iid below it,
            # and one of them, `other`, is set apart: it is the shifted coordinate where the largest
            # is not.
            other, _ = _draws_below(rng, log_top, 1, None, direction)
            at_shifted = rng.random((size, 1)) < 1.0 / bins
            z, weights = _draws_below(rng, log_top, bins - 2, ranks, direction)
            columns = [
                np.where(at_shifted, top, other) + scale,
                np.where(at_shifted, other, top),
                z,
            ]
            weights = np.concatenate([np.ones(2), weights])
    terms = scale * np.concatenate(columns, axis=1)
    return _log_weighted_sum_exp(terms, weights) - math.log(bins) - 0.5 * scale**2


def hockey_stick_upper_bound(
    losses: Floats, epsilon: float, *, beta: float, event_probability: float = 1.0
) -> float:
    """Returns an upper confidence bound on H_ε from sampled losses (or upper bounds on losses).

    Args:
      losses: Independent samples [m], drawn given an event outside which the loss is at most
        `epsilon`.
      epsilon: ε.
      beta: Probability with which the bound may fail.
      event_probability: Probability of that event; 1 where samples were drawn without condition.

    Source: Chua et al., arXiv:2412.16802, Algorithms 4 and 5.
    """
    mean = float(np.mean(-np.expm1(np.minimum(epsilon - losses, 0.0))))
    bound = event_probability * kl_upper_bound(min(mean, 1.0), losses.size, beta)
    # A probability that underflows is still not zero.
    return max(bound, float(np.finfo(np.float64).tiny))


def log_probability_max_below(
    ceilings: Floats, *, noise_multiplier: float, bins: int, shift: float
) -> Floats:
    """Returns log Pr(max_t x_t < c) for x ~ N(shift · e_1, σ² I) in `bins` dimensions.

    Φ((c - shift)/σ) Φ(c/σ)^{T-1}, at each c of `ceilings`, float64 of the same shape.
    """
    z = np.asarray(ceilings, dtype=np.float64) / noise_multiplier
    rest = (bins - 1) * log_ndtr(z) if bins > 1 else 0.0
    return log_ndtr(z - shift / noise_multiplier) + rest


def max_event_lower_bound(
    epsilon: float,
    *,
    noise_multiplier: float,
    bins: int,
    shifts: tuple[float, float] = (1.0, 0.0),
) -> float:
    """Returns a proved lower bound on δ from the events {max_t x_t >= c}, in closed form.

    δ(ε) >= P(A) - e^ε Q(A) for every event A, and likewise with P and Q exchanged. Here A = {max_t
    x_t >= c} in the first order and its complement in the second, with the best c found on a grid
    and then refined (any c gives a valid bound). The result is lowered by one part in 10^9 of P(A)
    for rounding.

    Args:
      epsilon: ε >= 0.
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      shifts: Position of the example's coordinate under P and under Q: (1, 0) is balls-and-bins,
        (2, 1) is shuffling (the pair that shuffled batches with gradients -1, and +1 or -1 for the
        example, give).

    Source: Chua et al., arXiv:2412.16802, Appendix B (balls-and-bins); arXiv:2403.17673
    (shuffling).
    """
    check_noise_multiplier(noise_multiplier)
    check_count("bins", bins)
    check_epsilon(epsilon)

    def best_at(ceilings: Floats) -> tuple[float, float]:
        log_p, log_q = (
            log_probability_max_below(
                ceilings, noise_multiplier=noise_multiplier, bins=bins, shift=shift
            )
            for shift in shifts
        )
        above, below = -np.expm1(log_p), np.exp(log_q)
        with np.errstate(over="ignore", invalid="ignore"):
            remove = (1 - _ROUNDING) * above - math.exp(min(epsilon, 700.0)) * -np.expm1(log_q)
            add = (1 - _ROUNDING) * below - np.exp(epsilon + log_p)
        gains = np.maximum(remove, add)
        best = int(np.argmax(gains))
        return float(gains[best]), float(ceilings[best])

    reach = max(shifts) + 40.0 * noise_multiplier
    step = 0.02 * noise_multiplier
    ceilings = np.arange(-40.0 * noise_multiplier, reach + step, step)
    bound, at = best_at(ceilings)
    for _ in range(3):
        ceilings = np.linspace(at - step, at + step, 101)
        step /= 50
        bound, at = max((bound, at), best_at(ceilings))
    return max(bound, 0.0)


_TOO_FEW = "too few samples for so small a delta"


@dataclass(frozen=True)
class MonteCarloProfile:
    """The profile of balls-and-bins as its authors estimate it: upper ends of confidence 1 - β.

    The upper end combines importance sampling (one epoch) and order statistics; the lower end is
    the closed form of `max_event_lower_bound` and is proved. The confidence is that of one query.

    No union bound over the two directions is due: which of them attains the true maximum at ε is
    not random, and max(U_remove, U_add) fails only where the bound of that one fails. Nor over the
    search for epsilon: one set of samples serves every ε, so the bound U(ε) is monotone, and the
    reported epsilon lies below the true one, ε*, only where U fails just below ε*. (With importance
    sampling, the samples are drawn given the event of a proved lower bound ε_0 <= ε*; it contains
    the event of every ε >= ε_0.)

    Attributes:
      noise_multiplier: σ.
      bins: T, the number of batches of one epoch.
      epochs: Number of epochs.
      assignment: "redrawn": bins are drawn anew in each epoch; "fixed": once. The E observations of
        a fixed bin have their mean as a sufficient statistic: one epoch at σ/√E.
      num_samples: m, samples for each direction.
      beta: β, the probability with which an upper end may fail.
      ranks: Ranks of the order statistics, or None to sample every coordinate.
      seed: Seed of the samples; a query is a pure function of the attributes.
    """

    noise_multiplier: float
    bins: int
    epochs: int = 1
    assignment: Literal["redrawn", "fixed"] = "redrawn"
    num_samples: int = 100_000
    beta: float = 1e-3
    ranks: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("bins", self.bins)
        check_count("epochs", self.epochs)
        check_count("num_samples", self.num_samples)
        if self.assignment not in ("redrawn", "fixed"):
            raise ValueError(f'assignment must be "redrawn" or "fixed", got {self.assignment!r}')
        # A smaller β would round the confidence to 1, which means proved.
        if not 1e-12 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [1e-12, 1), got {self.beta}")

    @property
    def _one_epoch(self) -> tuple[float, int]:
        """The noise multiplier and number of epochs after the sufficient statistic is taken."""
        if self.assignment == "fixed":
            return self.noise_multiplier / math.sqrt(self.epochs), 1
        return self.noise_multiplier, self.epochs

    def _lower(self, epsilon: float) -> float:
        # One of several redrawn epochs already costs this much.
        return max_event_lower_bound(epsilon, noise_multiplier=self._one_epoch[0], bins=self.bins)

    def _samples(self, event_epsilon: float) -> list[tuple[Floats, float]]:
        """Losses and the probability of the event that they are drawn under, for each direction."""
        noise_multiplier, epochs = self._one_epoch
        rng = np.random.default_rng(self.seed)
        samples = []
        directions: tuple[Direction, Direction] = ("remove", "add")
        for direction in directions:
            losses = sample_losses(
                rng,
                self.num_samples,
                noise_multiplier=noise_multiplier,
                bins=self.bins,
                direction=direction,
                epochs=epochs,
                ranks=self.ranks,
                event_epsilon=event_epsilon if epochs == 1 else None,
            )
            probability = (
                event_probability(
                    event_epsilon,
                    noise_multiplier=noise_multiplier,
                    bins=self.bins,
                    direction=direction,
                )
                if epochs == 1
                else 1.0
            )
            samples.append((losses, probability))
        return samples

    def _least_upper(self, event_epsilon: float) -> float:
        """Returns what delta's upper end cannot go below, even if no loss exceeded epsilon."""
        noise_multiplier, epochs = self._one_epoch
        directions: tuple[Direction, Direction] = ("remove", "add")
        probability = 1.0
        if epochs == 1:
            probability = max(
                event_probability(
                    event_epsilon,
                    noise_multiplier=noise_multiplier,
                    bins=self.bins,
                    direction=direction,
                )
                for direction in directions
            )
        return probability * kl_upper_bound(0.0, self.num_samples, self.beta)

    def _upper(self, samples: list[tuple[Floats, float]], epsilon: float) -> float:
        return max(
            hockey_stick_upper_bound(losses, epsilon, beta=self.beta, event_probability=probability)
            for losses, probability in samples
        )

    def delta(self, epsilon: float) -> Bound:
        """Bounds δ at `epsilon` >= 0."""
        lower = self._lower(epsilon)
        upper = self._upper(self._samples(epsilon), epsilon)
        return Bound(lower, min(1.0, max(lower, upper)), 1.0 - self.beta)

    def epsilon(self, delta: float, tolerance: float = EPSILON_TOLERANCE) -> Bound:
        """Bounds the smallest ε >= 0 at `delta` in (0, 1); `tolerance` is not used."""
        check_delta(delta)
        lower = epsilon_from_delta(lambda e: 1.0, self._lower, delta, resolution=1e-9).lower
        if self._least_upper(lower) > delta:
            return Bound(lower, math.inf, 1.0 - self.beta, _TOO_FEW)
        samples = self._samples(lower)
        found = epsilon_from_delta(
            lambda e: self._upper(samples, max(e, lower)), lambda e: 0.0, delta, resolution=1e-9
        )
        note = "" if found.upper < math.inf else _TOO_FEW
        return Bound(lower, max(lower, found.upper), 1.0 - self.beta, note)
