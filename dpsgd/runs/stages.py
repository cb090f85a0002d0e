"""How long the stages of a run take, of which training is one."""

from __future__ import annotations

import time
from collections.abc import Callable

WORDS = {
    "read": "starting and reading the data",
    "timing": "timing steps",
    "accounting": "accounting",
    "compile": "compiling",
    "audit": "audit",
    "train": "training",
    "calibrate": "calibration",
    "evaluate": "evaluation",
}
"""The stages in their order, and what reports call them."""


class Stages:
    """Seconds of each stage; one lasts until the next begins, so that their sum is all the time.

    >>> times = iter([1.0, 4.0, 5.0, 7.0])
    >>> stages = Stages(0.0, lambda: next(times))
    >>> for stage in ("accounting", "train", "accounting"):
    ...     stages.begin(stage)
    >>> stages.seconds()
    {'read': 1.0, 'accounting': 5.0, 'train': 1.0}
    """

    def __init__(
        self, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.started = clock() if started is None else started
        self._stage, self._since = "read", self.started
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Ends the present stage, and begins one of `WORDS`, which may have been there before."""
        now = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each stage so far, in the order of `WORDS`."""
        self.begin(self._stage)
        return {stage: self._seconds[stage] for stage in WORDS if stage in self._seconds}
