"""Measures cases one by one; a record has one line of JSON for each."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import re
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsgd.runs.environment import environment
from experiments.benchmarks.case import Case, Figure, LeftOut

FLAGS = "XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS"
"""Environment variables that decide speed."""
SPEED = "s", "ms", "CPU s", "CPU min", "x", "ex/s", "rows/s", "M/s"
"""Units of speed, whose bars are left out with `--quick`."""


class Record:
    """Entries of measured cases with their figures, which are printed at once.

    Args:
      file: File to which every entry is appended, a line of JSON each; None for none.
      minutes: Time after which no further case begins.
    """

    def __init__(self, file: Path | None = None, minutes: float = math.inf) -> None:
        self._file, self._end = file, time.monotonic() + 60 * minutes
        self.entries: list[dict[str, Any]] = []

    def run(self, case: Case, command: str, given: Mapping[str, Any], quick: bool = False) -> None:
        """Measures one case, and records an error in one line.

        A case is left out if its estimate exceeds the remaining time.
        """
        setting = {**case.setting, **((case.quick or {}) if quick else {}), **given}
        entry: dict[str, Any] = {
            "area": case.area, "name": case.name, "command": command, "setting": setting,
            "status": "done", "rows": [],
        }  # fmt: skip
        begin, cpu = time.monotonic(), sum(os.times()[:4])
        try:
            if case.seconds > (remaining := self._end - begin):
                raise LeftOut(f"{remaining:.0f} s are left, and it takes about {case.seconds:.0f}")
            for row in case.function()(**setting):
                figure_row = (
                    row._replace(bar="", holds=None) if quick and row.unit in SPEED else row
                )
                entry["rows"].append(figure_row._asdict())
                print(line(figure_row), flush=True)
        except LeftOut as reason:
            entry |= {"status": "left out", "why": str(reason)}
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split()) or "no message"
            entry |= {"status": "failed", "why": f"{type(error).__name__}: {text:.300}"}
        entry["seconds"] = round(time.monotonic() - begin, 2)
        entry["cpu_seconds"] = round(sum(os.times()[:4]) - cpu, 2)
        if entry["status"] != "done":
            print(f"{case.name}: {entry['status']}, {entry['why']}")
        self.entries.append(entry)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(entry | {"environment": hardware()}) + "\n")
        gc.collect()  # memory of this case must not be missing in the next

    def status(self) -> int:
        """Returns the exit status of the command.

        1 if a bar does not hold or a case failed, 2 if every case was left out, else 0.
        """
        statuses = {entry["status"] for entry in self.entries}
        missed = any(row["holds"] is False for entry in self.entries for row in entry["rows"])
        return 1 if missed or "failed" in statuses else 2 if statuses == {"left out"} else 0


def line(row: Figure) -> str:
    """Returns a figure as a line of text."""
    value = "not measured" if row.value is None else f"{row.value:.4g}"
    if row.value is not None and abs(row.value) >= 1e4:
        value = f"{row.value:,.0f}"
    error = "" if row.error is None else f" ± {row.error:.2g}"
    holds = {None: "", True: ", holds", False: ", MISSED"}[row.holds]
    return f"{row.name:72}  {value}{error} {row.unit}{row.bar and f'  ({row.bar}{holds})'}"


@functools.cache
def hardware() -> dict[str, Any]:
    """Returns versions, devices, processor and flags of this process."""
    facts = environment() | {k: os.environ[k] for k in FLAGS if k in os.environ}
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        facts |= {"cpu": model[1]} if model else {}
    return facts
