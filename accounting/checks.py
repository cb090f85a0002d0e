"""Range checks of settings and of points on a privacy curve, and the default delta."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Context, Decimal
from typing import Annotated, Any

from accounting.records import Count, Ge, Gt, Le, Must, read

_SMALLEST_DELTA = 1e-300
"""Beyond it, logarithms leave the range of floats."""
LARGEST_DELTA = 0.1
"""No guarantee is given from this delta on: it permits a total failure once in ten runs."""


def check_guarantee_delta(delta: float, name: str = "delta") -> float:
    """Returns `delta`; raises ValueError unless it is in [1e-300, 0.1).

    A profile's curve is no guarantee at a large delta: at 0.9 most mechanisms have epsilon 0.

    Args:
      delta: Value to check.
      name: Name of the value in the error.
    """
    if not 0.0 < delta < LARGEST_DELTA:
        raise ValueError(
            f"{name} must lie in (0, {LARGEST_DELTA:g}), got {delta}: take 1e-5 or less, and less "
            "than 1 / (number of protected units)"
        )
    return check_delta(delta, name)


def check_delta(delta: float, name: str = "delta") -> float:
    """Returns `delta`; raises ValueError unless it is in [1e-300, 1)."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"{name} must be in (0, 1), got {delta}")
    if delta < _SMALLEST_DELTA:
        raise ValueError(f"{name} must be at least {_SMALLEST_DELTA:g}, got {delta}")
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """Returns `epsilon`; raises ValueError unless >= 0 and finite."""
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be >= 0 and finite, got {epsilon}")
    return float(epsilon)


def _is_release(value: Any) -> bool:
    return isinstance(value, int | float) and (value == math.inf or 1e-100 <= value <= 1e10)


Noise = Annotated[float, Ge(1e-100), Le(1e10)]
"""Noise multiplier of a guarantee: beyond it, squares and logarithms leave the range of floats."""
Release = Annotated[Any, Must("a noise multiplier in [1e-100, 1e+10], or infinite", _is_release)]
"""Noise multiplier of a further Gaussian release of every example; infinite for none."""
Probability = Annotated[float, Gt(0), Le(1)]
GridProbability = Annotated[float, Ge(1e-12), Le(1)]
"""Probability of a draw on grids alone: a rarer one, which costs no more, is lost in rounding."""


def check_noise_multiplier(noise_multiplier: float, name: str = "noise_multiplier") -> None:
    """Raises ValueError unless noise is in [1e-100, 1e10]."""
    read(Noise, noise_multiplier, (name,))


def check_count(name: str, value: Any) -> int:
    """Returns a count >= 1 as a Python integer, or raises a ValueError.

    >>> check_count("steps", 10)
    10

    Args:
      name: Name of the argument, for the message.
      value: Integer of any type; no bool, and no float.
    """
    return int(read(Count, value, (name,)))


def check_probability(name: str, value: float) -> None:
    """Raises ValueError unless `value` is in (0, 1]."""
    read(Probability, value, (name,))


def default_delta(num_units: int) -> float:
    """Returns min(1e-5, n^-1.1) for n protected units, rounded down.

    One significant digit is kept.

    A mechanism that publishes one of n units at random has delta = 1 / n at epsilon 0: a delta must
    be well below that.

    >>> default_delta(100), default_delta(88_000), default_delta(37_000_000)
    (1e-05, 3e-06, 4e-09)

    Args:
      num_units: n, the number of protected units: users where users are protected.
    """
    check_count("num_units", num_units)
    largest = Decimal(min(1e-5, float(num_units) ** -1.1))
    return float(Context(prec=1, rounding=ROUND_DOWN).plus(largest))
