"""How a command is asked to stop: by Ctrl-C at once; a run also by SIGTERM, between two blocks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPED = 75
"""Exit status of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""


class Stopped(Exception):
    """A run stopped because it was asked to, and can be resumed; the text says where and how."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C has come since.

    It raises KeyboardInterrupt, as ever; but libraries make other errors of that, so who sees one
    asks here what it came from. Where it strikes in a callback, which loses it, it is raised once
    more; and extensions whose import it ends print nothing. A second Ctrl-C ends the process, for
    whoever cannot wait. One that is ignored (a job in the background ignores it) stays so, and so
    does another handler than Python's.
    """
    requested = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        requested.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or usual is not signal.default_int_handler:
        yield requested.is_set
        return
    hook, unraisable_hook = sys.excepthook, sys.unraisablehook

    def printed(*error: Any) -> None:
        if not requested.is_set():
            hook(*error)

    again: list[threading.Timer] = []

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if not (requested.is_set() and issubclass(lost.exc_type, KeyboardInterrupt)):
            unraisable_hook(lost)
            return
        signal.signal(signal.SIGINT, interrupt)
        # Not from here, where the next one would be lost as well.
        again.append(threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)))
        again[-1].daemon = True
        again[-1].start()

    signal.signal(signal.SIGINT, interrupt)
    sys.excepthook, sys.unraisablehook = printed, unraisable
    try:
        yield requested.is_set
    finally:
        for timer in again:
            timer.cancel()
        sys.excepthook, sys.unraisablehook = hook, unraisable_hook
        signal.signal(signal.SIGINT, usual)


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
    requested = threading.Event()
    _listening.append(requested)

    def ask(number: int, frame: object) -> None:
        requested.set()
        signal.signal(number, usual[signal.Signals(number)])

    for number, handler in usual.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield requested.is_set
    finally:
        _listening.remove(requested)
        for number, handler in usual.items():
            signal.signal(number, handler)


_listening: list[threading.Event] = []


def request(number: int) -> None:
    """Asks what this process does to stop: as the signal `number` would, which may come as well."""
    if _listening:
        _listening[-1].set()
    else:
        os.kill(os.getpid(), number)
