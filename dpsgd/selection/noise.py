"""The noise of the candidates of a selection: the least at which the whole meets its target."""

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
from accounting.releases.envelope import EnvelopeProfile

Privacy = Callable[[float], PrivacyProfile]
"""Maps a noise multiplier to the profile of a mechanism that uses it."""


Profiles = Callable[[list[float]], list[PrivacyProfile]]
"""Maps a noise multiplier of each candidate to the profiles of the trials that have them."""

_STEP = 1.0005
"""By which noise is raised until the trials suffice, where they differ from what was searched."""
_MOST_STEPS = 200


def for_epsilon(
    candidates: Sequence[Privacy],
    count: TrialCount,
    *,
    epsilon: float,
    delta: float,
    profiles: Profiles | None = None,
) -> list[float]:
    r"""Returns each candidate's noise multiplier, so that the selection costs at most `epsilon`.

    The theorem of `accounting.SelectionProfile` asks a trial's profile at two points alone: with an
    e of :math:`(1 - \gamma) \delta(e) \le \gamma (\exp(e) - 1)`, the whole costs at most :math:`b +
    (\eta + 1) e` where :math:`\delta(b) \le \delta / E[K]`. So the first candidate has the least
    noise at which its own selection meets the target; its (e, b) are those that every other one has
    to meet, each by the least noise that does. What is returned was seen to suffice, for the
    envelope of all: of `profiles`, where those of the trials are only about those of `candidates`.

    Raises:
      ValueError: if no noise suffices.
    """
    first, *others = candidates
    sigma = calibrate(lambda s: SelectionProfile(first(s), count), epsilon=epsilon, delta=delta)
    sigmas = [sigma]
    shared = delta / count.mean / _ROUNDING
    b = first(sigma).epsilon(shared).upper
    e = (epsilon - b) / (count.shape + 1.0)
    condition = count.gamma / (1.0 - count.gamma) * math.expm1(e) / _ROUNDING
    for privacy in others:
        needed = [calibrate(privacy, epsilon=b, delta=shared)]
        if condition < 1.0:
            needed.append(least_noise(privacy, e, condition))
        sigmas.append(max(needed))
    profiles = profiles or _of(candidates)
    for _ in range(_MOST_STEPS):
        whole = SelectionProfile(EnvelopeProfile(tuple(profiles(sigmas))), count)
        if whole.epsilon(delta).upper <= epsilon:
            return sigmas
        sigmas = [sigma * _STEP for sigma in sigmas]
    raise ValueError(
        f"no noise was found at which the selection has epsilon <= {epsilon} at delta {delta}"
    )


_ROUNDING = 1.0 + 1e-6


def _of(candidates: Sequence[Privacy]) -> Profiles:
    return lambda sigmas: [p(sigma) for p, sigma in zip(candidates, sigmas, strict=True)]
