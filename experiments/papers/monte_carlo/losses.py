"""Samples of the privacy loss of balls-and-bins, or of upper bounds on it.

Under P the observation is x ~ N(e_1, σ² I) in T dimensions, under Q x ~ N(0, σ² I); "remove" takes
L = log dP/dQ under P, "add" takes L = -log dP/dQ under Q, and H_ε = E[(1 - e^{ε-L})_+].
Importance sampling and order statistics: docs/explanation/monte-carlo-estimates.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import scipy

from accounting.algebra.cells import Array
from accounting.max_events import Epoch
from accounting.profile import Direction

# Entries of the largest temporary array; several of them live at once (about 100 MB in all).
_CHUNK_ENTRIES = 2**21


def geometric_ranks(num_draws: int, growth: float = 1.02) -> tuple[int, ...]:
    """Returns ranks 1, 2, 3, ... that grow geometrically.

    All top ranks are included, which carry the privacy loss; the bulk has a relative spacing of
    `growth` - 1.

    >>> geometric_ranks(20, growth=1.5)
    (1, 2, 3, 4, 6, 9, 13, 19)

    Args:
      num_draws: Largest rank.
      growth: Factor between large ranks, above 1.
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
) -> Array:
    """Samples log order statistics of uniform draws, jointly at some ranks.

    Args:
      rng: Source of randomness.
      size: Number of independent samples.
      num_draws: Number n of uniform draws on [0, 1].
      ranks: Ranks r_1 < ... < r_R in [1, n]; rank 1 is the largest draw.

    Returns:
      Logarithms of the draws: float64[size, R].

    Source: Chua et al., arXiv:2412.16802, Algorithm 6.
    """
    r = np.asarray(ranks, dtype=np.int64)
    gaps = np.diff(r, prepend=0)
    # 1 - y ~ Beta(gap, n - r + 1) is small, so it is drawn in place of y.
    return np.cumsum(np.log1p(-rng.beta(gaps, num_draws - r + 1.0, (size, r.size))), axis=1)


def _draws_below(
    rng: np.random.Generator,
    log_ceiling: Array,
    num_draws: int,
    ranks: Sequence[int] | None,
    direction: Direction,
) -> tuple[Array, Array]:
    """Draws standard normals below a ceiling: values [size, K] and weights [K] that stand for them.

    `log_ceiling` [size] is log Φ of the ceiling. Under `ranks` the weighted sum of any increasing
    function bounds the sum over all draws: from above for "remove", from below for "add".
    """
    size = log_ceiling.size
    if ranks is None:
        log_cdf = log_ceiling[:, None] - rng.standard_exponential((size, num_draws))
        weights = np.ones(num_draws)
    else:
        valid = [r for r in ranks if r <= num_draws]
        log_cdf = log_ceiling[:, None] + log_order_statistics(rng, size, num_draws, valid)
        bounds = [*valid, num_draws + 1] if direction == "remove" else [0, *valid]
        weights = np.diff(bounds).astype(np.float64)
    # A draw of exactly log 1 would be an infinite normal.
    return scipy.special.ndtri_exp(np.minimum(log_cdf, -1e-300)), weights


def _log_weighted_sum_exp(values: Array, weights: Array) -> Array:
    top = values.max(axis=1)
    return top + np.log(np.exp(values - top[:, None]) @ weights)


