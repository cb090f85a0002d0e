"""Cases of benchmarks, figures beside their bars, and seconds of work."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.processes import pool

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


class Spent(NamedTuple):
    """Duration of a piece of work by the clock, and its CPU time."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def measure(cls, work: Callable[[], Any]) -> Spent:
        """Returns the time that `work` takes."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - begin, time.process_time() - cpu_begin)


def turns(names: list[str], rounds: int) -> list[str]:
    """Returns names in the order of their turns.

    The first of `rounds` + 1 rounds is a warm-up. Every other round goes backwards, so that a busy
    machine slows all names equally.

    >>> turns(["a", "b"], rounds=1)
    ['b', 'a', 'a', 'b']
    """
    return [name for number in range(rounds + 1) for name in names[:: 1 if number % 2 else -1]]


def in_turns(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, np.ndarray]:
    """Measures pieces of work that take turns, after a warm-up.

    No result outlives its turn: with a result still in memory, the next piece of work would take
    fresh pages, which is slower than the work.

    Args:
      work: Pieces of work by name.
      rounds: Number of rounds that count.
      clock: CPU time, or `time.perf_counter` for work on another device.

    Returns:
      Seconds by name: float[rounds].
    """
    spent: dict[str, list[float]] = {name: [] for name in work}
    for name in turns([*work], rounds):
        begin = clock()
        result = work[name]()
        spent[name].append(clock() - begin)
        del result
    return {name: np.array(seconds[1:]) for name, seconds in spent.items()}


class Alone(NamedTuple):
    """Result of a function in a separate process, with the process's CPU time and memory."""

    value: Any
    cpu_seconds: float
    gigabytes: float


def alone(function: Callable[..., Any], *arguments: Any) -> Alone:
    """Calls a module's function in a new process; raises its errors."""
    with pool(1) as executor:
        return executor.submit(_answer, function, arguments).result()


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Alone:
    value = function(*arguments)
    return Alone(value, time.process_time(), peak_bytes() / 1e9)


def peak_bytes() -> float:
    """Returns the peak memory of this process, on Linux without its parent's."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
