"""Samples of the privacy loss of balls-and-bins, or of upper bounds on it.

Under P the observation is x ~ N(e_1, σ² I) in T dimensions, under Q x ~ N(0, σ² I); "remove" takes
L = log dP/dQ under P, "add" takes L = -log dP/dQ under Q, and H_ε = E[(1 - e^{ε-L})_+].
Importance sampling and order statistics: docs/explanation/monte-carlo-estimates.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy

from accounting.algebra.cells import Array
from accounting.profile import Direction, check_count, check_noise_multiplier

# Entries of the largest temporary array; several of them live at once (about 100 MB in all).
_CHUNK_ENTRIES = 2**21


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
) -> Array:
    """Samples log U for the largest of `num_draws` uniform draws, jointly at the given ranks.

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
        kept = [r for r in ranks if r <= num_draws]
        log_cdf = log_ceiling[:, None] + log_order_statistics(rng, size, num_draws, kept)
        bounds = [*kept, num_draws + 1] if direction == "remove" else [0, *kept]
        weights = np.diff(bounds).astype(np.float64)
    # A draw of exactly log 1 would be an infinite normal.
    return scipy.special.ndtri_exp(np.minimum(log_cdf, -1e-300)), weights


def _log_weighted_sum_exp(values: Array, weights: Array) -> Array:
    top = values.max(axis=1)
    return top + np.log(np.exp(values - top[:, None]) @ weights)


def sample_others(
    rng: np.random.Generator,
    num_samples: int,
    *,
    noise_multiplier: float,
    bins: int,
    ranks: Sequence[int],
    ceiling: float,
    exceeded: bool,
) -> Array:
    """Samples upper bounds on what T - 1 bins contribute to the likelihood ratio under Q.

    (1/T) Σ e^(z_t/σ - 1/(2σ²)) over T - 1 standard normal z_t: 0 of one bin.

    Args:
      rng: Source of randomness.
      num_samples: Number of independent samples.
      noise_multiplier: σ.
      bins: T.
      ranks: Of the order statistics that stand for all, see `sample_losses`.
      ceiling: c.
      exceeded: Whether samples are drawn given that a z_t exceeds c, or given that none does.

    Returns:
      float64 of shape [num_samples].
    """
    scale, chunk = 1.0 / noise_multiplier, max(1, _CHUNK_ENTRIES // (len(ranks) + 2))
    log_below, found = float(scipy.special.log_ndtr(ceiling)), np.zeros(num_samples)
    for start in range(0, num_samples if bins > 1 else 0, chunk):
        part = found[start : start + chunk]
        log_ceiling = np.full(part.size, log_below)
        if exceeded:
            log_ceiling = _log_top(rng, part.size, bins - 1, log_below)
        z, weights = _draws_below(rng, log_ceiling, bins - 1 - exceeded, ranks, "remove")
        if exceeded:
            z = np.concatenate([scipy.special.ndtri_exp(log_ceiling)[:, None], z], axis=1)
            weights = np.concatenate([np.ones(1), weights])
        part += np.exp(_log_weighted_sum_exp(scale * z, weights) - math.log(bins) - 0.5 * scale**2)
    return found


def _log_top(rng: np.random.Generator, size: int, num_draws: int, log_below: float) -> Array:
    """Samples log Φ of the largest of standard normal draws, given that it exceeds a ceiling.

    Its distribution function to the power `num_draws` is uniform on [Φ^num_draws, 1].
    """
    above = -math.expm1(num_draws * log_below)
    return np.minimum(np.log1p(-above * rng.random(size)) / num_draws, -1e-300)


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

    1 - Φ(c/σ)^T under P for "remove", Φ(c/σ)^T under Q for "add", T = `bins`.

    Source: Chua et al., arXiv:2412.16802, Algorithm 5.
    """
    ceiling = _event_ceiling(epsilon, noise_multiplier, bins, direction)
    log_below = bins * float(scipy.special.log_ndtr(ceiling))
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
) -> Array:
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
) -> Array:
    scale = 1.0 / noise_multiplier  # x_t/σ² = (y_t + shift)/σ² = scale * (z_t + scale * shift)
    ceiling = (
        math.inf
        if event_epsilon is None
        else _event_ceiling(event_epsilon, noise_multiplier, bins, direction)
    )
    if direction == "add":
        log_ceiling = np.full(size, float(scipy.special.log_ndtr(ceiling)))
        z, weights = _draws_below(rng, log_ceiling, bins, ranks, direction)
        return math.log(bins) + 0.5 * scale**2 - _log_weighted_sum_exp(scale * z, weights)
    if event_epsilon is None:
        shifted = rng.standard_normal((size, 1)) + scale
        z, weights = _draws_below(rng, np.zeros(size), bins - 1, ranks, direction)
        columns = [shifted, z]
        weights = np.concatenate([np.ones(1), weights])
    else:
        log_top = _log_top(rng, size, bins, float(scipy.special.log_ndtr(ceiling)))
        top = scipy.special.ndtri_exp(log_top)[:, None]
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
