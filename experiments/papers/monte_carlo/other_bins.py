"""Samples all bins except the example's, which is integrated, and proves tail bounds.

X = dP/dQ is the mean of T independent log-normal variables of mean 1, bounded by its Laplace
transform. Proofs: docs/explanation/monte-carlo-estimates.md and
docs/explanation/tails-of-balls-and-bins.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells, normal_drift
from accounting.checks import check_epsilon
from accounting.max_events import Epoch
from experiments.papers.monte_carlo.confidence import Inequality, mean_upper_bound
from experiments.papers.monte_carlo.losses import sample_others

_LOWEST, _HIGHEST, _CELLS = -36.0, 12.0, 1200
_ROUNDING = 1e-12
"""Bounds the relative error of a sum of masses of these cells."""


def log_laplace_transform(t: Array, epoch: Epoch, ceiling: float = math.inf) -> Array:
    """Bounds log E[e^(-tX)] from above at each t.

    Args:
      t: float64[points], all > 0, or all < 0 with a ceiling.
      epoch: Noise multiplier σ and number T of bins.
      ceiling: Largest value, in [-30, 12], of each of X's T standard normal variables in the event
        that counts; by default none.

    Returns:
      float64[points].
    """
    deviation, bins = 1.0 / epoch.noise_multiplier, epoch.bins
    edges = np.linspace(_LOWEST, min(_HIGHEST, ceiling), _CELLS + 1)
    value = np.exp(deviation * edges - 0.5 * deviation**2)
    log_mass = log_normal_cells(edges)
    mass, mean = np.exp(log_mass), np.exp(log_normal_cells(edges, deviation) - log_mass)
    error = 2.0 * (normal_drift(edges) + normal_drift(edges, deviation)) * mean
    # e^(-ta) is convex in a: in each cell it lies below its chord, also where its slope is rounded.
    sign = 1.0 if np.all(t > 0.0) else -1.0
    with np.errstate(invalid="ignore"):
        up = (mean - sign * error - value[:-1]) / np.diff(value)
    # Where values underflow all weight is on the end of the larger e^(-ta).
    up = np.clip(np.where(np.isnan(up), 0.5 - 0.5 * sign, up), 0.0, 1.0)
    weights = np.concatenate([mass * (1.0 - up), [0.0]]) + np.concatenate([[0.0], mass * up])
    below = float(scipy.special.ndtr(_LOWEST))
    if ceiling > _HIGHEST:
        weights[-1] += float(scipy.special.ndtr(-_HIGHEST))
    with np.errstate(over="ignore"):
        terms = np.exp(-np.multiply.outer(t / bins, value))
    log_transform = bins * (np.log(np.maximum(terms @ weights + below, 1e-300)) + _ROUNDING)
    return np.minimum(log_transform, 0.0) if sign > 0.0 else log_transform


def add_delta_upper_bound(epsilon: float, epoch: Epoch) -> float:
    """Bounds H_ε(Q||P) of one epoch from above, with proof.

    The direction is "add". The bound is the least (a/t) e^(t/a - 1) E[e^(-tX)] over t >= a = e^ε.

    Args:
      epsilon: ε >= 0.
      epoch: Noise multiplier σ and number T of bins.
    """
    check_epsilon(epsilon)
    ratio = np.geomspace(1.0, 1e6, 200)
    transform = log_laplace_transform(np.exp(min(epsilon, 600.0)) * ratio, epoch)
    return float(np.exp(min(0.0, (ratio - 1.0 - np.log(ratio) + transform).min()) + _ROUNDING))


def truncated_tail(values: Array, epoch: Epoch, ceiling: float) -> Array:
    """Bounds Pr(X >= x, no normal above c) from above.

    The bound under Q is the least e^(-tx) E[e^(tX)] over t > 0, within the event that no normal
    variable exceeds c.

    Args:
      values: Points x: float64[points].
      epoch: Noise multiplier σ and number T of bins.
      ceiling: Ceiling c of each of X's T standard normal variables, in [-30, 12].
    """
    largest = ceiling / epoch.noise_multiplier - 0.5 / epoch.noise_multiplier**2
    t = epoch.bins * np.geomspace(0.1, 60.0, 48) * math.exp(-max(largest, -600.0))
    log_mgf = log_laplace_transform(-t, epoch, ceiling)
    bounds = np.exp(np.minimum(log_mgf[:, None] - np.multiply.outer(t, values), 0.0)).min(0)
    return bounds * (1.0 + _ROUNDING)


_OWN = np.linspace(-10.0, 14.0, 4001)
"""Ends of cells of the example's own standard normal variable."""


