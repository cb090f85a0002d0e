"""Privacy profiles as events and privacy loss distributions of dp_accounting.

Proof and sources: docs/explanation/privacy-loss-distributions.md.
"""

from __future__ import annotations

import functools
import math
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting.algebra.cells import Array
from accounting.profile import PrivacyProfile, proved
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.truncated import TruncatedProfile
from accounting.profiles.user_poisson import UserPoissonProfile

# Upper values are raised by this much, so that rounding in the masses of a pair cannot go below
# them.
_ROUNDING = 1e-9
_LARGEST_EPSILON = 500.0
_PEER_TOLERANCE = 1e-3
"""Difference of epsilons that counts as equal, and spacing of the losses in dp_accounting."""


def to_privacy_loss_distribution(
    profile: PrivacyProfile, *, interval: float = 1e-2, tail: float = 1e-12
) -> Any:
    """Returns a profile's upper end as dp_accounting's distribution.

    It is pessimistic, and ready to be composed.

    >>> from accounting import GaussianProfile
    >>> converted = to_privacy_loss_distribution(GaussianProfile(2.0))
    >>> f"{converted.self_compose(4).get_epsilon_for_delta(1e-5):.2f}"  # as of sigma 1
    '4.38'

    Args:
      profile: Any profile whose bounds are proved (confidence 1).
      interval: d > 0, spacing of the losses. The distribution is off by order d².
      tail: The δ in (0, 1) below which the curve is not resolved; it becomes an infinite loss.

    Raises:
      ValueError: If an argument is out of range, the profile's bounds hold only with some
        confidence, or δ does not fall to `tail`.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    upper = _upper_values(profile, interval, tail)
    a = np.exp(interval * np.arange(upper.size))
    h = np.minimum(1.0, (1.0 + _ROUNDING) * upper)
    # The chord from 1/a_k to a_k bounds h at 1 (and leaves a nonnegative mass at the loss 0).
    h[0] = min(1.0, float(np.min((2.0 * h + a - 1.0) / (1.0 + a))))
    minorant = _convex_minorant(a, h)
    slopes = np.append(np.diff(h[minorant]) / np.diff(a[minorant]), 0.0)
    # Masses of P and Q at the losses kd; at -kd they are exchanged.
    q = np.zeros(a.size)
    q[minorant[1:]] = np.diff(slopes)
    p = a * q
    infinity = float(h[minorant[-1]])
    p[0] = max(0.0, 1.0 - infinity - p[1:].sum() - q[1:].sum())
    masses = {-k: float(q[k]) for k in range(q.size - 1, 0, -1)}
    masses |= {k: float(p[k]) for k in range(p.size)}
    pmf = pld_pmf.create_pmf(masses, interval, infinity, pessimistic_estimate=True)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def to_dp_event(profile: PrivacyProfile) -> Any:
    """Returns a profile's mechanism as an event of dp_accounting.

    Batches that are cut to a maximum size are converted without the cut.

    >>> from accounting import PoissonProfile
    >>> to_dp_event(PoissonProfile(1.0, 0.01, 100)).count
    100

    Args:
      profile: Profile of fixed batches, Poisson samples, or Poisson samples of users.

    Raises:
      ValueError: If dp_accounting has no event for the mechanism.
    """
    from dp_accounting import dp_event
    from scipy import stats

    match profile:
        case TruncatedProfile():
            return to_dp_event(profile.profile)
        case GaussianProfile(relative_error=0):
            return dp_event.GaussianDpEvent(profile.noise_multiplier)
        case PoissonProfile():
            step = dp_event.GaussianDpEvent(profile.noise_multiplier)
            step = dp_event.PoissonSampledDpEvent(profile.sampling_prob, step)
        case UserPoissonProfile():
            tau, prob = profile.max_contributions, profile.sampling_prob
            counts = np.arange(tau + 1)
            weights = stats.binom.pmf(counts, tau, prob)
            step = dp_event.MixtureOfGaussiansDpEvent(
                profile.noise_multiplier, counts.tolist(), (weights / weights.sum()).tolist()
            )
        case _:
            raise ValueError(
                f"dp_accounting has no event for a {type(profile).__name__}, only for poisson, "
                "user-poisson and deterministic batches"
            )
    event = dp_event.SelfComposedDpEvent(step, profile.steps)
    if math.isinf(profile.release):
        return event
    return dp_event.ComposedDpEvent([event, dp_event.GaussianDpEvent(profile.release)])


def compare_with_peer(profile: PrivacyProfile, delta: float) -> str:
    """Returns the epsilon of dp_accounting beside the certified interval, in one sentence.

    Args:
      profile: Profile as for `to_dp_event`.
      delta: Delta at which both are computed.

    Raises:
      ValueError: If dp_accounting has no event for the mechanism.
    """
    event = to_dp_event(profile)
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    ours = profile.epsilon(delta)
    interval = _PEER_TOLERANCE * (1.0 if ours.upper >= 1.0 else 0.1)
    accountant = PLDAccountant(value_discretization_interval=interval)
    peer = float(accountant.compose(event).get_epsilon(delta))
    if peer < ours.lower - _PEER_TOLERANCE:
        relation = "below our proved lower end, so that one of both is wrong: please report it"
    elif peer > ours.upper + _PEER_TOLERANCE:
        optimistic = float(_optimistic(event, interval).get_epsilon_for_delta(delta))
        if optimistic > ours.upper:
            relation = (
                f"its optimistic {optimistic:.4g} contradicts our upper end: please report it"
            )
        else:
            excess = peer - ours.upper
            relation = f"above our upper end by {excess:.2g}; its estimate is pessimistic"
    elif ours.upper - ours.lower > 2.0 * _PEER_TOLERANCE * min(1.0, ours.upper):
        relation = "inside our interval"
        if not ours.lower <= peer <= ours.upper:
            relation = "outside our interval by less than the grid of its losses"
    else:
        relation = "equal up to the grid of its losses"
    if isinstance(profile, TruncatedProfile):
        relation += "; it does not count the batches that are cut"
    return (
        f"dp_accounting {version('dp-accounting')} (PLD accountant, add-or-remove adjacency): "
        f"epsilon {peer:.4g}, ours {ours}: {relation}"
    )


def _optimistic(event: Any, interval: float) -> Any:
    """Returns dp_accounting's distribution of an event, with losses rounded down."""
    from dp_accounting import dp_event
    from dp_accounting.pld import privacy_loss_distribution as pld

    down: dict[str, Any] = {"pessimistic_estimate": False, "use_connect_dots": False}
    down["value_discretization_interval"] = interval
    match event:
        case dp_event.ComposedDpEvent():
            losses = [_optimistic(step, interval) for step in event.events]
            return functools.reduce(lambda total, loss: total.compose(loss), losses)
        case dp_event.SelfComposedDpEvent():
            return _optimistic(event.event, interval).self_compose(event.count)
        case dp_event.GaussianDpEvent():
            return pld.from_gaussian_mechanism(event.noise_multiplier, **down)
        case dp_event.PoissonSampledDpEvent():
            sigma, prob = event.event.noise_multiplier, event.sampling_probability
            return pld.from_gaussian_mechanism(sigma, sampling_prob=prob, **down)
        case dp_event.MixtureOfGaussiansDpEvent():
            mixture = event.standard_deviation, event.sensitivities, event.sampling_probs
            return pld.from_mixture_gaussian_mechanism(*mixture, **down)
    raise ValueError(f"to_dp_event makes no {type(event).__name__}")


