"""The scales that a program is given, and mechanisms of noise far below or above the sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dpsgd.audit.report import CheckResult
from dpsgd.core.mechanism import Mechanism

SCALES = "the program is given the scales of the configuration"

_UNIT = 2.0**-24  # roundoff of float32
_QUIET = *(2.0**k for k in range(-40, 0)), None  # noise multipliers; None is the run's
_LOUD = *(2.0**k for k in range(60, 0, -5)), None  # by which noise exceeds what it is to hide


def scales_check(mechanisms: Sequence[Mechanism]) -> CheckResult:
    """Compares the numbers that the program is given with those of the configuration."""
    wrong = []
    for mechanism in mechanisms:
        scales, sampler = mechanism.scales(), mechanism.sampler
        clip, b = mechanism.l2_clip_norm, sampler.expected_batch_size
        stddev = mechanism.noise_multiplier * clip
        # What is given, over what it must be: at least, and how much more it may be.
        ratios = {
            "C": (float(scales.l2_clip_norm) / clip, 1 - _UNIT, 4 * _UNIT),
            "sigma C": (float(scales.noise_stddev) / stddev, 1 - _UNIT, 4 * _UNIT),
            "b": (float(scales.expected_batch_size) / b, 1 - _UNIT, 4 * _UNIT),
        }
        wrong += [
            f"{name} is {ratio:.4g} times that of the configuration"
            for name, (ratio, least, room) in ratios.items()
            if not least <= ratio <= least + room
        ]
    detail = wrong[0] if wrong else "C, sigma C and b, as they are given to the program"
    return CheckResult(SCALES, not wrong, detail)


def quiet(mechanism: Mechanism, clip: float | None = None) -> Mechanism:
    """Returns the mechanism under another C, with as little noise as there is; or itself."""
    own, clip = mechanism.noise_multiplier, clip or mechanism.l2_clip_norm
    return _first_valid(
        mechanism, lambda sigma: {"l2_clip_norm": clip, "noise_multiplier": sigma or own}, _QUIET
    )


def loud(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism with its noise, and a C that is as far below as there is."""
    sigma, clip = mechanism.noise_multiplier, mechanism.l2_clip_norm

    def scaled(factor: float | None) -> dict[str, float]:
        factor = factor or 1.0
        return {"noise_multiplier": sigma * factor, "l2_clip_norm": clip / factor}

    return _first_valid(mechanism, scaled, _LOUD)


def noise_dominated(mechanism: Mechanism) -> Mechanism | None:
    """Returns the mechanism with its noise and sums that are lost in it, if there is one."""
    found = loud(mechanism)
    most = mechanism.sampler.padded_batch_size * mechanism.sampler.max_passes
    return found if most <= found.noise_multiplier * 2.0**-22 else None


def noise_stddev(mechanism: Mechanism) -> float:
    """Returns the standard deviation that noise must have, in the units of the sum."""
    return mechanism.noise_multiplier * mechanism.l2_clip_norm


def _first_valid(
    mechanism: Mechanism,
    changes: Callable[[float | None], dict[str, Any]],
    tries: Sequence[float | None],
) -> Mechanism:
    for number in tries:
        try:
            return dataclasses.replace(mechanism, **changes(number))
        except ValueError:  # beyond what floats can tell apart
            continue
    return mechanism
