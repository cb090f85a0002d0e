"""A case is one setting, what is measured in it, and beside each figure its bar."""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Estimate(float):
    """A number that knows its standard error: None of a single value."""

    error: float | None

    def __new__(cls, value: float, error: float | None = None) -> Estimate:
        """Returns `value`, with its standard error."""
        estimate = super().__new__(cls, value)
        estimate.error = error
        return estimate

    @classmethod
    def mean(cls, values: Sequence[float]) -> Estimate:
        """Returns the mean of independent values."""
        if len(values) < 2:
            return cls(statistics.fmean(values))
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    @classmethod
    def median(cls, values: Sequence[float]) -> Estimate:
        """Returns the median of independent values; its error is sqrt(pi/2) times the mean's."""
        error = cls.mean(values).error
        return cls(statistics.median(values), error and math.sqrt(math.pi / 2) * error)


class LeftOut(Exception):
    """Why a case cannot be measured here, which no failure is."""


@dataclass(frozen=True)
class Row:
    """One figure: a value of None could not be measured, and a bar (">= 8") is none if empty."""

    name: str
    value: float | None
    unit: str = ""
    bar: str = ""
    holds: bool | None = None
    error: float | None = None


def figure(
    name: str,
    value: float | None,
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Returns a figure beside its bar, if it has one.

    A value that is not finite is no figure: it is named, and no bar holds for it.
    """
    error = getattr(value, "error", None)
    bar, holds = "", None
    if at_least is not None:
        bar, holds = f">= {at_least:g}", value is not None and value >= at_least
    elif at_most is not None:
        bar, holds = f"<= {at_most:g}", value is not None and value <= at_most
    if value is None:
        return Row(name, None, unit, bar)
    if not math.isfinite(value):
        return Row(f"{name} (was {float(value)})", None, unit, bar, False)
    return Row(name, float(value), unit, bar, None if holds is None else bool(holds), error)


def at(place: str) -> Callable[..., Row]:
    """Returns `figure` of what is measured at one place, which ends the names."""
    return lambda name, *value, **bar: figure(f"{name}, {place}", *value, **bar)


@dataclass(frozen=True)
class Case:
    """One thing to measure, by itself.

    Attributes:
      name: Of the case, in its area.
      measure: Called with setting and options by name; yields its figures as they come.
      setting: What makes it this case.
      options: What a command may change, `--rounds 7`; None where a command alone can say it.
      quick: Settings and options of `--quick` that differ; None: it is left out there.
      seconds: About how long it takes.
      needs: Each a package to import, an option to give ("--store") or free memory ("12 GB"), or
        several of these with " or " between them.
      exact: Whether its bars are those of right and wrong, which hold in small as well; others are
        left out of `--quick`.
      asked: Whether it is measured only if it is asked for by name.
    """

    name: str
    measure: Callable[..., Iterable[Row]]
    setting: Mapping[str, Any]
    options: Mapping[str, Any]
    quick: Mapping[str, Any] | None = None
    seconds: float = 60.0
    needs: tuple[str, ...] = ()
    exact: bool = False
    asked: bool = False


def cases(
    measure: Callable[..., Iterable[Row]],
    name: str | None = None,
    *,
    over: Mapping[str, Iterable[Any]] = {},
    quick: Mapping[str, Any] | None = None,
    all_quick: bool = False,
    **rest: Any,
) -> list[Case]:
    """Returns the cases of a function: the defaults of its parameters are the setting.

    Args:
      measure: Yields figures. What it takes by keyword alone are options.
      name: Of the cases; by default the function's.
      over: Values of the other parameters, of which each combination is a case; of several
        parameters together as "a, b".
      quick: See `Case`; of the first case alone,
      all_quick: or, if this is true, of all.
      **rest: See `Case`.
    """
    parameters = inspect.signature(measure).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty}
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    found = []
    for number, values in enumerate(itertools.product(*over.values())):
        setting = {k: value for k, value in given.items() if k not in options}
        for keys, value in zip(over, values, strict=True):
            together = keys.split(", ")
            setting |= dict(zip(together, value if "," in keys else [value], strict=True))
        mine = [f"{k} {setting[k]}" for keys in over for k in keys.split(", ")]
        title = ", ".join([name or measure.__name__, *mine]).replace("_", " ")
        in_small = quick if all_quick or number == 0 else None
        found.append(Case(title, measure, setting, options, in_small, **rest))
    return found