def other_bins_curve(
    rng: np.random.Generator,
    num_samples: int,
    epoch: Epoch,
    ranks: Sequence[int],
    *,
    first: float,
    rest: float,
    beta: float,
    inequality: Inequality,
) -> Callable[[float], tuple[float, float]]:
    """Returns a function from ε to δ's estimate and upper end.

    Half of the samples are drawn given that no other bin's normal variable exceeds a ceiling, half
    given that one does. In the first half, a part S of the ratio above a cut counts as 1, with a
    proved probability. Ceiling and cut are chosen before any sample is seen.

    Args:
      rng: Source of randomness.
      num_samples: Number m of samples.
      epoch: Noise multiplier σ and number T of bins.
      ranks: Ranks of the order statistics that bound the sum, see `sample_others`.
      first: Least ε of all questions, for which ceiling and cut are chosen.
      rest: Largest wanted probability above the cut.
      beta: β, the probability with which an upper end may fail.
      inequality: Inequality of `mean_upper_bound`.
    """
    half, beta = -(-num_samples // 2), 0.5 * beta
    places = np.concatenate(
        [np.linspace(0.0, 2.0, 800), np.geomspace(2.01, 8.0 * math.exp(first), 300)]
    )
    excess = _excess(first, places, epoch)
    budget, typical = -math.log(beta) / half, float(np.interp(1.0, places, excess))
    noise = excess * budget + np.sqrt(2.0 * excess * typical * budget)
    choices = []
    for ceiling in np.linspace(1.0, 11.0, 21):
        log_below = float(scipy.special.log_ndtr(ceiling))
        above = -math.expm1((epoch.bins - 1) * log_below)
        # A tail of T - 1 variables: the last one adds a factor E[e^(tA/T); z <= c] >= Φ(c).
        tail = truncated_tail(places, epoch, ceiling) * math.exp(-log_below)
        cost = np.where(tail <= max(rest, tail.min()), tail + noise, math.inf)
        cut = int(cost.argmin())
        choices.append((cost[cut] + above * budget, ceiling, above, cut, float(tail[cut])))
    _, ceiling, above, cut, tail_mass = min(choices)
    most = max(float(excess[cut]), 1e-300)
    # The places that are next above S.
    within, beyond = (
        np.searchsorted(places, sample_others(rng, half, epoch, ranks, ceiling, exceeded))
        for exceeded in (False, True)
    )
    within = np.minimum(within, cut)

    def estimate_delta(epsilon: float) -> tuple[float, float]:
        values = np.append(_excess(epsilon, places, epoch), 1.0)
        halves = [((1.0 - above) * most, values[within] / most), (above, values[beyond])]
        mean = sum(weight * float(x.mean()) for weight, x in halves)
        upper = sum(weight * mean_upper_bound(x, beta, inequality) for weight, x in halves)
        return mean, max(upper + tail_mass, add_delta_upper_bound(epsilon, epoch))

    return estimate_delta


def _excess(epsilon: float, others: Array, epoch: Epoch) -> Array:
    """Bounds E[(1 - e^(ε - L))_+ | S] from above, at each S of `others`, ascending.

    It grows with S and with the example's own normal variable, whose cells take their ends.
    """
    scale = 1.0 / epoch.noise_multiplier
    ratio = np.exp(np.clip(scale * _OWN + 0.5 * scale**2, -600.0, 700.0)) / epoch.bins
    mass = np.exp(log_normal_cells(_OWN)) * (1.0 + 1e-12)
    threshold = math.exp(min(epsilon, 700.0))
    below, beyond = scipy.special.ndtr(_OWN[0]), scipy.special.ndtr(-_OWN[-1])
    means = np.empty(others.shape)
    for i, other_ratio in enumerate(others):
        value = np.maximum(1.0 - threshold / (other_ratio + ratio), 0.0)
        means[i] = value[1:] @ mass + below * value[0] + beyond
    return np.minimum(means, 1.0)
