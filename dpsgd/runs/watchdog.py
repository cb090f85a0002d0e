"""A watchdog: a parent that watches a process of several, and ends it where it dies, or hangs.

Nothing inside a process that trains with others can be relied on for that. JAX's runtime aborts it
from a thread of its own, with a trace on stderr, when another process has died; a collective that
waits for a process that stands still never returns; and a process that was stopped does nothing at
all. So the process forks before it has begun: the child trains, and the parent, which waits, says
in one line how it came to its end. If the parent dies, the child ends as well.
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
from collections.abc import Callable
from typing import IO

from dpsgd.runs import stop

STOPPED_SECONDS = 20.0
"""For which a process may be stopped (SIGSTOP) before it is ended: the others end about then."""

_MET, _STEP, _REST = b"m", b"s", b"r"
_reports: int | None = None


def met() -> None:
    """Tells the watchdog that the processes have found each other."""
    _report(_MET)


def step() -> None:
    """Tells the watchdog, if there is one, that steps were taken and the next are under way."""
    _report(_STEP)


def rest() -> None:
    """Tells it that no step is under way, however long what comes now may take."""
    _report(_REST)


def _report(kind: bytes) -> None:
    if _reports is not None:
        with contextlib.suppress(OSError):  # the parent is gone, and this process will be
            os.write(_reports, kind)


def watched(seconds: float, line: Callable[[bool, str], str]) -> None:
    """Forks; returns in the child alone. The parent ends with the child, and as the child does.

    What the child's libraries write to its standard streams by themselves (a dying runtime's stack
    trace) is shown only if DPSGD_TRACEBACK is set in the environment; what Python writes, always.

    Args:
      seconds: The most that may pass between two reports of steps.
      line: Returns what is said of a child that did not end by itself: of whether it had found the
        others, and why it was ended, or empty if that is not known.
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
        os.setpgid(0, 0)  # Ctrl-C comes by way of the parent, once
    if not os.environ.get("DPSGD_TRACEBACK"):
        sys.stdout, sys.stderr = _apart(1, written), _apart(2, written)
    threading.Thread(target=_obey, args=(requests,), name="watchdog", daemon=True).start()


def _apart(number: int, written: int) -> IO[str]:
    """Returns Python's stream to where a descriptor led, to which others write no more."""
    stream = os.fdopen(os.dup(number), "w", buffering=1)
    os.dup2(written, number)
    return stream


def _obey(requests: int) -> None:
    """Does what the parent is asked by signals, and ends when the parent has ended."""
    while number := os.read(requests, 1):
        stop.request(number[0])
    os._exit(1)


def _forward_signals(child: int, alive: int) -> None:
    """Has the child asked what this process is asked; the second time it is ended.

    Whoever ends a group of processes may send each of them the signal twice, at once.
    """
    requested: float | None = None

    def forward(number: int, frame: object) -> None:
        nonlocal requested
        now = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended
            if requested is None:
                requested = now
                os.write(alive, bytes([number]))
            elif now - requested > 1.0:
                os.kill(child, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _watch(child: int, reports: int, seconds: float) -> tuple[bool, str, int]:
    """Returns how the child ended: whether it had met the others, why it was ended, its status."""
    met = False
    begun = stopped = None
    while True:
        ready, _, _ = select.select([reports], [], [], 1.0)
        now = time.monotonic()
        for kind in os.read(reports, 1 << 16) if ready else b"":
            met = True
            begun = now if kind == ord(_STEP) else None
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if ended and os.WIFSTOPPED(status):
            stopped = now
        elif ended and os.WIFCONTINUED(status):
            stopped, begun = None, begun and now
        elif ended:
            return met, "", status
        why = ""
        if stopped is not None and now - stopped > STOPPED_SECONDS:
            why = f"it was stopped, and did not go on for {STOPPED_SECONDS:.0f} s"
        elif stopped is None and begun is not None and now - begun > seconds:
            why = f"no step for {seconds:g} s"
        if why:
            os.kill(child, signal.SIGKILL)
            return met, why, os.waitpid(child, 0)[1]
