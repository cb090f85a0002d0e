"""Seconds of work that takes turns, and of functions in separate processes."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.processes import pool


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
