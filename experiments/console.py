"""What a run says in a terminal: lines that pass, a progress line, and tables."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.table

from experiments import report


class Console:
    """A terminal with one live progress line; where output is a file, plain lines."""

    def __init__(self) -> None:
        self._console = rich.console.Console(highlight=False, markup=False)
        self._status = self._console.status("")

    def __enter__(self) -> Console:
        self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def progress(self, line: str) -> None:
        """Shows `line` as what is going on now."""
        self._status.update(line)

    def line(self, text: str) -> None:
        """Prints `text` to stay."""
        self._console.print(text, soft_wrap=True)

    def comparison(self, records: list[dict[str, Any]]) -> None:
        """Prints the table that compares finished runs."""
        self.table(*report.comparison(records))

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Prints a table that stays within 80 columns where its cells do."""
        table = rich.table.Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name in header:
            table.add_column(name, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
