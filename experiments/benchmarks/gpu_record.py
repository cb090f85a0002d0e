"""A record of parts that may fail: written after every figure, so that nothing measured is lost."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from dpsgd.files import write_atomically
from dpsgd.runs.environment import environment
from experiments.benchmarks.rows import Row

_LONGEST = 300
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class Part:
    """One thing to measure, by itself.

    Attributes:
      name: Of the part, in the record.
      seconds: What it takes on an H200, its compilation included; less time left, and it is not
        begun.
      rows: Yields its figures as they come.
    """

    name: str
    seconds: float
    rows: Callable[[], Iterator[Row]]


class Record:
    """Carries out parts in their order, and keeps what they found in one JSON file."""

    def __init__(self, file: Path, minutes: float, **said: Any) -> None:
        self._file, self._begun = file, time.monotonic()
        self._budget, self._estimated, self._spent = 60 * minutes, 0.0, 0.0
        self.parts: list[dict[str, Any]] = []
        self.content = {
            "minutes": minutes,
            **said,
            "environment": environment(),
            "flags": {k: os.environ[k] for k in ("XLA_FLAGS", "JAX_PLATFORMS") if k in os.environ},
            "parts": self.parts,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def _write(self) -> None:
        text = json.dumps(self.content, indent=1, allow_nan=False) + "\n"
        write_atomically(self._file, lambda file: file.write(text.encode()))

    def run(self, part: Part) -> None:
        """Carries out one part; an error ends it alone, and is kept as one line.

        It is left out if it does not fit into the time that is left: its estimate counts as many
        times as the parts before it took longer than theirs.
        """
        left = self._budget - (time.monotonic() - self._begun)
        needed = part.seconds * max(1.0, self._spent / self._estimated if self._estimated else 1.0)
        entry: dict[str, Any] = {"name": part.name, "status": "begun", "rows": []}
        self.parts.append(entry)
        if needed > left:
            entry["status"] = "left out"
            entry["why"] = f"{max(left, 0):.0f} s are left, and it takes about {needed:.0f}"
            self._write()
            return
        self._write()
        begin = time.monotonic()
        try:
            for row in part.rows():
                entry["rows"].append(_plain(row))
                self._write()
            entry["status"] = "done"
        except Exception as error:
            entry["status"] = "failed"
            entry["why"] = _line(error)
        spent = time.monotonic() - begin
        entry["seconds"] = round(spent, 2)
        entry["peak_memory_bytes"] = peak_memory()
        if entry["status"] == "done":  # what failed says nothing about how long parts take here
            self._estimated, self._spent = self._estimated + part.seconds, self._spent + spent
        self._write()
        gc.collect()  # what a part held must not take memory from the next

    def rows(self) -> list[Row]:
        """Returns all figures, and for each part that has not ended well a row without a value."""
        found = []
        for part in self.parts:
            found += [Row(**row) for row in part["rows"]]
            if part["status"] != "done":
                found.append(
                    Row(
                        f"{part['name']}: {part['status']}, {part.get('why', 'not ended')}",
                        None,
                        "",
                    )
                )
        return found

    @property
    def holds(self) -> bool:
        """Whether every part was done or left out, and no bar is missed."""
        missed = any(row.holds is False for row in self.rows())
        return not missed and all(part["status"] != "failed" for part in self.parts)


def peak_memory() -> int | None:
    """Returns the most bytes that the device has had in use since the process began, if it says."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _plain(row: Row) -> dict[str, Any]:
    """Returns a row as JSON has it: for a value that is no number it has no word."""
    plain = asdict(row)
    if row.value is None:
        return plain
    if not math.isfinite(row.value):
        return {**plain, "name": f"{row.name} (was {row.value})", "value": None, "holds": False}
    holds = None if row.holds is None else bool(row.holds)
    return {**plain, "value": float(row.value), "holds": holds}


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:_LONGEST]}"
