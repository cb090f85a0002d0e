"""Samples of all bins but the example's, whose own coordinate is integrated.

Proof: docs/explanation/monte-carlo-estimates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy

from accounting.algebra.cells import Array, log_normal_cells
from accounting.max_events import Epoch
from experiments.papers.monte_carlo.confidence import Inequality, mean_upper_bound
from experiments.papers.monte_carlo.losses import sample_others
from experiments.papers.tails import add_delta_upper_bound, truncated_tail

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
