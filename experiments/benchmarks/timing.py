"""CPU seconds: of work that takes turns and of processes of their own."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.case import Estimate


class Spent(NamedTuple):
    """What a piece of work took, by the clock and of the processor."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def on(cls, work: Callable[[], Any]) -> Spent:
        """Returns what `work` takes."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - begin, time.process_time() - cpu_begin)


class Series(dict[str, list[float]]):
    """Seconds of each piece of work, one entry a round."""

    def median(self, name: str, scale: float = 1.0) -> Estimate:
        """Returns `scale` times the median over the rounds."""
        return Estimate.median([scale * spent for spent in self[name]])

    def ratio(self, name: str, other: str) -> Estimate:
        """Returns the median over the rounds of the ratio within one round."""
        return Estimate.median([a / b for a, b in zip(self[name], self[other], strict=True)])


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Yields names for `rounds` rounds after one that does not count, and whether it does.

    Every other round goes backwards, so that a busy machine slows all alike.
    """
    for number in range(rounds + 1):
        for name in list(names)[:: 1 if number % 2 else -1]:
            yield name, number > 0


def in_turns(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> Series:
    """Returns what each of `work` takes in `rounds` rounds, after one that is not counted.

    By default in CPU seconds; where another device works, `time.perf_counter` tells the time.
    Nothing that a piece of work returns outlives it: a result still held would make the next one
    take fresh pages of memory, which is slower than the work.
    """
    series = Series({name: [] for name in work})
    for name, counts in turns(work, rounds):
        begin = clock()
        result = work[name]()
        spent = clock() - begin
        del result
        if counts:
            series[name].append(spent)
    return series


class Alone(NamedTuple):
    """What a function in a process of its own gave, or why nothing, and what the process took."""

    value: Any
    failure: str
    cpu_seconds: float
    gigabytes: float


def alone(
    function: Callable[..., Any],
    *arguments: Any,
    start: str = "spawn",
    most_seconds: int | None = None,
) -> Alone:
    """Returns what `function` gives in a process of its own, begun anew or from what is preloaded.

    After `most_seconds` of CPU time it is ended, and a failure is then an answer as well; without,
    it is a RuntimeError.
    """
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, most_seconds, function, arguments))
    process.start()
    sender.close()
    try:
        answer = Alone(*receiver.recv())
    except EOFError:
        answer = Alone(None, f"no answer in {most_seconds} s", math.inf, math.nan)
    process.join()
    if answer.failure and most_seconds is None:
        raise RuntimeError(answer.failure)
    return answer


def _answer(sender: Any, most_seconds: int | None, function: Any, arguments: Any) -> None:
    if most_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds))
    value, failure = None, ""
    try:
        value = function(*arguments)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    sender.send((value, failure, time.process_time(), _peak() / 1e9))


def _peak() -> float:
    """Returns the largest memory of this process in bytes: on Linux, of this program alone.

    The usage of a process there counts what its parent had when it began it.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
