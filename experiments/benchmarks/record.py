"""One record of cases: written after every figure, so that what stops one loses nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import math
import os
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from dpsgd.files import write_atomically
from dpsgd.runs.fingerprint import environment
from experiments.benchmarks.case import Case, LeftOut, Row

LONGEST = 300
"""Characters of an error that are kept."""
FLAGS = "XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS"


class Record:
    """Measures cases one by one, and keeps what they found in one JSON file: `entries`.

    Raises:
      ValueError: If `file` holds anything else.
    """

    def __init__(self, file: Path | None, area: str, minutes: float = math.inf) -> None:
        self._file, self._area = file, area
        self._end = time.monotonic() + 60 * minutes
        self._estimated = self._spent = 0.0
        self.entries: list[dict[str, Any]] = []
        self._before = {"environments": [], "cases": []} if file is None else read(file)
        places, here = self._before["environments"], hardware()
        if here not in places:
            places.append(here)
        self._environment = places.index(here)

    def _write(self) -> None:
        if self._file is None:
            return
        now = [_key(entry) for entry in self.entries]
        kept = [entry for entry in self._before["cases"] if _key(entry) not in now]
        text = lines(self._before | {"cases": [*kept, *self.entries]}).encode()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, lambda file: file.write(text))

    def run(
        self, case: Case, command: str, given: Mapping[str, Any], *, quick: bool = False
    ) -> None:
        """Measures one case; an error ends it alone, and is kept as one line.

        It is left out if what it needs is missing, or if it does not fit into the time that is
        left: its estimate counts as many times as the cases before it took longer than theirs.
        `command` measures it again, with the options that were `given`, in small if `quick`.
        """
        small = (case.quick or {}) if quick else {}
        setting = {**case.setting, **case.options, **small, **given}
        # A path is of one machine, its name says which rows.
        named = {k: Path(v).name for k, v in given.items() if case.options[k] is None}
        entry: dict[str, Any] = {
            "area": self._area, "name": case.name, "command": command,
            "setting": json.loads(json.dumps(setting | named, default=_plain)),
            "environment": self._environment, "status": "begun", "rows": [],
        }  # fmt: skip
        self.entries.append(entry)
        if why := self._missing(case, setting, quick):
            entry |= {"status": "left out", "why": why}
            return self._write()
        self._write()
        begin, cpu = time.monotonic(), _cpu_seconds()
        try:
            for row in case.measure(**setting):
                shown = row if case.exact or not quick else replace(row, bar="", holds=None)
                entry["rows"].append(asdict(shown))
                self._write()
            entry["status"] = "done"
        except LeftOut as reason:
            entry |= {"status": "left out", "why": str(reason)}
        except Exception as error:
            traceback.print_exc()
            entry |= {"status": "failed", "why": _line(error)}
        spent = time.monotonic() - begin
        entry |= {"seconds": round(spent, 2), "peak_memory_bytes": peak_memory()}
        entry["cpu_seconds"] = round(_cpu_seconds() - cpu, 2)
        if entry["status"] == "done":  # what failed says nothing about how long cases take here
            self._estimated, self._spent = self._estimated + case.seconds, self._spent + spent
        self._write()
        gc.collect()  # what a case held must not take memory from the next

    def _missing(self, case: Case, setting: Mapping[str, Any], quick: bool) -> str:
        """Returns why a case cannot be measured, or nothing."""
        for need in case.needs:
            one_of = need.split(" or ")
            if not any(_there(each, setting) or (quick and each[-2:] == "GB") for each in one_of):
                return f"needs {need}"
        slower = max(1.0, self._spent / self._estimated if self._estimated else 1.0)
        left, needed = self._end - time.monotonic(), case.seconds * slower
        if needed <= left:
            return ""
        return f"{max(left, 0):.0f} s are left, and it takes about {needed:.0f}"

    def rows(self) -> list[Row]:
        """Returns all figures, and for each case that did not end well a row without a value."""
        found = []
        for entry in self.entries:
            found += [Row(**row) for row in entry["rows"]]
            if entry["status"] != "done":
                name = f"{entry['name']}: {entry['status']}, {entry.get('why', 'not ended')}"
                found.append(Row(name, None))
        return found

    def status(self) -> int:
        """Returns 1 if a bar does not hold or a case failed, and 2 if none could be measured."""
        statuses = {entry["status"] for entry in self.entries}
        if "failed" in statuses or any(row.holds is False for row in self.rows()):
            return 1
        return 2 if statuses == {"left out"} else 0


def table(rows: list[Row]) -> str:
    """Returns rows as a table in text."""
    width = max((len(row.name) for row in rows), default=0)
    text = [f"{'':{width}}  {'value':>12} {'± error':>9} {'unit':8} {'bar':10} holds"]
    for row in rows:
        value = "not measured" if row.value is None else f"{row.value:.4g}"
        if row.value is not None and abs(row.value) >= 1e4:
            value = f"{row.value:,.0f}"
        error = "" if row.error is None else f"{row.error:.2g}"
        holds = {None: "", True: "yes", False: "NO"}[row.holds]
        text.append(f"{row.name:{width}}  {value:>12} {error:>9} {row.unit:8} {row.bar:10} {holds}")
    return "\n".join(text)


def read(file: Path) -> dict[str, Any]:
    """Returns a record, an empty one of a file that is not there.

    Raises:
      ValueError: If the file holds anything else.
    """
    if not file.exists():
        return {"environments": [], "cases": []}
    try:
        found = json.loads(file.read_text())
        [Row(**row) for entry in found["cases"] for row in entry["rows"]]
        list(found["environments"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{file} is not a record of benchmarks: name another file") from None
    return found


def lines(record: dict[str, Any]) -> str:
    """Returns a record as JSON, a row on a line."""
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    flat = re.compile(r"^( +)\{\n\s+\"name\": [^{}]*?\n\1\}", re.M)
    return flat.sub(lambda found: _flat(found[0], found[1]), text) + "\n"


def _flat(row: str, margin: str) -> str:
    return margin + json.dumps(json.loads(row), ensure_ascii=False)


@functools.cache
def hardware() -> dict[str, Any]:
    """Returns versions, devices, the processor and the flags of this process."""
    found = environment() | {k: os.environ[k] for k in FLAGS if k in os.environ}
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        found |= {"cpu": model[1]} if model else {}
    return found


def peak_memory() -> int | None:
    """Returns the most bytes that the device has had in use since the process began, if it says."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _cpu_seconds() -> float:
    """Returns the CPU time of this process, and of those that it began and that have ended."""
    return sum(os.times()[:4])


def free_memory() -> float:
    """Returns the bytes that a process could take; 0 where nothing says so."""
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        return 1024.0 * int(found[1]) if found else 0.0
    return 0.0


def _there(need: str, setting: Mapping[str, Any]) -> bool:
    if need.startswith("--"):
        return setting[need[2:].replace("-", "_")] is not None
    if need.endswith(" GB"):
        return free_memory() >= 1e9 * float(need[:-3])
    package, _, _ = need.partition(".")
    return all(importlib.util.find_spec(name) is not None for name in (package, need))


def _plain(value: Any) -> Any:
    """Returns what JSON has of a setting that is none of its values."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return entry["area"], entry["name"], json.dumps(entry["setting"], sort_keys=True)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:LONGEST]}"
