"""Stop requests of a command, and the watchdog of a process among several.

Ctrl-C stops a command at once; a run stops at Ctrl-C or SIGTERM between two blocks of steps. A
process that trains with others cannot supervise itself: JAX's runtime aborts it, with a stack
trace, when another one has died; a collective never returns if another process hangs; and a process
suspended by a signal does nothing. So it forks before it begins: the child trains, and the parent
reports in one line how the child ended. If the parent dies, the child ends as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

STOPPED = 75
"""Exit status of a run that stopped on request and can resume: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""


class Stopped(Exception):
    """A run stopped on request and can resume; the text says how."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True once Ctrl-C has come.

    Ctrl-C raises KeyboardInterrupt as usual. Libraries may turn it into other errors, whose
    handlers can ask this function for the cause. If a callback loses the KeyboardInterrupt, it is
    raised again. Extensions whose import it ends print nothing. A second Ctrl-C ends the process at
    once. An ignored Ctrl-C (as in a background job) stays ignored, and a handler other than
    Python's is left in place.
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
        # Sent by a timer: raised here, it would be lost again.
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
    """Yields a function that tells if a stop was asked for.

    A second signal has its usual effect. An ignored signal (such as Ctrl-C in a background job)
    stays ignored. Outside of the main thread, where no signals arrive, the function always returns
    False.

    >>> with stop_requests() as stop:
    ...     before, _ = stop(), os.kill(os.getpid(), signal.SIGTERM)
    ...     before, stop()
    (False, True)
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
    """Asks this process to stop, as the signal `number` would."""
    if _listening:
        _listening[-1].set()
    else:
        os.kill(os.getpid(), number)


# --- The watchdog --------------------------------------------------------------------------------

STOPPED_SECONDS = 20.0
"""Seconds after which a suspended process (SIGSTOP) is killed, about when the others end."""

MET, STEP, REST = b"m", b"s", b"r"
"""Reports of a process: it has met the others; steps are under way; or other work is under way,
without a time limit."""

_reports: int | None = None


def report(kind: bytes) -> None:
    """Sends `MET`, `STEP` or `REST` to the watchdog, if any."""
    if _reports is not None:
        with contextlib.suppress(OSError):  # the parent has ended, and this process soon ends
            os.write(_reports, kind)


def watched(seconds: float, line: Callable[[bool, str], str]) -> None:
    """Forks; returns in the child, which the parent watches.

    The parent ends when the child does, with its exit status, or 2 if a signal ended it. Output of
    the child's libraries to its standard streams, such as a runtime's stack trace, is shown only if
    DPSGD_TRACEBACK is set in the environment; Python's output is always shown.

    Args:
      seconds: Longest time between two reports of steps, in seconds.
      line: Function that returns the message for a child ended by a signal, from True if the child
        had met the others, and from the reason.
    """
    global _reports
    reports, _reports = os.pipe()
    requests, alive = os.pipe()
    written, unnamed = tempfile.mkstemp()
    os.unlink(unnamed)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(_reports)
        os.close(requests)
        _forward_signals(child, alive)
        met, why, status = _watch(child, reports, seconds)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            print(f"dpsgd: {line(met, why or signal.Signals(-code).name)}", file=sys.stderr)
            code = 2
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    os.close(reports)
    os.close(alive)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the parent alone gets Ctrl-C, and forwards it
    if not os.environ.get("DPSGD_TRACEBACK"):
        sys.stdout, sys.stderr = _apart(1, written), _apart(2, written)
    threading.Thread(target=_obey, args=(requests,), name="watchdog", daemon=True).start()


def _apart(number: int, written: int) -> IO[str]:
    """Returns a stream to a descriptor's file, and sends the descriptor to `written`."""
    stream = os.fdopen(os.dup(number), "w", buffering=1)
    os.dup2(written, number)
    return stream


def _obey(requests: int) -> None:
    """Handles the parent's requests, and ends the process after the parent."""
    while number := os.read(requests, 1):
        request(number[0])
    os._exit(1)


def _forward_signals(child: int, alive: int) -> None:
    """Forwards stop signals to the child, and kills it at a second one.

    A signal within a second of the first is ignored: process groups may receive it twice.
    """
    requested: float | None = None

    def forward(number: int, frame: object) -> None:
        nonlocal requested
        now = time.monotonic()
        with contextlib.suppress(OSError):  # the child has ended
            if requested is None:
                requested = now
                os.write(alive, bytes([number]))
            elif now - requested > 1.0:
                os.kill(child, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _watch(child: int, reports: int, seconds: float) -> tuple[bool, str, int]:
    """Returns whether the child had met the others, why it was killed, and its status."""
    met = False
    steps_since = stopped = None
    while True:
        ready, _, _ = select.select([reports], [], [], 1.0)
        now = time.monotonic()
        for kind in os.read(reports, 1 << 16) if ready else b"":
            met = True
            steps_since = now if kind == ord(STEP) else None
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if ended and os.WIFSTOPPED(status):
            stopped = now
        elif ended and os.WIFCONTINUED(status):
            stopped, steps_since = None, steps_since and now
        elif ended:
            return met, "", status
        if stopped is not None and now - stopped > STOPPED_SECONDS:
            why = f"it was suspended for more than {STOPPED_SECONDS:.0f} s"
        elif stopped is None and steps_since is not None and now - steps_since > seconds:
            why = f"no step for {seconds:g} s"
        else:
            continue
        os.kill(child, signal.SIGKILL)
        return met, why, os.waitpid(child, 0)[1]