def _chunks(values: Array, width: int) -> Iterator[Array]:
    """Yields consecutive views of `values` that fit into memory with `width` columns each."""
    chunk = max(1, _CHUNK_ENTRIES // width)
    for start in range(0, values.size, chunk):
        yield values[start : start + chunk]


def sample_others(
    rng: np.random.Generator,
    num_samples: int,
    epoch: Epoch,
    ranks: Sequence[int],
    ceiling: float,
    exceeded: bool,
) -> Array:
    """Samples bounds on T - 1 bins' part of the likelihood ratio.

    The part under Q is (1/T) Σ e^(z_t/σ - 1/(2σ²)) over T - 1 standard normal z_t; 0 for one bin.

    Args:
      rng: Source of randomness.
      num_samples: Number of independent samples.
      epoch: Noise multiplier σ and number T of bins.
      ranks: Ranks of the order statistics that bound the sum, see `sample_losses`.
      ceiling: Ceiling c of the condition.
      exceeded: Whether some z_t exceeds c under the condition, or none does.

    Returns:
      Upper bounds on the part: float64[num_samples].
    """
    scale, num_bins, contributions = (
        1.0 / epoch.noise_multiplier,
        epoch.bins - 1,
        np.zeros(num_samples),
    )
    log_below = float(scipy.special.log_ndtr(ceiling))
    for chunk in _chunks(contributions, len(ranks) + 2) if num_bins else ():
        log_ceiling = np.full(chunk.size, log_below)
        if exceeded:
            log_ceiling = _log_top(rng, chunk.size, num_bins, log_below)
        z, weights = _draws_below(rng, log_ceiling, num_bins - exceeded, ranks, "remove")
        if exceeded:
            z = np.concatenate([scipy.special.ndtri_exp(log_ceiling)[:, None], z], axis=1)
            weights = np.concatenate([np.ones(1), weights])
        log_sum = _log_weighted_sum_exp(scale * z, weights)
        chunk += np.exp(log_sum - math.log(epoch.bins) - 0.5 * scale**2)
    return contributions


def _log_top(rng: np.random.Generator, size: int, num_draws: int, log_below: float) -> Array:
    """Samples log Φ of the largest of standard normal draws, given that it exceeds a ceiling.

    Its distribution function to the power `num_draws` is uniform on [Φ^num_draws, 1].
    """
    above = -math.expm1(num_draws * log_below)
    return np.minimum(np.log1p(-above * rng.random(size)) / num_draws, -1e-300)


def _event_ceiling(epsilon: float, epoch: Epoch, direction: Direction) -> float:
    """Returns c/σ, where c bounds the event outside which the loss is at most `epsilon`."""
    variance, bins = epoch.noise_multiplier**2, epoch.bins
    if direction == "remove":
        # log(1 + (e^{1/σ²} - 1)/T) with no overflow at small σ.
        log_ratio = np.logaddexp(
            math.log1p(-1.0 / bins) if bins > 1 else -math.inf, 1.0 / variance - math.log(bins)
        )
        return float((0.5 + variance * (epsilon - log_ratio)) / epoch.noise_multiplier)
    return (0.5 + variance * (math.log(bins) - epsilon)) / epoch.noise_multiplier


def event_probability(epsilon: float, epoch: Epoch, direction: Direction) -> float:
    """Returns the probability of an event with all larger losses.

    It is 1 - Φ(c/σ)^T under P for "remove", Φ(c/σ)^T under Q for "add". Outside the event the
    privacy loss is at most ε.

    Args:
      epsilon: ε, the bound on the loss outside the event.
      epoch: Noise multiplier σ and number T of bins.
      direction: "remove" or "add".

    Source: Chua et al., arXiv:2412.16802, Algorithm 5.
    """
    ceiling = _event_ceiling(epsilon, epoch, direction)
    log_below = epoch.bins * float(scipy.special.log_ndtr(ceiling))
    return -math.expm1(log_below) if direction == "remove" else math.exp(log_below)


def sample_losses(
    rng: np.random.Generator,
    num_samples: int,
    epoch: Epoch,
    direction: Direction,
    *,
    epochs: int = 1,
    ranks: Sequence[int] | None = None,
    event_epsilon: float | None = None,
) -> Array:
    """Samples balls-and-bins' privacy loss, or upper bounds on it.

    Args:
      rng: Source of randomness.
      num_samples: Number of independent samples.
      epoch: Noise multiplier σ and number T of bins.
      direction: "remove": log dP/dQ under P; "add": -log dP/dQ under Q.
      epochs: Number of epochs with redrawn bins, whose independent losses are added.
      ranks: Ranks (1 first) whose order statistics bound all coordinates: the result is an upper
        bound on a loss. None samples every coordinate: exact, at a cost of T normals per sample.
      event_epsilon: ε of the event (see `event_probability`) given which samples of one epoch are
        drawn. None samples without condition.

    Returns:
      Losses, float64 of shape [num_samples]. Temporary memory is about 100 MB for all sizes.

    Source: Chua et al., arXiv:2412.16802, Algorithms 4, 6, 10, 11 and Appendix B.3.
    """
    log_ceiling = None
    if event_epsilon is not None:
        ceiling = _event_ceiling(event_epsilon, epoch, direction)
        log_ceiling = float(scipy.special.log_ndtr(ceiling))
    losses = np.zeros(num_samples)
    for chunk in _chunks(losses, 2 + (epoch.bins if ranks is None else len(ranks))):
        for _ in range(epochs):
            chunk += _losses(rng, chunk.size, epoch, direction, ranks, log_ceiling)
    return losses


def _losses(
    rng: np.random.Generator,
    size: int,
    epoch: Epoch,
    direction: Direction,
    ranks: Sequence[int] | None,
    log_ceiling: float | None,
) -> Array:
    # x_t/σ² = (y_t + shift)/σ² = scale * (z_t + scale * shift)
    scale, bins = 1.0 / epoch.noise_multiplier, epoch.bins
    if direction == "add":
        z, weights = _draws_below(rng, np.full(size, log_ceiling or 0.0), bins, ranks, direction)
        return math.log(bins) + 0.5 * scale**2 - _log_weighted_sum_exp(scale * z, weights)
    if log_ceiling is None:
        columns = [rng.standard_normal((size, 1)) + scale]
        z, weights = _draws_below(rng, np.zeros(size), bins - 1, ranks, direction)
    else:
        log_top = _log_top(rng, size, bins, log_ceiling)
        top = scipy.special.ndtri_exp(log_top)[:, None]
        z, weights = np.zeros((size, 0)), np.zeros(0)
        columns = [top + scale]
        if bins > 1:
            # The largest coordinate is the shifted one with probability 1/T. The other coordinates
            # are iid below it; one of them, `second`, is the shifted one if the largest is not.
            second, _ = _draws_below(rng, log_top, 1, None, direction)
            at_shifted = rng.random((size, 1)) < 1.0 / bins
            z, weights = _draws_below(rng, log_top, bins - 2, ranks, direction)
            shifted = np.where(at_shifted, top, second) + scale
            columns = [shifted, np.where(at_shifted, second, top)]
    weights = np.concatenate([np.ones(len(columns)), weights])
    terms = scale * np.concatenate([*columns, z], axis=1)
    return _log_weighted_sum_exp(terms, weights) - math.log(bins) - 0.5 * scale**2
