"""The contract of every benchmark: rows {name, value, unit, bar, holds}, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes:
      name: What was measured.
      value: The figure, or None where it could not be measured.
      unit: Its unit: "s" of CPU time, "x" for a ratio, "epsilon", ...
      bar: The bar, as ">= 8" or "<= 1.5"; empty for information only.
      holds: Whether the bar holds; None without a bar or a value.
    """

    name: str
    value: float | None
    unit: str
    bar: str = ""
    holds: bool | None = None

    @classmethod
    def at_least(cls, name: str, value: float | None, unit: str, bar: float) -> Row:
        """Returns a row that holds if the value is `bar` or more."""
        return cls(name, value, unit, f">= {bar:g}", None if value is None else value >= bar)

    @classmethod
    def at_most(cls, name: str, value: float | None, unit: str, bar: float) -> Row:
        """Returns a row that holds if the value is `bar` or less."""
        return cls(name, value, unit, f"<= {bar:g}", None if value is None else value <= bar)


def options_of(name: str, description: str, quick: str = "") -> argparse.ArgumentParser:
    """Returns the options that benchmarks share.

    Args:
      name: Of the benchmark.
      description: Whose first line says what it measures.
      quick: What `--quick` measures; empty for a benchmark without it.
    """
    found = argparse.ArgumentParser(f"bench {name}", description=description.split("\n")[0])
    found.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    if quick:
        found.add_argument("--quick", action="store_true", help=quick)
    return found


def positive(text: str) -> int:
    """Returns the number that an option's text is, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def merged(rows: list[Row], json_file: Path | None) -> list[Row]:
    """Returns the rows behind those of a file that have other names, if there is a file.

    So parts of a benchmark are measured one by one, into one file.

    Raises:
      SystemExit: If the file holds anything else.
    """
    if json_file is None or not json_file.exists():
        return rows
    measured = {row.name for row in rows}
    try:
        before = [Row(**row) for row in json.loads(json_file.read_text())]
    except (OSError, ValueError, TypeError):
        sys.exit(f"{json_file} holds no rows of a benchmark: name another file, or none")
    return [*(row for row in before if row.name not in measured), *rows]


def report(rows: list[Row], json_file: Path | None) -> int:
    """Prints the table, writes the rows, and returns the exit status: 1 if a bar does not hold."""
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'value':>12} {'unit':8} {'bar':10} holds")
    for row in rows:
        value = "not measured" if row.value is None else f"{row.value:.4g}"
        if row.value is not None and abs(row.value) >= 1e4:
            value = f"{row.value:,.0f}"
        holds = {None: "", True: "yes", False: "NO"}[row.holds]
        print(f"{row.name:{width}}  {value:>12} {row.unit:8} {row.bar:10} {holds}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(any(row.holds is False for row in rows))