def _upper_values(profile: PrivacyProfile, interval: float, tail: float) -> Array:
    """Returns upper bounds on δ at ε = 0, d, 2d, ..., until one is at most `tail`."""
    if not 0.0 < interval <= 1.0:
        raise ValueError(f"interval must be in (0, 1], got {interval}")
    if not 0.0 < tail < 1.0:
        raise ValueError(f"tail must be in (0, 1), got {tail}")
    upper: list[float] = []
    while not upper or upper[-1] > tail:
        epsilon = len(upper) * interval
        if epsilon > _LARGEST_EPSILON:
            raise ValueError(
                f"delta is still {upper[-1]} at epsilon = {epsilon}: "
                "ask for a larger tail, or add noise"
            )
        upper.append(proved(profile.delta(epsilon)).upper)
    return np.array(upper)


def _convex_minorant(x: Array, y: Array) -> NDArray[np.int64]:
    """Returns the indices of the points at which the greatest convex function below all bends."""
    vertices: list[int] = []
    for k in range(x.size):
        while len(vertices) >= 2:
            i, j = vertices[-2], vertices[-1]
            if (y[j] - y[i]) / (x[j] - x[i]) < (y[k] - y[j]) / (x[k] - x[j]):
                break
            vertices.pop()
        vertices.append(k)
    return np.array(vertices)
