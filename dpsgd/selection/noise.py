"""Least noise of each candidate at which a selection meets its target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from accounting import (
    PrivacyProfile,
    SelectionProfile,
    TrialCount,
    calibrate,
)
from accounting.calibration import least_noise
from accounting.releases import EnvelopeProfile

Privacy = Callable[[float], PrivacyProfile]
"""Maps a noise multiplier to the profile of a mechanism that uses it."""

Profiles = Callable[[list[float]], list[PrivacyProfile]]
"""Maps the candidates' noise multipliers to the profiles of their trials."""

_STEP = 1.0005
"""Factor that raises the noise in steps until the trials suffice."""
_MOST_STEPS = 200


def for_epsilon(
    candidates: Sequence[Privacy],
    count: TrialCount,
    *,
    epsilon: float,
    delta: float,
    profiles: Profiles,
) -> list[float]:
    r"""Returns each candidate's noise multiplier for a selection's epsilon.

    `accounting.SelectionProfile` needs a trial's profile at two points: with an e of :math:`(1 -
    \gamma) \delta(e) \le \gamma (\exp(e) - 1)`, the selection costs at most :math:`b + (\eta + 1)
    e` where :math:`\delta(b) \le \delta / E[K]`. The first candidate has the least noise at which
    its own selection meets the target; every other candidate has the least noise that meets the
    same (e, b). The result is checked with the envelope of all `profiles`, which may differ from
    the profiles in `candidates`.

    Args:
      candidates: Profile of each candidate as a function of its noise multiplier.
      count: Law of the number K of trials.
      epsilon: Target of the whole selection.
      delta: Probability delta of the guarantee.
      profiles: Profiles of the trials at given noise multipliers.

    Raises:
      ValueError: If no noise suffices.
    """
    first, *other_candidates = candidates
    sigma = calibrate(lambda s: SelectionProfile(first(s), count), epsilon=epsilon, delta=delta)
    sigmas = [sigma]
    shared = delta / count.mean / _ROUNDING
    b = first(sigma).epsilon(shared).upper
    e = (epsilon - b) / (count.shape + 1.0)
    condition = count.gamma / (1.0 - count.gamma) * math.expm1(e) / _ROUNDING
    for privacy in other_candidates:
        needed = [calibrate(privacy, epsilon=b, delta=shared)]
        if condition < 1.0:
            needed.append(least_noise(privacy, e, condition))
        sigmas.append(max(needed))
    for _ in range(_MOST_STEPS):
        selection = SelectionProfile(EnvelopeProfile(tuple(profiles(sigmas))), count)
        if selection.epsilon(delta).upper <= epsilon:
            return sigmas
        sigmas = [sigma * _STEP for sigma in sigmas]
    raise ValueError(
        f"no noise was found at which the selection has epsilon <= {epsilon} at delta {delta}"
    )


_ROUNDING = 1.0 + 1e-6
