"""CPU seconds of several pieces of work, taken in turns, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


class Series(dict[str, list[float]]):
    """Seconds of each piece of work, one entry a round."""

    def median(self, name: str) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Returns the median over the rounds of the ratio within one round."""
        return statistics.median(a / b for a, b in zip(self[name], self[other], strict=True))


def in_turns(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> Series:
    """Returns what each of `work` takes in `rounds` rounds, after one that is not counted.

    By default in CPU seconds; where another device works, `time.perf_counter` tells the time.

    Every other round goes backwards. Nothing that a piece of work returns outlives it: a result
    still held would make the next one take fresh pages of memory, which is slower than the work.
    """
    series = Series({name: [] for name in work})
    for number in range(rounds + 1):
        for name in list(work)[:: 1 if number % 2 else -1]:
            begin = clock()
            result = work[name]()
            spent = clock() - begin
            del result
            if number:
                series[name].append(spent)
    return series
