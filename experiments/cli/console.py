"""Terminal output: permanent lines, one progress line, and tables."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds after which the progress line shows the elapsed time."""

EVERY = 5.0
"""Seconds to the first progress line without a terminal; each interval doubles, up to a minute."""

REFRESH = 0.1
"""Seconds between updates of the progress line."""


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun.

    Args:
      count: Number of things.
      noun: Noun in the singular.

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
    """Terminal with one live progress line.

    Without a terminal, progress is printed as plain lines on stderr.

    Args:
      stderr: Whether all output goes to stderr.
      quiet: Whether nothing is shown.
      timed: Whether elapsed seconds are shown. Pass False where the duration is secret, as for a
        private selection: no plain progress lines are printed then, whose number would tell it.
      patience: Seconds until the progress line is shown.

    >>> Console().table(["sigma", "epsilon"], [["0.5", "[8.1, 8.2]"]])
    sigma epsilon
    0.5   [8.1, 8.2]
    """

    def __init__(
        self,
        *,
        stderr: bool = False,
        quiet: bool = False,
        timed: bool = True,
        patience: float = 0.0,
    ) -> None:
        self._file = sys.stderr if stderr else sys.stdout
        self._terminal = self._file.isatty()
        self._quiet, self._timed, self._patience = quiet, timed, patience
        self._shown, self._since = "", time.monotonic()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Console:
        if not self._quiet and (self._terminal or self._timed):
            say = self._refresh if self._terminal else self._say
            self._thread = threading.Thread(target=say, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        if self._terminal and self._thread is not None:
            self._thread.join()

    def progress(self, line: str) -> None:
        """Shows `line` as the current work."""
        if line != self._shown:
            self._shown, self._since = line, time.monotonic()

    def tell(self, line: str) -> None:
        """Shows `line` as progress, or prints a choice or note."""
        if line.startswith(("chosen: ", "note: ")):
            self.line(line)
        else:
            self.progress(line)

    def line(self, text: str, *, bold: bool = False) -> None:
        """Prints a permanent line.

        Args:
          text: Line to print.
          bold: Whether a terminal shows it in bold.
        """
        if self._quiet:
            return
        with self._lock:
            clear = "\r\x1b[2K" if self._terminal and self._thread else ""
            text = f"\x1b[1m{text}\x1b[0m" if bold and self._terminal else text
            print(f"{clear}{text}", file=self._file, flush=self._terminal)

    def _refresh(self) -> None:
        if self._over.wait(self._patience):
            return
        while not self._over.wait(REFRESH):
            seconds = time.monotonic() - self._since
            late = f" ({seconds:.0f} s)" if self._timed and seconds >= PATIENCE else ""
            room = shutil.get_terminal_size().columns - 1
            with self._lock:
                self._file.write(f"\r\x1b[2K{f'{self._shown}{late}'.lstrip()[:room]}")
                self._file.flush()
        self._file.write("\r\x1b[2K")
        self._file.flush()

    def _say(self) -> None:
        began, wait = time.monotonic(), EVERY
        while not self._over.wait(wait):
            spent = time.monotonic() - began
            print(f"{self._shown} ({spent:.0f} s in all)", file=sys.stderr, flush=True)
            wait = min(2 * wait, 60.0)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Prints a table with complete cells.

        In a pipe each row is one line. A narrow terminal wraps the first column, or shows each row
        as a block with one line per cell.

        Args:
          header: Names of the columns.
          rows: Cells of each row.
        """
        table = [header, *rows]
        widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
        limited = self._terminal or "COLUMNS" in os.environ
        room = shutil.get_terminal_size().columns
        surplus = sum(widths) + len(widths) - 1 - room if limited else 0
        if surplus > 0:
            widths[0] -= surplus
            if widths[0] < max(_width(word) for row in table for word in row[0].split()):
                self._blocks(header, rows, room)
                return
        for number, (first, *further_cells) in enumerate(table):
            broken = _wrapped(first, widths[0])
            for cells in ([broken[0], *further_cells], *([line] for line in broken[1:])):
                padded = (
                    f"{c}{' ' * (w - _width(c))}" for c, w in zip(cells, widths, strict=False)
                )
                self.line(" ".join(padded).rstrip(), bold=not number)

    def _blocks(self, header: list[str], rows: list[list[str]], room: int) -> None:
        names = max(map(_width, header)) + 1
        for row in rows:
            for name, cell in zip(header, row, strict=True):
                for number, line in enumerate(_wrapped(cell, room - names)):
                    label = "" if number else name
                    self.line(f"{label}{' ' * (names - _width(label))}{line}")
            self.line("")


def _width(text: str) -> int:
    """Returns the number of columns that a text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Shows the current work on stderr if it takes long."""
    console = Console(stderr=True, patience=PATIENCE)
    console.progress(what)
    with console:
        yield
