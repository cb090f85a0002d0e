"""Cases of benchmarks, and figures beside their bars."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

SPEED = "s", "ms", "CPU s", "CPU min", "x", "ex/s", "rows/s", "M/s"
"""Units of speed, whose bars are left out with `--quick`."""


class LeftOut(Exception):
    """Reason why a case cannot be measured on this machine."""


class Figure(NamedTuple):
    """One measured number.

    Attributes:
      name: Quantity and setting.
      value: The number; None if it could not be measured.
      unit: Unit of the value.
      bar: Bound such as "<= 2.5"; empty without one.
      holds: Whether the value meets its bar; None without a bar or a value.
      error: Standard error of the value; None for a single measurement.
    """

    name: str
    value: float | None
    unit: str = ""
    bar: str = ""
    holds: bool | None = None
    error: float | None = None

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        if self.value is not None and abs(self.value) >= 1e4:
            value = f"{self.value:,.0f}"
        error = "" if self.error is None else f" ± {self.error:.2g}"
        holds = {None: "", True: ", holds", False: ", MISSED"}[self.holds]
        return f"{self.name:72}  {value}{error} {self.unit}{self.bar and f'  ({self.bar}{holds})'}"


def figure(name: str, value: Any, unit: str = "", bar: str = "") -> Figure:
    """Returns a figure beside its bar.

    A value that is not finite misses every bar.

    Args:
      name: Quantity and setting.
      value: A number, None, or repeated measurements, float[rounds], whose median is taken.
      unit: Unit of the value.
      bar: "<= NUMBER" or ">= NUMBER", or nothing.

    >>> figure("DP step / ordinary step", [1.4, 1.2, 1.5], "x", bar="<= 1.3").holds
    False
    """
    if value is None:
        return Figure(name, None, unit, bar)
    rounds = np.ravel(np.asarray(value, np.float64))
    median, error = float(np.median(rounds)), None
    if not math.isfinite(median):
        return Figure(f"{name} (was {median})", None, unit, bar, False)
    if rounds.size > 1:  # sqrt(pi / 2) times the error of a mean
        error = math.sqrt(math.pi / 2 / rounds.size) * float(rounds.std(ddof=1))
    holds = None
    if bar:
        sign, limit = bar.split()
        holds = median <= float(limit) if sign == "<=" else median >= float(limit)
    return Figure(name, median, unit, bar, holds, error)


def figure_at(place: str) -> Callable[..., Figure]:
    """Returns `figure` with `place` at the end of every name.

    >>> figure_at("batch 8")("DP step", 2.0, "s").name
    'DP step, batch 8'
    """
    return lambda name, *value, **bar: figure(f"{name}, {place}", *value, **bar)


class Case(NamedTuple):
    """Measurement with its setting.

    Attributes:
      area: Area of the command, `scripts/bench AREA`.
      name: Name in the area.
      measure: Generator function of figures, as "module.function" of this package.
      setting: Arguments of the function, JSON values.
      quick: Arguments that differ with `--quick`; None leaves the case out there.
      seconds: Estimated duration.
      opt_in: Whether the case is measured only if `-k` names it.
    """

    area: str
    name: str
    measure: str
    setting: Mapping[str, Any] = {}
    quick: Mapping[str, Any] | None = None
    seconds: float = 60.0
    opt_in: bool = False

    def function(self) -> Callable[..., Any]:
        """Imports and returns the function that measures the case."""
        module, name = self.measure.split(".")
        return getattr(importlib.import_module(f"experiments.benchmarks.{module}"), name)


def require(*packages: str) -> None:
    """Raises LeftOut unless one of `packages` is installed."""
    for package in packages:
        parent, _, _ = package.partition(".")
        if all(importlib.util.find_spec(name) is not None for name in (parent, package)):
            return
    raise LeftOut(f"needs {' or '.join(packages)}")
