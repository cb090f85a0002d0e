"""What a run says in a terminal: lines that pass, a progress line, and tables.

Rich is imported where something is shown: most questions are answered before it would be.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0
"""Seconds after which whoever waits in front of a terminal is told for how long already."""

EVERY = 5.0
"""Seconds after which a plain line says what is going on where there is no terminal; the next ones
come after twice as many each, and a minute at most."""


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, in the singular for 1.

    >>> counted(1, "run"), counted(2000, "row")
    ('1 run', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def sized(size: float) -> str:
    """Returns a number of bytes with its unit.

    >>> sized(0), sized(80e6), sized(1.5e12)
    ('0 B', '80 MB', '1,500 GB')
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB" if size < 1000 else f"{size:,.0f} GB"


class Console:
    """A terminal with one live progress line; where output is a file, plain lines.

    Args:
      stderr: Whether all goes to stderr.
      quiet: Whether nothing is shown.
      timed: Whether elapsed seconds are shown. Where the time is a secret, as that of a private
        selection, it is False: there are then no plain lines either, whose number tells the time.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False, timed: bool = True) -> None:
        import rich.console

        self._console = rich.console.Console(
            highlight=False,
            markup=False,
            stderr=stderr,
            quiet=quiet,
            # Jupyter asks for colours by FORCE_COLOR, which rich takes for a terminal.
            force_terminal=(sys.stderr if stderr else sys.stdout).isatty(),
        )
        self._now = _Now(timed=timed)
        self._status: Any = self._console.status(self._now)
        if not self._console.is_terminal:
            self._status = _PlainLines(self._now, quiet or not timed)

    def __enter__(self) -> Console:
        self._status.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.__exit__(None, None, None)

    def progress(self, line: str) -> None:
        """Shows `line` as what is going on now."""
        self._now.begin(line)

    def tell(self, line: str) -> None:
        """Shows `line` as what is going on now; what was chosen, or is to be noted, stays."""
        if line.startswith(("chosen: ", "note: ")):
            self.line(line)
        else:
            self.progress(line)

    def line(self, text: str) -> None:
        """Prints `text` to stay."""
        self._console.print(text, soft_wrap=True)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Prints a table without cutting a cell; in a pipe each row is one line.

        A narrow terminal breaks the first column at its blanks, or shows each row as a block with
        one line a cell.
        """
        from rich.cells import cell_len

        table = [header, *rows]
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        limited = self._console.is_terminal or "COLUMNS" in os.environ
        surplus = sum(widths) + len(widths) - 1 - self._console.width if limited else 0
        if surplus > 0:
            widths[0] -= surplus
            if widths[0] < max(cell_len(word) for row in table for word in row[0].split()):
                self._blocks(header, rows)
                return
        for number, (first, *rest) in enumerate(table):
            broken = _wrapped(first, widths[0])
            for cells in ([broken[0], *rest], *([part] for part in broken[1:])):
                padded = (
                    cell + " " * (width - cell_len(cell))
                    for cell, width in zip(cells, widths, strict=False)
                )
                self._console.print(
                    " ".join(padded).rstrip(), style="" if number else "bold", soft_wrap=True
                )

    def _blocks(self, header: list[str], rows: list[list[str]]) -> None:
        from rich.cells import cell_len

        names = max(map(cell_len, header)) + 1
        for row in rows:
            for name, cell in zip(header, row, strict=True):
                for number, part in enumerate(_wrapped(cell, max(1, self._console.width - names))):
                    label = "" if number else name
                    self.line(f"{label}{' ' * (names - cell_len(label))}{part}")
            self.line("")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


class _Now:
    """What is going on; if timed, with the seconds so far once they are more than `PATIENCE`."""

    def __init__(self, line: str = "", *, timed: bool = True) -> None:
        self._patience = PATIENCE if timed else math.inf
        self.begin(line)

    def begin(self, line: str) -> None:
        if line != getattr(self, "line", None):
            self.line, self.since = line, time.monotonic()

    def __rich__(self) -> str:
        seconds = time.monotonic() - self.since
        return self.line if seconds < self._patience else f"{self.line} ({seconds:.0f} s)".lstrip()


class _PlainLines:
    """Says what is going on in lines on stderr: an answer in a pipe stays the answer alone."""

    def __init__(self, now: _Now, quiet: bool = False) -> None:
        self._now, self._quiet, self._over = now, quiet, threading.Event()

    def __enter__(self) -> None:
        if not self._quiet:
            threading.Thread(target=self._say, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _say(self) -> None:
        began, wait = time.monotonic(), EVERY
        while not self._over.wait(wait):
            spent = time.monotonic() - began
            print(f"{self._now.line} ({spent:.0f} s in all)", file=sys.stderr, flush=True)
            wait = min(2 * wait, 60.0)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Shows `what`, with its seconds, on a terminal if what is done inside takes long.

    It goes to stderr, in plain lines if that is a file: what is printed stays the answer alone.
    """
    if not sys.stderr.isatty():
        with _PlainLines(_Now(what)):
            yield
        return
    over = threading.Event()

    def show() -> None:
        if not over.wait(PATIENCE):
            with Console(stderr=True) as console:
                console.progress(what)
                over.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
