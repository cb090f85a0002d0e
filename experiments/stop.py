"""How a run is asked to stop: by SIGTERM or Ctrl-C, between two blocks of steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPED = 75
"""Exit status of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h."""


class Stopped(Exception):
    """A run stopped because it was asked to, and can go on; the text says where and how."""


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM or SIGINT has come since.

    A second signal has its usual effect, for whoever cannot wait. One that is ignored (a job in the
    background ignores Ctrl-C) stays so. Outside of the main thread, where no signals arrive, the
    answer is always no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(number, usual[signal.Signals(number)])

    for number, handler in usual.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield asked.is_set
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
