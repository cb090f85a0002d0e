"""Refusals of settings and of points of a curve that are out of range: one message a mistake."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

# Beyond these, squares and logarithms leave the range of floats.
_SMALLEST_DELTA = 1e-300
_SMALLEST_NOISE, _LARGEST_NOISE = 1e-100, 1e10
LARGEST_DELTA = 0.1
"""No guarantee is given from this delta on: it permits a total failure once in ten runs."""


def check_guarantee_delta(delta: float, name: str = "delta") -> float:
    """Returns the `delta` of a guarantee, called `name`; raises ValueError unless it is below 0.1.

    A profile's curve is no guarantee at a large delta: at 0.9 most mechanisms have epsilon 0.
    """
    if not 0.0 < delta < LARGEST_DELTA:
        raise ValueError(
            f"{name} must lie in (0, {LARGEST_DELTA:g}), got {delta}: take 1e-5 or less, and less "
            "than 1 / (number of protected units)"
        )
    return check_delta(delta, name)


def check_delta(delta: float, name: str = "delta") -> float:
    """Returns `delta` if a profile's curve is defined there, in (0, 1), else raises ValueError."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"{name} must be in (0, 1), got {delta}")
    if delta < _SMALLEST_DELTA:
        raise ValueError(f"{name} must be at least {_SMALLEST_DELTA:g}, got {delta}")
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """Returns `epsilon` if it is >= 0 and finite, else raises a ValueError."""
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be >= 0 and finite, got {epsilon}")
    return float(epsilon)


def check_noise_multiplier(noise_multiplier: float, name: str = "noise_multiplier") -> None:
    """Raises a ValueError, with its `name`, unless a noise multiplier is in [1e-100, 1e10]."""
    if not 0.0 < noise_multiplier < math.inf:
        raise ValueError(f"{name} must be > 0 and finite for a guarantee, got {noise_multiplier}")
    if not _SMALLEST_NOISE <= noise_multiplier <= _LARGEST_NOISE:
        raise ValueError(
            f"{name} must lie in [{_SMALLEST_NOISE:g}, {_LARGEST_NOISE:g}], got {noise_multiplier}"
        )


def check_count(name: str, value: Any, *, at_least: int = 1, at_most: int = 2**63 - 1) -> int:
    """Returns a count as a Python integer, or raises a ValueError.

    >>> check_count("steps", 10)
    10

    Args:
      name: Name of the argument, for the message.
      value: Integer of any type with `__index__`; no bool, and no float.
      at_least: Smallest allowed count.
      at_most: Largest allowed count.

    Raises:
      ValueError: If `value` is no integer or out of range.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if count < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {count}")
    if count > at_most:
        raise ValueError(f"{name} must be at most {at_most}, got {value!s:.40}")
    return count


def check_probability(name: str, value: float) -> None:
    """Raises a ValueError unless `value` is in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


def check_fields(
    settings: Any,
    *,
    counts: Sequence[str] = (),
    probabilities: Sequence[str] = (),
    mode: str | None = None,
) -> None:
    """Raises a ValueError unless named fields are in range.

    Counts become Python integers in place.

    Args:
      settings: A frozen dataclass.
      counts: Names of integers from 1 on.
      probabilities: Names of numbers in (0, 1].
      mode: Name of a field that is 'redrawn' or 'fixed'.
    """
    for name in counts:
        object.__setattr__(settings, name, check_count(name, getattr(settings, name)))
    for name in probabilities:
        check_probability(name, getattr(settings, name))
    if mode and getattr(settings, mode) not in ("redrawn", "fixed"):
        value = getattr(settings, mode)
        raise ValueError(f'{mode} must be "redrawn" or "fixed", got {value!r}')


def check_settings(settings: Any, **named: Any) -> None:
    """Raises a ValueError unless the noise of a profile and named fields are in range.

    Args:
      settings: Has a `noise_multiplier`, and maybe a `release`, the noise multiplier of a further
        Gaussian release of every example, infinite for none.
      named: As for `check_fields`.
    """
    check_noise_multiplier(settings.noise_multiplier)
    check_fields(settings, **named)
    if (release := getattr(settings, "release", math.inf)) != math.inf:
        check_noise_multiplier(release, "release")
